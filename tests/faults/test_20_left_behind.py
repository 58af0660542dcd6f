"""Fault 20: a "fork" that quietly leaves part of the state behind.

Connections are in `test_32_43_remote`, an async environment's tasks and threads in `test_31_async_environments`.
"""

from __future__ import annotations

from typing import Any

import pytest

from ramet import BranchManager, CannotBranch, ForkSafetyWarning, host
from ramet.blocking import BranchManager as BlockingManager
from tests.faults.probes import Mixed, OnGraphicsCard, Threaded

SUFFIX = [1, -2, 3, 0, 5]


async def play(env: Any, state: Any) -> list[Any]:
    seen = []
    for action in SUFFIX:
        result = await env.step(state, action)
        state = result.next_state
        seen.append((state.observation, result.reward))
    return seen


async def test_a_fork_leaves_part_of_the_state_behind() -> None:
    """Generators, closures, iterators, random state, environment and context variables go on from where they were."""
    async with host(Mixed) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        state = (await env.step(state, 4)).next_state
        await mgr.checkpoint("start", state)
        fork, at_fork = await env.fork()
        async with mgr.branches("start", 2) as ((one, at_one), (two, at_two)):
            seen = await play(env, state)
            assert await play(one, at_one) == seen
            assert await play(two, at_two) == seen
            assert await play(fork, at_fork) == seen


async def test_a_graphics_card_is_left_behind() -> None:
    """A process that has opened /dev/nvidia* is not forked, in any way; the refusal says what to do."""
    async with host(OnGraphicsCard) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        for _ in range(2):
            with pytest.raises(CannotBranch, match="/dev/nvidia0") as caught:
                await mgr.checkpoint("start", state)
            assert "CUDA" in caught.value.reason
            assert "keep models in the agent" in caught.value.instead
            with pytest.raises(CannotBranch, match="/dev/nvidia0"):
                await env.fork()
        assert (await env.step(state, 1)).next_state.observation == 1
        await env.call("leave")
        fork, at = await env.fork()
        assert (await fork.step(at, 1)).next_state.observation == 2


async def test_threads_are_left_behind() -> None:
    """A thread of the environment is not copied: the fork is refused by its name, or warned of where it was allowed."""
    async with host(Threaded) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        with pytest.raises(CannotBranch, match="prefetcher"):
            await mgr.checkpoint("start", state)
        with pytest.raises(CannotBranch, match="prefetcher"):
            await env.fork()
        assert mgr.checkpoints == ()
    async with host(Threaded, allow_threads=True) as env:
        await env.reset()
        with pytest.warns(ForkSafetyWarning, match="prefetcher"):
            fork, at = await env.fork()
        assert (await fork.step(at, 1)).next_state.observation == 1


def test_threads_of_the_agent_are_left_behind() -> None:
    """An object in an agent with threads is forked with a warning that names them, and `host()`."""
    env = Threaded()
    try:
        with BlockingManager.create(env, strategy="process_fork") as mgr:
            with pytest.warns(ForkSafetyWarning, match=r"prefetcher.*host\(factory\)"):
                mgr.checkpoint("start", env.reset()[0])
            with mgr.branch("start") as (branch, at):
                assert branch.step(at, 1).next_state.observation == 1
    finally:
        env.stop.set()
        env.thread.join()


async def test_what_was_carried_is_reported() -> None:
    """An exact copy says that nothing was reseeded, and a reseeded one names each generator."""
    async with host(Mixed) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (exact, _), mgr.branch("start", seed=3) as (fresh, _):
            assert exact.reseeded == ()
            assert "env.random" in fresh.reseeded
            assert "random" in fresh.reseeded
