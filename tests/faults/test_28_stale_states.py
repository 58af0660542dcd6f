"""Fault 28: a state from the past is stepped in a mutable environment, silently wrong."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ramet import BranchManager, ForeignState, StaleState, host
from tests.faults.probes import Cloneable, Counter, Pure, Replayable


async def test_a_state_from_the_past_is_stepped() -> None:
    """A branch that has moved past a state refuses it, names both instants, and stays usable."""
    async with host(Counter) as env, BranchManager.create(env) as mgr:
        first, _ = await env.reset()
        await mgr.checkpoint("start", first)
        for branch, at in ((env, first), await mgr.branch("start"), await env.fork()):
            second = (await branch.step(at, 5)).next_state
            with pytest.raises(StaleState) as caught:
                await branch.step(at, 1)
            error = caught.value
            assert error.branch == branch.name
            assert error.at == error.state + 1
            assert str(error.at) in str(error)
            assert str(error.state) in str(error)
            third = (await branch.step(second, 2)).next_state
            assert third.observation == 7
            with pytest.raises(StaleState):
                await branch.hidden(second)
            with pytest.raises(StaleState):
                await mgr.checkpoint("late", second, env=branch)
            assert mgr.checkpoints == ("start",)
            await branch.reset()
            with pytest.raises(StaleState):
                await branch.step(third, 1)


async def test_a_stale_state_among_many() -> None:
    """`step_all` refuses it in its place and steps the others."""
    async with host(Counter) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 3) as pairs:
            await pairs[1][0].step(pairs[1][1], 1)
            results: Any = await mgr.step_all(pairs, [1, 1, 1])
            assert [type(result).__name__ for result in results] == ["StepResult", "StaleState", "StepResult"]


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
@pytest.mark.parametrize("strategy", ["clone", "process_fork", "action_replay"])
async def test_a_live_object_has_moved_on(strategy: Any) -> None:
    """An object in the agent's process refuses a stale state too, to step and to checkpoint."""
    factory = {"clone": Cloneable, "process_fork": Counter, "action_replay": Replayable}[strategy]
    async with BranchManager.create(factory(), strategy=strategy, env_factory=factory) as mgr:
        first, _ = await mgr.env.reset()
        second = (await mgr.env.step(first, 5)).next_state
        with pytest.raises(StaleState):
            await mgr.env.step(first, 1)
        with pytest.raises(StaleState):
            await mgr.checkpoint("late", first, [])
        assert mgr.checkpoints == ()
        await mgr.checkpoint("start", second, [5])
        async with mgr.branch("start") as (branch, at):
            await branch.step(at, 1)
            with pytest.raises(StaleState):
                await branch.step(at, 1)
        assert (await mgr.env.step(second, 1)).next_state.observation == 6


async def test_a_stored_state_cannot_be_stepped() -> None:
    """A pickled state keeps what it shows and loses its reference: a mutable environment refuses it."""
    async with host(Counter) as env:
        state, _ = await env.reset()
        stored = pickle.loads(pickle.dumps(state))
        assert (stored.observation, stored.metadata) == (state.observation, state.metadata)
        with pytest.raises(ForeignState, match="unpickled"):
            await env.step(stored, 1)


async def test_a_pure_environment_can_be_stepped_from_any_state() -> None:
    """Where the state is all there is, nothing is stale."""
    async with host(Pure) as env:
        first, _ = await env.reset()
        second = (await env.step(first, 5)).next_state
        for state in (first, pickle.loads(pickle.dumps(first))):
            assert (await env.step(state, 1)).next_state.observation == 1
        assert (await env.step(second, 1)).next_state.observation == 6
