"""Fault 27: the environment's `step` never returns."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest

from ramet import BranchClosed, BranchLost, BranchManager, StepTimeout, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import Endless
from tests.helpers import alive, eventually, wait_until

AT_ONCE = 3.0  # seconds; far below any grace or bounded wait, far above a kill on a busy machine


async def test_the_step_never_returns() -> None:
    """`step_timeout` ends the branch with an error that is a TimeoutError too; its siblings go on."""
    async with host(Endless, step_timeout=0.3) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 2) as ((bad, at), (good, also)):
            with pytest.raises(StepTimeout) as caught:
                await bad.step(at, -1)
            assert isinstance(caught.value, TimeoutError)
            assert isinstance(caught.value, BranchLost)
            assert (caught.value.branch, caught.value.pid, caught.value.timeout) == (bad.name, bad.pid, 0.3)
            await eventually(lambda: not alive(bad.pid))
            with pytest.raises(StepTimeout):
                await bad.step(at, 1)
            assert (await good.step(also, 1)).next_state.observation == 1


async def test_a_step_among_many_never_returns() -> None:
    """`step_all` gives the timeout in the place of the branch that took too long, and the others' results."""
    async with host(Endless, step_timeout=0.5) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 4) as pairs:
            results: Any = await mgr.step_all(pairs, [1, -1, 1, 1])
            first, bad, *others = results
            assert isinstance(bad, StepTimeout)
            assert [result.next_state.observation for result in (first, *others)] == [1, 1, 1]
            await eventually(lambda: not alive(pairs[1][0].pid))


async def test_the_host_itself_never_returns() -> None:
    """A host that takes too long is ended, and what is left of its tree with the block, without any grace."""
    async with host(Endless, step_timeout=0.3, grace=60.0) as env:
        state, _ = await env.reset()
        with pytest.raises(StepTimeout):
            await env.step(state, -1)
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize("what", ["branch", "fork", "manager", "host"])
async def test_the_block_is_left_during_a_step_that_never_returns(what: str) -> None:
    """Leaving the block ends the process at once, and the call that was out says so."""
    outcome: list[Any] = []

    async def step(env: Any, state: Any) -> None:
        with pytest.raises(BranchClosed) as caught:
            await env.step(state, -1)
        outcome.append(caught.value)

    async with anyio.create_task_group() as tg:
        env = await host(Endless, grace=60.0)
        mgr = BranchManager.create(env)
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        branch, at = await mgr.branch("start")
        if what == "fork":
            branch, at = await env.fork()
        if what == "host":
            branch, at = env, state
        tg.start_soon(step, branch, at)
        await eventually(lambda: branch._link.busy)  # type: ignore[union-attr]
        began = time.monotonic()
        await {"branch": branch, "fork": branch, "manager": mgr, "host": env}[what].aclose()
        assert time.monotonic() - began < AT_ONCE
        assert not alive(branch.pid)
    assert len(outcome) == 1
    await mgr.aclose()
    await env.aclose()


async def test_the_block_is_left_after_a_cancelled_step_that_never_returns() -> None:
    """A branch whose call was given up is ended at once as well; a host gets its grace to close, and no more."""
    began = time.monotonic()
    async with host(Endless, grace=0.2) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at):
            with anyio.move_on_after(0.1):
                await branch.step(at, -1)
            began = time.monotonic()
        assert time.monotonic() - began < AT_ONCE
        with anyio.move_on_after(0.1):
            await env.step(state, -1)
        began = time.monotonic()
    assert time.monotonic() - began < AT_ONCE


def test_a_blocking_step_never_returns() -> None:
    """The same without an event loop."""
    with blocking_host(Endless, step_timeout=0.3) as env, BlockingManager.create(env) as mgr:
        state, _ = env.reset()
        mgr.checkpoint("start", state)
        with mgr.branch("start") as (bad, at), mgr.branch("start") as (good, also):
            with pytest.raises(StepTimeout):
                bad.step(at, -1)
            wait_until(lambda: not alive(bad.pid))
            assert good.step(also, 1).next_state.observation == 1
