"""What `host()` and `mgr.branch()` return: awaitable, and an async context manager."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any, Generic, NoReturn, TypeVar

__all__ = ["Pending"]

T = TypeVar("T")


class Pending(Generic[T]):
    """Something that is about to be made.

    `await` it to get it, or enter it with `async with`, which also ends it. Unpacking it or using it in another way
    without `await` raises with the fix in the message; dropping it unused warns.

    Args:
        make: makes it.
        end: ends it.
        call: how the call reads in the user's code, for messages.
    """

    __slots__ = ("_call", "_end", "_made", "_make", "_used")

    def __init__(self, make: Callable[[], Awaitable[T]], end: Callable[[T], Awaitable[None]], *, call: str) -> None:
        self._make = make
        self._end = end
        self._call = call
        self._used = False

    def __await__(self) -> Generator[Any, Any, T]:
        self._used = True
        return self._make().__await__()

    async def __aenter__(self) -> T:
        self._used = True
        self._made = await self._make()
        return self._made

    async def __aexit__(self, *exc_info: object) -> None:
        await self._end(self._made)

    def __repr__(self) -> str:
        return f"<{self._call}, not awaited>"

    def __iter__(self) -> Iterator[Any]:
        self.complain()

    def __getitem__(self, index: object) -> NoReturn:
        self.complain()

    def __len__(self) -> int:  # noqa: PLE0303  (it exists to raise)
        self.complain()

    def __enter__(self) -> NoReturn:
        self._used = True
        raise TypeError(f"{self._call} is asynchronous: write `async with {self._call} as ...`, or use ramet.blocking")

    def __exit__(self, *exc_info: object) -> None: ...

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._used = True
        raise AttributeError(
            f"{name!r}: {self._call} has not been awaited: write `await {self._call}` or `async with {self._call}`"
        )

    def complain(self) -> NoReturn:
        """Say what is missing where it was used as if it were there already."""
        self._used = True
        raise TypeError(
            f"{self._call} has not been awaited: write `... = await {self._call}` or `async with {self._call} as ...`"
        )

    def __del__(self) -> None:
        if not self._used:
            warnings.warn(f"{self._call} was never awaited nor entered", RuntimeWarning, stacklevel=2)
