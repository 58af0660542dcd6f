"""Run the coroutines of an async environment in a process that has no event loop of its own.

The loop runs only while a call is in progress, so a fork never copies a running one; the loop's worker threads
are ended before a fork, and a forked child leaves the inherited loop alone and makes a new one.
"""

from __future__ import annotations

import inspect
import sys
import time
from typing import TYPE_CHECKING, Any

from ramet.process.descriptors import put_null_over
from ramet.process.safety import python_threads

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

__all__ = ["LoopRunner"]

_abandoned: list[Any] = []
_WORKER = "environment"
_IDLE_WITHIN = 0.5  # seconds that worker threads without work have to end


class LoopRunner:
    """An asyncio loop that is made at the first coroutine, and anew after a fork."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers: ThreadPoolExecutor | None = None

    @property
    def used(self) -> bool:
        """Whether there was a coroutine yet."""
        return self._loop is not None

    def finish(self, value: Any) -> Any:
        """`value` itself, or what it comes to if it is awaitable."""
        if not inspect.isawaitable(value):
            return value
        return self._ready_loop().run_until_complete(_await(value))

    def before_fork(self) -> None:
        """End the worker threads that `asyncio.to_thread` left; the next call gets new ones.

        One that is still at work is not waited for: the check of threads will find it.
        """
        if self._workers is None:
            return
        self._workers.shutdown(wait=False)
        self._workers = None
        until = time.monotonic() + _IDLE_WITHIN
        for thread in python_threads():
            if thread.name.startswith(_WORKER):
                thread.join(max(0.0, until - time.monotonic()))

    def left_behind(self) -> str:
        """The tasks that wait in the loop, which a child will not have, as a text; empty if there is none."""
        asyncio = sys.modules.get("asyncio")
        if self._loop is None or asyncio is None:
            return ""
        names = sorted(task.get_name() for task in asyncio.all_tasks(self._loop))
        return f"tasks of the environment do not exist in the children: {', '.join(names)}" if names else ""

    def descriptors(self) -> list[int]:
        """The loop's own descriptors, which no child shares."""
        return [] if self._loop is None else _loop_descriptors(self._loop)

    def after_fork(self) -> None:
        """In the child: let the inherited loop be, without touching what the parent still uses."""
        assert self._loop is not None
        # Closing it would unregister descriptors in the epoll set that is shared with the parent.
        _abandoned.append(self._loop)
        put_null_over(_loop_descriptors(self._loop))
        self._loop = None

    def _ready_loop(self) -> asyncio.AbstractEventLoop:
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        if self._workers is None:
            self._workers = ThreadPoolExecutor(thread_name_prefix=_WORKER)
            self._loop.set_default_executor(self._workers)
        return self._loop


async def _await(value: Any) -> Any:
    return await value


def _loop_descriptors(loop: Any) -> list[int]:
    owners = (getattr(loop, "_selector", None), getattr(loop, "_ssock", None), getattr(loop, "_csock", None))
    return [owner.fileno() for owner in owners if owner is not None]
