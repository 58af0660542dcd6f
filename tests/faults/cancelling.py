"""Cancel an operation at each of its suspensions, one after the other, instead of at some of them."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import anyio

Operation = Callable[[], Coroutine[Any, Any, object]]

MODES = ("scope", "task")
"""By a cancel scope around it, or by asyncio's own `Task.cancel`, as `asyncio.timeout` and Ctrl-C do."""

_PATIENCE = 200  # suspensions; more than any operation has here


@types.coroutine
def _counted(work: Coroutine[Any, Any, object], suspended: Callable[[int], None]) -> Generator[Any, Any, object]:
    """Runs `work` and calls `suspended(n)` just before the event loop hears of its n-th suspension."""
    resume: Callable[[Any], Any] = work.send
    value: Any = None
    number = 0
    while True:
        try:
            trap = resume(value)
        except StopIteration as stop:
            return stop.value
        suspended(number)
        number += 1
        try:
            value = yield trap
            resume = work.send
        except BaseException as error:
            value, resume = error, work.throw


async def _cancelled_at(operation: Operation, moments: tuple[int, ...], mode: str) -> int:
    """Runs the operation with a cancellation at each of these suspensions; returns how many there were."""
    reached = 0
    cancel: list[Callable[[], object]] = []

    def suspended(number: int) -> None:
        nonlocal reached
        reached = number + 1
        if number in moments:
            cancel[moments.index(number)]()

    if mode == "task":

        async def run() -> None:
            await _counted(operation(), suspended)

        task = asyncio.ensure_future(run())
        cancel += [task.cancel for _ in moments]
        await asyncio.wait([task])
        if not task.cancelled():
            await task
    else:
        with anyio.CancelScope() as outer, anyio.CancelScope() as inner:
            cancel += [inner.cancel, outer.cancel]
            await _counted(operation(), suspended)
    return reached


async def cancel_everywhere(
    operation: Operation, check: Callable[[], Awaitable[None]], *, mode: str, twice: int = 0
) -> int:
    """Runs `operation` again and again, cancelled one suspension later each time, until it has no more of them.

    Args:
        operation: makes the coroutine to run.
        check: called after each run; raises if something was left.
        mode: one of `MODES`.
        twice: cancel again while the first cancellation is cleaned up, at each of so many suspensions.

    Returns:
        How many suspensions it has.
    """
    for first in range(_PATIENCE):
        reached = await _cancelled_at(operation, (first,), mode)
        await check()
        if reached <= first:
            return first
        for second in range(first + 1, first + 1 + twice):
            reached = await _cancelled_at(operation, (first, second), mode)
            await check()
            if reached <= second:
                break
    raise AssertionError(f"the operation has more than {_PATIENCE} suspensions")
