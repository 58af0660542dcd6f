"""Fault 41: a state of one branch is stepped on, or checkpointed with, another environment, silently wrong."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from ramet import BranchManager, ForeignState, Hidden, State, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import Cloneable, Counter, Replayable

pytestmark = pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")

FACTORIES: dict[Any, Callable[[], Any]] = {
    "clone": Cloneable,
    "process_fork": Counter,
    "action_replay": Replayable,
}


async def refuses(env: Any, state: State, mgr: BranchManager | None = None) -> None:
    """The environment takes the state for neither a step nor a checkpoint nor its hidden part, and is unharmed."""
    before = await env.call("total")
    with pytest.raises(ForeignState) as caught:
        await env.step(state, 100)
    assert caught.value.branch == env.name
    assert caught.value.owner in str(caught.value)
    if state.hidden is Hidden.IN_BRANCH:
        with pytest.raises(ForeignState):
            await env.hidden(state)
    if mgr is not None:
        with pytest.raises(ForeignState):
            await mgr.checkpoint("foreign", state, env=env)
        assert "foreign" not in mgr.checkpoints
    assert await env.call("total") == before


@pytest.mark.parametrize("strategy", [*FACTORIES])
@pytest.mark.parametrize("where", ["host", "live"])
async def test_a_state_is_stepped_on_another_branch(strategy: Any, where: str) -> None:
    """A state that a sibling, a parent or a child has reached is refused, under every strategy."""
    factory = FACTORIES[strategy]
    env: Any = await host(factory) if where == "host" else factory()
    async with BranchManager.create(env, strategy=strategy, env_factory=factory) as mgr:
        first, _ = await mgr.env.reset(seed=1)
        second = (await mgr.env.step(first, 1)).next_state
        await mgr.checkpoint("start", second, [1], {"seed": 1})
        async with mgr.branches("start", 2) as ((one, at_one), (two, at_two)):
            after = (await one.step(at_one, 10)).next_state
            await refuses(two, after, mgr)
            await refuses(two, at_one, mgr)
            await refuses(mgr.env, after, mgr)
            await refuses(mgr.env, at_two, mgr)
            await refuses(one, first, mgr)
            assert (await two.step(at_two, 20)).next_state.observation == 21
            assert (await one.step(after, 10)).next_state.observation == 21
        with pytest.raises(ForeignState, match="env="):
            await mgr.checkpoint("foreign", after)
    if where == "host":
        await env.aclose()


async def test_the_very_instant_that_a_branch_was_made_from() -> None:
    """A fork takes the state that its parent stood at, and nothing that came before or after."""
    async with host(Counter) as env:
        first, _ = await env.reset()
        second = (await env.step(first, 1)).next_state
        fork, at = await env.fork()
        third = (await env.step(second, 1)).next_state
        await refuses(fork, first)
        await refuses(fork, third)
        deeper, _ = await fork.fork()
        assert (await fork.step(second, 5)).next_state.observation == 6
        assert (await deeper.step(second, 7)).next_state.observation == 8
        await refuses(env, at)


async def test_states_of_nested_managers() -> None:
    """Neither the outer branch nor the inner one takes what the other has reached."""
    async with host(Counter) as env, BranchManager.create(env) as outer:
        state, _ = await env.reset()
        await outer.checkpoint("start", state)
        async with outer.branch("start") as (branch, at), BranchManager.create(branch) as inner:
            at = (await branch.step(at, 1)).next_state
            await inner.checkpoint("start", at)
            async with inner.branch("start") as (young, at_young):
                after = (await young.step(at_young, 1)).next_state
                await refuses(branch, after, inner)
                await refuses(env, after, outer)
                with pytest.raises(ForeignState, match="env="):
                    await outer.checkpoint("foreign", after)
                with pytest.raises(ForeignState, match="env="):
                    await inner.checkpoint("foreign", after)
                later = (await branch.step(at, 1)).next_state
                await refuses(young, later, inner)
                await outer.checkpoint("theirs", after, env=young)
                async with outer.branch("theirs") as (_, there):
                    assert there.observation == 2


async def test_states_of_two_hosts() -> None:
    """A state of one host is not taken by another, though both have the same instants."""
    async with host(Counter) as one, host(Counter) as two, BranchManager.create(two) as mgr:
        state, _ = await one.reset()
        await two.reset()
        await refuses(two, state, mgr)
        with pytest.raises(ForeignState, match="env="):
            await mgr.checkpoint("foreign", state)
        live = Counter()
        async with BranchManager.create(live, strategy="process_fork") as other:
            await other.env.reset()
            await refuses(other.env, state, other)
            with pytest.raises(ForeignState):
                await other.checkpoint("foreign", state)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
async def test_a_state_that_was_copied(make: Callable[[State], State]) -> None:
    """A copy of a state refers to nothing, and is refused with what to use instead."""
    async with host(Counter) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        for strange in (make(state), State(0)):
            with pytest.raises(ForeignState, match="unpickled"):
                await env.step(strange, 1)
            with pytest.raises(ForeignState):
                await mgr.checkpoint("foreign", strange)


async def test_a_foreign_state_among_many() -> None:
    """`step_all` refuses it in its place and steps the others."""
    async with host(Counter) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 3) as pairs:
            mixed = [pairs[0], (pairs[1][0], pairs[2][1]), pairs[2]]
            results: Any = await mgr.step_all(mixed, [1, 1, 1])
            assert [type(result).__name__ for result in results] == ["StepResult", "ForeignState", "StepResult"]


def test_states_of_a_blocking_agent() -> None:
    """The same without an event loop, for hosts, branches and live objects."""
    with blocking_host(Counter) as env, BlockingManager.create(env) as mgr:
        state, _ = env.reset()
        mgr.checkpoint("start", state)
        with mgr.branches("start", 2) as ((one, at_one), (two, at_two)):
            after = one.step(at_one, 10).next_state
            for strange in (after, at_one):
                with pytest.raises(ForeignState):
                    two.step(strange, 1)
                with pytest.raises(ForeignState):
                    mgr.checkpoint("foreign", strange, env=two)
            with pytest.raises(ForeignState, match="env="):
                mgr.checkpoint("foreign", after)
            assert two.step(at_two, 20).next_state.observation == 20
        for strategy, factory in FACTORIES.items():
            live = factory()
            with BlockingManager.create(live, strategy=strategy, env_factory=factory) as other:
                live.reset(seed=1)
                with pytest.raises(ForeignState):
                    other.checkpoint("foreign", state, [], {"seed": 1})
