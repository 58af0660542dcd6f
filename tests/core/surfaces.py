"""The async and the blocking API behind one interface, so that a promise is written once and tested on both.

A scenario is an async function that takes a surface. On the async surface it runs on an event loop; on the
blocking one nothing in it ever waits for a loop, and `finish` runs it without any.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

import pytest

import ramet
from ramet import blocking

T = TypeVar("T")

# The process of the tests has threads: NumPy's, and the one from which anyio's test runner drives trio. So a warning
# comes with every fork of a live object; `test_local.py` asserts that it comes, and that it does not in a program.
threads_here = pytest.mark.filterwarnings("ignore:this process is forked:ramet.errors.ForkSafetyWarning")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise AssertionError("it waited for an event loop")


class Surface(Protocol):
    """What a scenario is written against. `env` is anything with async `reset`, `step`, `call`, `fork`."""

    def host(self, factory: Any, **options: Any) -> AbstractAsyncContextManager[Any]: ...

    def live(self, env: Any) -> Any: ...

    def manager(self, env: Any, **options: Any) -> AbstractAsyncContextManager[Any]: ...


class Plain:
    """A synchronous environment or proxy behind async methods. `raw` is the thing itself."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    async def reset(self, **arguments: Any) -> Any:
        return self.raw.reset(**arguments)

    async def step(self, state: Any, action: Any) -> Any:
        return self.raw.step(state, action)

    async def call(self, name: str, *args: Any) -> Any:
        if isinstance(self.raw, blocking.BranchEnvironment):
            return self.raw.call(name, *args)
        return getattr(self.raw, name)(*args)

    async def hidden(self, state: Any) -> Any:
        return self.raw.hidden(state) if isinstance(self.raw, blocking.BranchEnvironment) else state.hidden

    async def fork(self, n: int | None = None, **options: Any) -> Any:
        made = self.raw.fork(n, **options)
        return _wrapped(made) if n is None else [_wrapped(pair) for pair in made]

    async def aclose(self) -> None:
        self.raw.close()


def raw(env: Any) -> Any:
    """What the manager is to be given, and what a user holds."""
    return env.raw if isinstance(env, Plain) else env


def _wrapped(pair: Any) -> tuple[Plain, Any]:
    env, state = pair
    return Plain(env), state


class _BlockingBranch:
    def __init__(self, make: Callable[[], Any], wrap: Callable[[Any], Any]) -> None:
        self._make = make
        self._wrap = wrap

    def __await__(self) -> Any:
        yield from ()
        return self._wrap(self._make())

    async def __aenter__(self) -> Any:
        self._made = self._make()
        return self._wrap(self._made.__enter__())

    async def __aexit__(self, *exc_info: object) -> None:
        self._made.__exit__(*exc_info)


class _BlockingManager:
    def __init__(self, manager: blocking.BranchManager) -> None:
        self.raw = manager
        self.strategy = manager.strategy

    @property
    def checkpoints(self) -> tuple[str, ...]:
        return self.raw.checkpoints

    async def checkpoint(self, name: str, state: Any, *args: Any, env: Any = None, **options: Any) -> None:
        self.raw.checkpoint(name, state, *args, env=None if env is None else raw(env), **options)

    def branch(self, name: str, **options: Any) -> _BlockingBranch:
        return _BlockingBranch(lambda: self.raw.branch(name, **options), _wrapped)

    def branches(self, name: str, n: int, **options: Any) -> _BlockingBranch:
        return _BlockingBranch(lambda: self.raw.branches(name, n, **options), lambda pairs: list(map(_wrapped, pairs)))

    async def release(self, name: str) -> None:
        self.raw.release(name)

    def tree(self) -> Any:
        return self.raw.tree()


class BlockingSurface:
    """`ramet.blocking`."""

    @asynccontextmanager
    async def host(self, factory: Any, **options: Any) -> AsyncIterator[Any]:
        with blocking.host(factory, **options) as env:
            yield Plain(env)

    def live(self, env: Any) -> Any:
        return Plain(env)

    @asynccontextmanager
    async def manager(self, env: Any, **options: Any) -> AsyncIterator[Any]:
        with blocking.BranchManager.create(raw(env), **options) as manager:
            yield _BlockingManager(manager)


class AsyncSurface:
    """`ramet` itself."""

    def host(self, factory: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        return ramet.host(factory, **options)

    def live(self, env: Any) -> Any:
        return Plain(env)

    def manager(self, env: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        return ramet.BranchManager.create(raw(env), **options)
