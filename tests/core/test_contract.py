"""What every strategy promises alike, on the async and on the blocking API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import pytest

from ramet import BranchClosed, EnvironmentFailed, State, UnknownCheckpoint
from tests.core.envs import CloneTrail, PureTrail, RemoteTrail, Trail
from tests.core.surfaces import AsyncSurface, BlockingSurface, Surface, finish, raw, threads_here
from tests.helpers import alive

pytestmark = threads_here


@dataclass(frozen=True)
class Case:
    """One strategy, with an environment that it suits."""

    strategy: str
    factory: Any
    hosted: bool

    def __str__(self) -> str:
        return f"{self.strategy}-{'hosted' if self.hosted else 'live'}"


CASES = [
    Case("direct", PureTrail, False),
    Case("direct", PureTrail, True),
    Case("clone", CloneTrail, False),
    Case("process_fork", Trail, False),
    Case("process_fork", Trail, True),
    Case("action_replay", RemoteTrail, True),
]


@dataclass(frozen=True)
class Bench:
    """The environment at `1:None/a`, a manager of it, and a checkpoint there."""

    surface: Surface
    case: Case
    env: Any
    mgr: Any
    state: State

    def manager(self, env: Any) -> Any:
        return self.surface.manager(env, strategy=self.case.strategy)

    @property
    def processes(self) -> bool:
        """Whether each branch has a process of its own."""
        return self.case.strategy in ("process_fork", "action_replay")


@asynccontextmanager
async def bench(surface: Surface, case: Case) -> AsyncIterator[Bench]:
    @asynccontextmanager
    async def source() -> AsyncIterator[Any]:
        if case.hosted:
            async with surface.host(case.factory) as env:
                yield env
        else:
            yield surface.live(case.factory())

    async with source() as env, surface.manager(env, strategy=case.strategy) as mgr:
        state, _ = await env.reset(seed=1)
        state = (await env.step(state, "a")).next_state
        await mgr.checkpoint("here", state)
        yield Bench(surface, case, env, mgr, state)


async def siblings_are_independent(b: Bench) -> None:
    async with b.mgr.branches("here", 3) as pairs:
        states = [state for _, state in pairs]
        for turn in range(2):
            for number, (env, _) in enumerate(pairs):
                states[number] = (await env.step(states[number], f"{number}.{turn}")).next_state
        assert [state.observation for state in states] == [f"1:None/a/{n}.0/{n}.1" for n in range(3)]
        assert [state.metadata.step for state in states] == [3, 3, 3]


async def the_parent_is_unharmed(b: Bench) -> None:
    async with b.mgr.branch("here") as (env, state):
        for word in "xyz":
            state = (await env.step(state, word)).next_state
    result = await b.env.step(b.state, "b")
    assert result.next_state.observation == "1:None/a/b"
    async with b.mgr.branch("here") as (env, state):  # and so is the checkpoint, by both
        assert (await env.step(state, "c")).next_state.observation == "1:None/a/c"


async def a_branch_ignores_its_parent(b: Bench) -> None:
    env, state = await b.mgr.branch("here")
    await b.env.step(b.state, "b")
    assert (await env.step(state, "c")).next_state.observation == "1:None/a/c"
    again, _ = await b.env.reset(seed=2)
    assert again.observation == "2:None"
    other, state = await b.mgr.branch("here")
    assert (await other.step(state, "d")).next_state.observation == "1:None/a/d"


async def a_branch_from_a_branch(b: Bench) -> None:
    outer, state = await b.mgr.branch("here")
    way = "1:None/a"
    for depth in range(3):
        state = (await outer.step(state, f"d{depth}")).next_state
        way += f"/d{depth}"
        given = {"actions": way.split("/")[1:], "reset_options": {"seed": 1}}
        await b.mgr.checkpoint(f"depth {depth}", state, **given, env=outer)
        outer, state = await b.mgr.branch(f"depth {depth}")
        assert state.observation == way
    for depth in range(3):
        async with b.mgr.branch(f"depth {depth}") as (env, state):
            result = await env.step(state, "end")
            assert result.next_state.observation == "/".join(["1:None/a", *(f"d{d}" for d in range(depth + 1)), "end"])


async def a_manager_of_a_branch(b: Bench) -> None:
    env, state = await b.mgr.branch("here")
    async with b.manager(env) as inner:
        await inner.checkpoint("inside", state)
        child, child_state = await inner.branch("inside")
        assert (await child.step(child_state, "x")).next_state.observation == "1:None/a/x"
    assert (await env.step(state, "y")).next_state.observation == "1:None/a/y"  # its own block goes on


async def a_result_is_whole(b: Bench) -> None:
    async with b.mgr.branch("here") as (env, state):
        result = await env.step(state, "end")
        assert (result.reward, dict(result.rewards), dict(result.info)) == (2.0, {"length": 2.0}, {"word": "end"})
        assert (result.terminated, result.truncated, result.done) == (True, False, True)
        meta = result.next_state.metadata
        assert (meta.step, meta.episode_id, meta.is_terminal) == (2, "1:None", True)


async def an_exception_harms_nobody(b: Bench) -> None:
    async with b.mgr.branches("here", 2) as ((one, one_state), (two, two_state)):
        with pytest.raises((EnvironmentFailed, ValueError), match="told to raise"):
            await one.step(one_state, "raise")
        assert (await one.step(one_state, "b")).next_state.observation == "1:None/a/b"
        assert (await two.step(two_state, "c")).next_state.observation == "1:None/a/c"


async def release(b: Bench) -> None:
    env, state = await b.mgr.branch("here")
    pid = raw(env).pid if b.processes else 0
    await b.mgr.release("here")
    assert b.mgr.checkpoints == ()
    with pytest.raises(UnknownCheckpoint):
        await b.mgr.branch("here")
    if b.processes:
        assert not alive(pid)
    if b.processes or isinstance(b.surface, AsyncSurface):
        with pytest.raises(BranchClosed):
            await env.step(state, "x")
    assert (await b.env.step(b.state, "b")).next_state.observation == "1:None/a/b"
    await b.mgr.checkpoint("here", (await b.env.reset(seed=3))[0], (), {"seed": 3})
    async with b.mgr.branch("here") as (_, state):
        assert state.observation == "3:None"


async def close(b: Bench) -> None:
    async with b.manager(b.env) as mgr:
        await mgr.checkpoint("there", b.state)
        pairs = [await mgr.branch("there") for _ in range(2)]
        pids = [raw(env).pid for env, _ in pairs] if b.processes else []
    assert not any(map(alive, pids))
    if b.processes or isinstance(b.surface, AsyncSurface):
        for env, state in pairs:
            with pytest.raises(BranchClosed):
                await env.step(state, "x")
    with pytest.raises(BranchClosed, match="the manager is closed"):
        await mgr.checkpoint("there", b.state)
    with pytest.raises(BranchClosed, match="the manager is closed"):
        await mgr.branch("there")
    assert (await b.env.step(b.state, "b")).next_state.observation == "1:None/a/b"


async def the_tree_knows(b: Bench) -> None:
    async with b.mgr.branches("here", 2):
        kinds = [(node.kind, node.step, node.fate) for node in list(b.mgr.tree().nodes())[1:]]
        assert kinds[0] == ("checkpoint", 1, "live")
        assert [kind[:2] for kind in kinds[1:]] == [("branch", 1)] * 2
        pids = {node.pid for node in b.mgr.tree().nodes() if node.kind == "branch"}
        assert (0 in pids) is not b.processes
    assert f"checkpoint here · step 1 · {'pid' if b.case.strategy == 'process_fork' else 'live'}" in str(b.mgr.tree())


Scenario = Callable[[Bench], Coroutine[Any, Any, None]]
SCENARIOS: list[Scenario] = [
    siblings_are_independent,
    the_parent_is_unharmed,
    a_branch_ignores_its_parent,
    a_branch_from_a_branch,
    a_manager_of_a_branch,
    a_result_is_whole,
    an_exception_harms_nobody,
    release,
    close,
    the_tree_knows,
]


async def run(surface: Surface, case: Case, scenario: Scenario) -> None:
    async with bench(surface, case) as b:
        await scenario(b)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_async(case: Case, scenario: Scenario) -> None:
    with anyio.fail_after(20):
        await run(AsyncSurface(), case, scenario)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocking(case: Case, scenario: Scenario) -> None:
    finish(run(BlockingSurface(), case, scenario))
