"""Run an async function many times, a bounded number at once, and read the results as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectSendStream

from ramet.process.plans import draw_seeds
from ramet.types import Seed

__all__ = ["mapped"]

T = TypeVar("T")


@asynccontextmanager
async def mapped(
    function: Callable[[int | None], Awaitable[T]], n: int, *, limit: int, ordered: bool, seed: Seed
) -> AsyncIterator[AsyncIterator[T]]:
    """Call `function` with a seed for each of `n` times; gives an iterator over what it returned.

    Raises:
        ValueError: `n` is negative or `limit` is not positive.
    """
    if n < 0 or limit < 1:
        raise ValueError(f"map needs n >= 0 and limit >= 1, got n={n}, limit={limit}")
    work = iter(list(enumerate(draw_seeds(seed, n))))
    send, receive = anyio.create_memory_object_stream[tuple[int, Any]](0)
    async with anyio.create_task_group() as group, send, receive:
        for _ in range(min(n, limit)):
            group.start_soon(_work, function, work, send.clone())
        send.close()
        results = _in_order(receive) if ordered else _as_they_come(receive)
        try:
            async with aclosing(results):
                yield results
        finally:
            group.cancel_scope.cancel()  # before the stream is closed, which would be an error in who sends


async def _work(
    function: Callable[[int | None], Awaitable[T]],
    work: Iterator[tuple[int, int | None]],
    out: MemoryObjectSendStream[tuple[int, T]],
) -> None:
    async with out:
        for number, seed in work:
            await out.send((number, await function(seed)))


async def _as_they_come(results: AsyncIterator[tuple[int, T]]) -> AsyncGenerator[T, None]:
    async for _, result in results:
        yield result
    await anyio.lowlevel.checkpoint_if_cancelled()  # or a cancelled run looks like one that is complete


async def _in_order(results: AsyncIterator[tuple[int, T]]) -> AsyncGenerator[T, None]:
    early: dict[int, T] = {}
    turn = 0
    async for number, result in results:
        early[number] = result
        while turn in early:
            yield early.pop(turn)
            turn += 1
    await anyio.lowlevel.checkpoint_if_cancelled()
