"""Fault 31: an inherited event loop or executor in an async environment hangs the child for ever."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from ramet import BranchManager, CannotBranch, EnvironmentSpec, ForkSafetyWarning, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import AsyncCounter, Tools

PLENTY = 20.0


async def test_an_inherited_event_loop_or_executor_hangs_the_child() -> None:
    """`asyncio.to_thread` and subprocesses work in the host, every branch and every fork, at any moment."""
    with anyio.fail_after(PLENTY):
        async with host(Tools) as env, BranchManager.create(env) as mgr:
            state, _ = await env.reset()
            state = (await env.step(state, 1)).next_state
            await mgr.checkpoint("start", state)
            async with mgr.branches("start", 4) as pairs:
                results: Any = await mgr.step_all(pairs, [10, 20, 30, 40])
                assert [result.next_state.observation for result in results] == [11, 21, 31, 41]
                branch = pairs[0][0]
                fork, at = await branch.fork()
                assert (await fork.step(at, 5)).next_state.observation == 16
                assert (await branch.step(results[0].next_state, 1)).next_state.observation == 12
                for each in (env, branch, fork):
                    assert await each.call("tool", 21) == 42
                    assert await each.call("run_process") == "hi\n"
            assert (await env.step(state, 1)).next_state.observation == 2


def test_a_blocking_agent_steps_an_async_environment() -> None:
    """A hosted async environment needs no event loop in the agent."""
    with blocking_host(Tools) as env, BlockingManager.create(env) as mgr:
        state, _ = env.reset()
        mgr.checkpoint("start", env.step(state, 1).next_state)
        for _ in range(2):
            with mgr.branch("start") as (branch, at):
                assert branch.step(at, 1).next_state.observation == 2


async def test_tasks_that_run_on_do_not_exist_in_the_copies() -> None:
    """A task that the environment left in its loop is named in a warning: a copy does not have it."""
    with anyio.fail_after(PLENTY):
        async with host(Tools) as env:
            state, _ = await env.reset()
            await env.call("in_background")
            with pytest.warns(ForkSafetyWarning, match="poller"):
                fork, at = await env.fork()
            assert (await fork.step(at, 1)).next_state.observation == 1
            await env.call("stop_background")
            fork, at = await env.fork()
            assert (await env.step(state, 1)).next_state.observation == 1


async def test_a_worker_thread_that_does_not_end() -> None:
    """A fork does not wait for ever for a tool that is still running: it is refused, by name."""
    with anyio.fail_after(PLENTY):
        async with host(Tools) as env:
            await env.reset()
            await env.call("busy_thread")
            with pytest.raises(CannotBranch, match="environment_0"):
                await env.fork()
            await env.call("idle_thread")
            fork, at = await env.fork()
            assert (await fork.step(at, 3)).next_state.observation == 3


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
async def test_a_live_async_object_is_forked(anyio_backend: Any) -> None:
    """The copies of a live async environment get a loop of their own, whatever loop the agent runs."""
    with anyio.fail_after(PLENTY):
        async with BranchManager.create(Tools(), strategy="process_fork") as mgr:
            state, _ = await mgr.env.reset()
            if anyio_backend[0] != "trio":
                state = (await mgr.env.step(state, 1)).next_state
            await mgr.checkpoint("start", state)
            async with mgr.branches("start", 2) as pairs:
                for branch, at in pairs:
                    begun = at.observation
                    assert (await branch.step(at, 5)).next_state.observation == begun + 5
                    assert await branch.call("run_process") == "hi\n"


@pytest.mark.parametrize("strategy", ["direct", "clone"])
async def test_an_async_object_of_asyncio_under_trio(strategy: Any, anyio_backend: Any) -> None:
    """In the agent's process an async environment runs on the loop that it was written for, or is refused."""
    env = AsyncCounter()
    env.spec = EnvironmentSpec("async", pure_step=strategy == "direct", supports_clone=True)  # type: ignore[attr-defined]
    if anyio_backend[0] == "trio":
        with pytest.raises(CannotBranch, match="host it"):
            BranchManager.create(env, strategy=strategy)
    else:
        async with BranchManager.create(env, strategy=strategy) as mgr:
            state, _ = await mgr.env.reset()
            assert (await mgr.env.step(state, 1)).next_state.observation == 1
    with pytest.raises(CannotBranch, match="host it"):
        BlockingManager.create(env, strategy=strategy)
