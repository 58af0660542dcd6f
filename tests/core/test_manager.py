"""What the manager and the proxies promise: design, "What the user writes"."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

import ramet.errors
from ramet import (
    Action,
    BranchBusy,
    BranchClosed,
    BranchEnvironment,
    BranchLost,
    BranchManager,
    CannotBranch,
    CannotReseed,
    EnvironmentFailed,
    EnvironmentSpec,
    ForeignState,
    Hidden,
    HostFailed,
    InvalidEnvironment,
    LocalEnvironment,
    RametError,
    Stacked,
    StaleState,
    State,
    StateMetadata,
    StepResult,
    StepTimeout,
    UnknownCheckpoint,
    blocking,
    host,
)
from tests.core.bare import Bare
from tests.core.envs import (
    CloneTrail,
    Closing,
    Dice,
    Gate,
    GymLike,
    PureDice,
    PureTrail,
    RemoteTrail,
    Trail,
)
from tests.core.surfaces import threads_here
from tests.helpers import alive, eventually, open_fds, run_script, wait_until

pytestmark = threads_here

Hosted = tuple[BranchManager, BranchEnvironment, State]


@asynccontextmanager
async def trail(factory: Any = Trail, *way: str, **options: Any) -> AsyncIterator[Hosted]:
    """A hosted environment that has been reset with seed 1 and has gone `way`, with a manager and a checkpoint."""
    with anyio.fail_after(30):
        async with host(factory) as env, BranchManager.create(env, **options) as mgr:
            state, _ = await env.reset(seed=1)
            for word in way:
                state = (await env.step(state, word)).next_state
            await mgr.checkpoint("here", state)
            yield mgr, env, state


# -- what branch() returns -----------------------------------------------------------------------------


async def test_a_branch_lives_as_long_as_its_block() -> None:
    async with trail() as (mgr, _, _):
        async with mgr.branch("here") as (env, state):
            assert isinstance(env, BranchEnvironment)
            assert alive(env.pid)
            assert (await env.call("pid")) == env.pid != os.getpid()
        assert not alive(env.pid)
        with pytest.raises(BranchClosed, match=rf"{env.name} has ended: use it inside the block"):
            await env.step(state, "on")
        assert [node.fate for node in mgr.tree().nodes()] == ["live", "live", "ended"]


async def test_an_awaited_branch_lives_as_long_as_the_manager() -> None:
    async with host(Trail) as host_env:
        async with BranchManager.create(host_env) as mgr:
            state, _ = await host_env.reset()
            await mgr.checkpoint("here", state)
            env, _ = await mgr.branch("here")
            other, _ = await mgr.branch("here")
            await other.aclose()  # earlier, by hand
            assert not alive(other.pid)
            assert alive(env.pid)
        assert not alive(env.pid)
        assert alive(host_env.pid)
        with pytest.raises(BranchClosed):
            await env.call("length")
        with pytest.raises(BranchClosed, match="the manager is closed"):
            await mgr.branch("here")


async def test_unpacking_without_await() -> None:
    async with trail() as (mgr, _, _):
        with pytest.raises(TypeError, match=r"has not been awaited: write `\.\.\. = await mgr\.branch\('here'\)`"):
            _env, _state = mgr.branch("here")
        with pytest.raises(TypeError, match=r"await mgr\.branches\('here', 2\)"):
            list(mgr.branches("here", 2))
        with pytest.raises(AttributeError, match=r"'step': mgr\.branch\('here'\) has not been awaited"):
            mgr.branch("here").step()
        with pytest.raises(TypeError, match="is asynchronous: write `async with"), mgr.branch("here"):
            pass
        with pytest.raises(TypeError, match=r"write `\.\.\. = await host\('tests\.core\.envs:Trail'\)`"):
            BranchManager.create(host(Trail))


async def test_dropping_a_branch_unused() -> None:
    async with trail() as (mgr, _, _):
        with pytest.warns(RuntimeWarning, match=r"mgr\.branch\('here'\) was never awaited nor entered"):
            mgr.branch("here")
    with pytest.warns(RuntimeWarning, match=r"host\('tests\.core\.envs:Trail'\) was never awaited nor entered"):
        host(Trail)


async def test_a_sync_block_around_an_async_manager() -> None:
    mgr = BranchManager.create(Trail())
    with pytest.raises(TypeError, match=r"write `async with`, or use ramet\.blocking\.BranchManager"), mgr:
        pass


async def test_many_branches_in_one_call() -> None:
    async with trail() as (mgr, _, _):
        async with mgr.branches("here", 5) as pairs:
            pids = [env.pid for env, _ in pairs]
            assert len(set(pids)) == 5
            assert all(map(alive, pids))
            words = [(await env.step(state, i)).info["word"] for i, (env, state) in enumerate(pairs)]
            assert words == list("01234")
        assert not any(map(alive, pids))
        assert await mgr.branches("here", 0) == []
        more = await mgr.branches("here", 2)
        assert all(alive(env.pid) for env, _ in more)


# -- map -----------------------------------------------------------------------------------------------


async def test_map_keeps_the_limit() -> None:
    alive_now: set[int] = set()
    most = 0
    three = anyio.Event()

    async def rollout(env: Any, state: State) -> str:
        nonlocal most
        alive_now.add(env.pid)
        most = max(most, len(alive_now))
        if most == 3:
            three.set()
        await three.wait()
        observation: str = (await env.step(state, "on")).next_state.observation
        alive_now.discard(env.pid)
        return observation

    async with trail() as (mgr, _, _):
        async with mgr.map(rollout, "here", 12, limit=3) as results:
            seen = [result async for result in results]
        assert seen == ["1:None/on"] * 12
        assert most == 3
        branches = [node for node in mgr.tree().nodes() if node.kind == "branch"]
        assert [node.fate for node in branches] == ["ended"] * 12


@pytest.mark.parametrize("ordered", [False, True])
async def test_the_order_of_map(ordered: bool) -> None:
    started: list[int] = []
    finished: list[int] = []
    fourth = anyio.Event()

    async def rollout(env: Any, state: State) -> int:
        number = int(env.name.removeprefix("branch-"))
        started.append(number)
        await env.step(state, "on")
        if len(started) == 4:
            fourth.set()
        if number == started[0]:
            await fourth.wait()
        finished.append(number)
        return number

    async with trail() as (mgr, _, _), mgr.map(rollout, "here", 6, limit=2, ordered=ordered) as results:
        seen = [result async for result in results]
    assert finished[0] != started[0]
    assert len(set(seen)) == 6
    assert sorted(seen) == (seen if ordered else sorted(finished))


async def test_an_error_in_map_cancels_the_rest() -> None:
    cancelled = []

    async def rollout(env: Any, state: State) -> None:
        if len(seen) == 3:
            raise LookupError("the third")
        seen.append(env)
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(env)

    async with trail() as (mgr, _, _):
        seen: list[Any] = []
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - a block around a loop
            async with mgr.map(rollout, "here", 20, limit=4) as results:
                async for _ in results:
                    raise AssertionError("nothing comes")
        assert caught.group_contains(LookupError, match="the third")
        assert len(cancelled) == 3
        assert not any(alive(env.pid) for env in seen)
        async with mgr.branch("here") as (env, state):  # the manager goes on
            await env.step(state, "on")


async def test_leaving_map_early() -> None:
    async def rollout(env: Any, state: State) -> int:
        started.append(env)
        if len(started) > 2:
            await anyio.sleep_forever()
        return len(started)

    async with trail() as (mgr, _, _):
        for ordered in (False, True):
            started: list[Any] = []
            async with mgr.map(rollout, "here", 20, limit=4, ordered=ordered) as results:
                async for _ in results:
                    break
            gc.collect()
            assert len(started) < 20
            assert not any(alive(env.pid) for env in started)


async def test_map_says_at_once_what_is_wrong() -> None:
    async def rollout(env: Any, state: State) -> None: ...

    async with trail() as (mgr, _, _):
        with pytest.raises(UnknownCheckpoint):
            async with mgr.map(rollout, "there", 3):
                pass
        with pytest.raises(ValueError, match="limit >= 1, got n=3, limit=0"):
            async with mgr.map(rollout, "here", 3, limit=0):
                pass
        async with mgr.map(rollout, "here", 0) as results:
            assert [result async for result in results] == []


# -- step_all ------------------------------------------------------------------------------------------


async def test_step_all() -> None:
    async with trail() as (mgr, _, _), mgr.branches("here", 4) as pairs:
        results = await mgr.step_all(pairs, ["a", Action.from_text("b"), "raise", "d"])
        assert isinstance(results, list)
        seen = [r.next_state.observation if isinstance(r, StepResult) else type(r) for r in results]
        assert seen == ["1:None/a", "1:None/b", EnvironmentFailed, "1:None/d"]
        nexts = [
            (env, r.next_state if isinstance(r, StepResult) else state)
            for (env, state), r in zip(pairs, results, strict=True)
        ]
        again = await mgr.step_all(nexts, ["x"] * 4)
        assert [r.next_state.observation for r in again] == [  # type: ignore[union-attr]
            "1:None/a/x",
            "1:None/b/x",
            "1:None/x",
            "1:None/d/x",
        ]
        with pytest.raises(ValueError, match="4 branches need as many actions, got 3"):
            await mgr.step_all(pairs, ["x"] * 3)
        assert await mgr.step_all([], []) == []


async def test_step_all_keeps_failures_apart() -> None:
    async with trail() as (mgr, env, old), mgr.branches("here", 5) as pairs:
        await env.step(old, "on")
        ended, _ = pairs[3]
        await ended.aclose()
        results = await mgr.step_all(
            [*pairs, (env, old), pairs[0]],
            ["exit", "a", object(), "b", "c", "d", "e"],
        )
        kinds = [type(result).__name__ for result in results]
        assert kinds == [
            "BranchLost",
            "StepResult",
            "EncodeError",
            "BranchClosed",
            "StepResult",
            "StaleState",
            "BranchBusy",  # the same branch twice in one call
        ]
        lost = results[0]
        assert isinstance(lost, BranchLost)
        assert lost.reason == "exited with status 7"


async def test_step_all_stacked() -> None:
    async with host(Bare) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("zero", state)
        async with mgr.branches("zero", 3) as pairs:
            stacked = await mgr.step_all(pairs, [1, "no number", 3], stack=True)
        assert isinstance(stacked, Stacked)
        np.testing.assert_array_equal(stacked.observations, [1, 0, 3])
        np.testing.assert_array_equal(stacked.rewards, [1.0, np.nan, 3.0])
        assert stacked.rewards.dtype == np.float64
        assert stacked.terminated.dtype == stacked.truncated.dtype == np.bool_
        assert not stacked.terminated.any()
        assert list(stacked.errors) == [1]
        assert isinstance(stacked.errors[1], EnvironmentFailed)
        assert len(stacked.results) == 3
        empty = await mgr.step_all([], [], stack=True)
        assert isinstance(empty, Stacked)
        assert len(empty.rewards) == 0


async def test_step_all_over_mixed_environments() -> None:
    async with trail() as (mgr, _, _), host(PureTrail) as pure:
        pure_state, _ = await pure.reset(seed=2)
        async with BranchManager.create(CloneTrail()) as clones, BranchManager.create(pure) as directs:
            clone_state, _ = await clones.env.reset(seed=3)
            await clones.checkpoint("c", clone_state)
            await directs.checkpoint("d", pure_state)
            pairs = [
                await mgr.branch("here"),
                await clones.branch("c"),
                await directs.branch("d"),
                await directs.branch("d"),
                (pure, pure_state),
            ]
            results = await mgr.step_all(pairs, list("abcde"))
            seen = [result.next_state.observation for result in results]  # type: ignore[union-attr]
            assert seen == ["1:None/a", "3:None/b", "2:None/c", "2:None/d", "2:None/e"]


async def test_a_cancelled_step_all_leaves_its_branches_usable(gate: Gate) -> None:
    async with trail() as (mgr, _, _), mgr.branches("here", 3) as pairs:
        async with anyio.create_task_group() as tg:
            tg.start_soon(mgr.step_all, pairs, ["a", gate.word, gate.word])
            await eventually(lambda: gate.arrived(2))
            tg.cancel_scope.cancel()
        gate.open(2)
        for env, _ in pairs:
            assert await env.call("length") == 2  # each had gone on; the late answers are let pass
            child, state = await env.fork()
            result = await child.step(state, "b")
            assert result.next_state.observation.endswith("/b")
            assert result.next_state.metadata.step == 2


async def test_release_during_step_all(gate: Gate) -> None:
    async with trail() as (mgr, _, _):
        pairs = await mgr.branches("here", 2)
        results: list[Any] = []

        async def step() -> None:
            results.extend(await mgr.step_all(pairs, ["a", gate.word]))

        async with anyio.create_task_group() as tg:
            tg.start_soon(step)
            await eventually(gate.arrived)
            await mgr.release("here")
        assert [type(result) for result in results] == [StepResult, BranchClosed]


# -- checkpoints ---------------------------------------------------------------------------------------


async def test_the_same_name_again() -> None:
    async with trail() as (mgr, env, state):
        (first,) = [node for node in mgr.tree().nodes() if node.kind == "checkpoint"]
        old_env, old_state = await mgr.branch("here")
        later = (await env.step(state, "later")).next_state
        with pytest.raises(StaleState):
            await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (_, unharmed):  # the new one failed, so the old one stands
            assert unharmed.observation == "1:None"
        await mgr.checkpoint("here", later)
        await eventually(lambda: not alive(first.pid))
        assert first.fate == "replaced"
        assert alive(old_env.pid)
        async with mgr.branch("here") as (_, new_state):
            assert new_state.observation == "1:None/later"
        await mgr.release("here")
        assert (await old_env.step(old_state, "old")).next_state.observation == "1:None/old"
    assert not alive(old_env.pid)


@pytest.mark.parametrize(
    "factory, strategy",
    [(PureTrail, "direct"), (CloneTrail, "clone"), (Trail, "process_fork"), (RemoteTrail, "action_replay")],
)
async def test_release_ends_its_branches(factory: Any, strategy: Any) -> None:
    env = factory()
    state, _ = env.reset(seed=1)
    with anyio.fail_after(30):
        async with BranchManager.create(env, strategy=strategy, env_factory=factory) as mgr:
            await mgr.checkpoint("a", state, (), {"seed": 1})
            branch, branch_state = await mgr.branch("a")
            after = (await branch.step(branch_state, "b")).next_state
            await mgr.checkpoint("b", after, ["b"], {"seed": 1}, env=branch)
            other, other_state = await mgr.branch("b")
            await mgr.release("a")
            with pytest.raises(BranchClosed):
                await branch.step(after, "c")
            assert (await other.step(other_state, "c")).next_state.observation == "1:None/b/c"
            async with mgr.branch("b") as (third, third_state):
                assert (await third.step(third_state, "d")).next_state.observation == "1:None/b/d"
            fates = {node.name: node.fate for node in mgr.tree().nodes() if node.kind == "checkpoint"}
            assert fates == {"a": "released", "b": "live"}
            assert [n.fate for n in mgr.tree().nodes() if n.kind == "branch"] == ["ended", "live", "ended"]


async def test_release_while_branches_are_made() -> None:
    pairs: list[Any] = []
    refused: list[RametError] = []

    async def branch(mgr: BranchManager) -> None:
        try:
            pairs.append(await mgr.branch("here"))
        except (BranchClosed, UnknownCheckpoint) as error:
            refused.append(error)

    async with trail() as (mgr, _, _):
        async with anyio.create_task_group() as tg:
            for _ in range(20):
                tg.start_soon(branch, mgr)
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
            await mgr.release("here")
        assert len(pairs) + len(refused) == 20
        for env, state in pairs:
            with pytest.raises(BranchClosed):
                await env.step(state, "on")
        assert [node.fate for node in mgr.tree().nodes() if node.kind == "branch"] == ["ended"] * len(pairs)


async def test_deeper_in_the_same_manager() -> None:
    async with trail() as (mgr, _, _):
        env, state = await mgr.branch("here")
        for depth in range(3):
            state = (await env.step(state, f"d{depth}")).next_state
            with pytest.raises(ForeignState, match=r"pass env="):
                await mgr.checkpoint(f"deep-{depth}", state)
            await mgr.checkpoint(f"deep-{depth}", state, env=env)
            env, state = await mgr.branch(f"deep-{depth}")
        assert state.observation == "1:None/d0/d1/d2"
        assert mgr.checkpoints == ("here", "deep-0", "deep-1", "deep-2")
        assert str(mgr.tree()).splitlines()[-1].startswith(f"{'   ' * 7}└─ branch branch-")


async def test_a_wrong_name() -> None:
    async with trail() as (mgr, env, state):
        await mgr.checkpoint("step5", state)
        with pytest.raises(UnknownCheckpoint, match="no checkpoint named 'setp5': did you mean 'step5'") as caught:
            await mgr.branch("setp5")
        assert caught.value.name == "setp5"
        assert caught.value.known == ("here", "step5")
        with pytest.raises(KeyError, match="there are 'here', 'step5'"):
            await mgr.release("x")
        async with BranchManager.create(env) as empty:
            with pytest.raises(UnknownCheckpoint, match=r"there is none yet: make one with checkpoint\(name, state\)"):
                await empty.branch("here")


# -- states --------------------------------------------------------------------------------------------


async def test_an_old_state() -> None:
    async with trail(Trail, "a") as (mgr, env, state):
        newest = (await env.step(state, "b")).next_state
        with pytest.raises(StaleState, match=r"step 2 and cannot go back .* step 1.*make a checkpoint") as caught:
            await env.step(state, "c")
        assert (caught.value.at, caught.value.state) == (2, 1)
        with pytest.raises(StaleState):
            await env.hidden(state)
        with pytest.raises(StaleState):
            await mgr.checkpoint("old", state)
        assert mgr.checkpoints == ("here",)
        assert (await env.step(newest, "d")).next_state.observation == "1:None/a/b/d"
        async with mgr.branch("here") as (branch, branch_state):
            after = (await branch.step(branch_state, "e")).next_state
            with pytest.raises(StaleState):
                await branch.step(branch_state, "f")
            await branch.step(after, "g")


async def test_a_state_of_another_branch() -> None:
    async with trail(Trail, "a") as (mgr, env, state):  # noqa: SIM117 - mgr comes from it
        async with mgr.branches("here", 2) as ((one, one_state), (two, two_state)):
            with pytest.raises(ForeignState, match=f"the state belongs to {one.name}, not to {two.name}: step it on"):
                await two.step(one_state, "x")
            # The very instant that the branch was made from is the exception.
            assert (await one.step(state, "b")).next_state.observation == "1:None/a/b"
            newest = (await env.step(state, "c")).next_state
            with pytest.raises(ForeignState):
                await two.step(newest, "x")
            with pytest.raises(ForeignState, match="built by hand, copied or unpickled"):
                await two.step(State("1:None/a"), "x")
            with pytest.raises(ForeignState):
                await env.step(two_state, "x")
            assert (await two.step(two_state, "d")).next_state.observation == "1:None/a/d"


async def test_states_of_a_live_object() -> None:
    async with BranchManager.create(CloneTrail()) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        newest = (await mgr.env.step(state, "a")).next_state
        with pytest.raises(StaleState):
            await mgr.env.step(state, "b")
        with pytest.raises(StaleState):
            await mgr.checkpoint("here", state)
        await mgr.checkpoint("here", newest)
        async with mgr.branches("here", 2) as ((_, one_state), (two, two_state)):
            with pytest.raises(ForeignState):
                await two.step(one_state, "x")
            with pytest.raises(ForeignState, match="pass env="):
                await mgr.checkpoint("there", one_state)
            assert (await two.step(newest, "c")).next_state.observation == "1:None/a/c"
            with pytest.raises(StaleState):
                await two.step(two_state, "d")
            with pytest.raises(StaleState):
                await mgr.checkpoint("there", two_state, env=two)


async def test_a_stored_state() -> None:
    async with trail(Trail, "a") as (_, env, state):
        for stored in (pickle.loads(pickle.dumps(state)), copy.copy(state), copy.deepcopy(state)):
            assert stored == state
            assert stored.metadata == state.metadata
            assert stored._ref is None
            with pytest.raises(ForeignState, match="unpickled"):
                await env.step(stored, "b")
        result = await env.step(state, "b")
        assert pickle.loads(pickle.dumps(result)) == result
    async with trail(PureTrail, "a") as (_, env, state):
        stored = pickle.loads(pickle.dumps(state))
        assert (await env.step(stored, "b")).next_state.observation == "1:None/a/b"
        assert await env.hidden(stored) == ("1:None", "a")


@pytest.mark.parametrize("strategy", ["direct", "process_fork"])
async def test_any_state_of_a_pure_environment(strategy: Any) -> None:
    async with trail(PureTrail, "a", strategy=strategy) as (mgr, env, state):
        states = [state]
        for word in "bcd":
            states.append((await env.step(states[-1], word)).next_state)
        for old in reversed(states):
            assert (await env.step(old, "x")).next_state.observation == f"{old.observation}/x"
        branch, branch_state = await mgr.branch("here")
        assert (branch.pid == env.pid) is (strategy == "direct")
        assert branch_state.observation == "1:None/a"
        for old in (*states, branch_state):
            assert (await branch.step(old, "y")).next_state.observation == f"{old.observation}/y"
        assert await branch.hidden(states[-1]) == ("1:None", "a", "b", "c", "d")
        await mgr.checkpoint("old", states[1])  # whenever
        async with mgr.branch("old") as (other, other_state):
            assert (await other.step(other_state, "z")).next_state.observation == "1:None/a/b/z"


async def test_hosted_direct_queues_in_order(gate: Gate) -> None:
    order: list[int] = []

    async def step(number: int, env: Any, state: State) -> None:
        await env.step(state, gate.word if number == 0 else number)
        order.append(number)

    async with trail(PureTrail) as (mgr, _, _), mgr.branches("here", 10) as pairs:
        async with anyio.create_task_group() as tg:
            for number, (env, state) in enumerate(pairs):
                tg.start_soon(step, number, env, state)
                # each has asked before the next begins
                await anyio.wait_all_tasks_blocked()
            await eventually(gate.arrived)
            assert order == []
            gate.open()
        assert order == list(range(10))


async def test_two_calls_at_once(gate: Gate) -> None:
    async with trail() as (mgr, _, _), mgr.branch("here") as (env, state):
        async with anyio.create_task_group() as tg:
            tg.start_soon(env.step, state, gate.word)
            await eventually(gate.arrived)
            with pytest.raises(BranchBusy, match=f"{env.name} is busy with another call"):
                await env.call("length")
            gate.open()
        assert await env.call("length") == 2


# -- the tree ------------------------------------------------------------------------------------------


async def test_tree() -> None:
    async with trail(Trail, "a", "b") as (mgr, env, state):
        branch, branch_state = await mgr.branch("here")
        after = (await branch.step(branch_state, "c")).next_state
        async with BranchManager.create(branch) as sub:
            await sub.checkpoint("deep", after)
            async with sub.branch("deep", seed=7):
                for _ in range(3):
                    async with mgr.branch("here"):
                        pass
                lineage = mgr.tree()
                nodes = list(lineage.nodes())
                shape = [(node.kind, node.step, node.seed, node.fate) for node in nodes]
                assert shape == [
                    ("host", 0, None, "live"),
                    ("checkpoint", 2, None, "live"),
                    ("branch", 2, None, "live"),
                    ("checkpoint", 3, None, "live"),
                    ("branch", 3, 7, "live"),
                    *[("branch", 2, None, "ended")] * 3,
                ]
                assert lineage.live == 5
                assert nodes[0].pid == env.pid
                assert nodes[2].pid == branch.pid
                assert len({node.pid for node in nodes}) == len({node.id for node in nodes}) == len(nodes)
                assert all(node.fork_time is not None for node in nodes if node.kind == "branch")
                assert all((node.ended is None) == (node.fate == "live") for node in nodes)
                lines = str(lineage).splitlines()
        assert lines[0] == f"host {env.name} · step 0 · pid {env.pid} · live"
        assert lines[1] == f"└─ checkpoint here · step 2 · pid {nodes[1].pid} · live"
        assert lines[2].startswith(f"   ├─ branch {branch.name} · step 2 · pid {branch.pid} · forked in ")
        assert lines[3].startswith("   │  └─ checkpoint deep · step 3 · pid ")
        assert lines[4].startswith("   │     └─ branch branch-")
        assert " · seed 7 · forked in " in lines[4]
        assert lines[5].startswith("   └─ branch branch-")
        assert lines[5].endswith(" ms · ended (and 2 like it)")
        assert len(lines) == 6
        assert (await env.step(state, "on")).next_state.observation == "1:None/a/b/on"


async def test_a_long_run_does_not_grow() -> None:
    async with BranchManager.create(PureTrail()) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        for _ in range(1500):
            async with mgr.branch("here"):
                pass
        assert len(list(mgr.tree().nodes())) < 700
        assert "more have ended" in str(mgr.tree())
    async with trail(PureTrail) as (mgr, _, state):
        for _ in range(1500):
            async with mgr.branch("here"):
                pass
            if _ % 10 == 0:
                await mgr.checkpoint("other", state)
        assert len(list(mgr.tree().nodes())) < 1400
        assert not mgr._book.find("here").branches
        assert len(mgr._book._replaced) < 10


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factory, strategy, message",
    [
        (Trail, "direct", r"direct cannot branch .*pure_step is False.*; use strategy='process_fork'"),
        (RemoteTrail, "process_fork", r"behind an address.*; use strategy='action_replay'"),
        (RemoteTrail, "direct", r"pure.*; use strategy='action_replay'"),
    ],
)
async def test_a_strategy_that_cannot_serve(factory: Any, strategy: Any, message: str) -> None:
    async with host(factory) as env:
        with pytest.raises(CannotBranch, match=message) as caught:
            BranchManager.create(env, strategy=strategy)
        assert caught.value.strategy == strategy
        assert caught.value.instead
        with pytest.raises(CannotBranch, match=message):
            BranchManager.create(factory(), strategy=strategy, env_factory=factory)


def test_a_replay_without_a_factory() -> None:
    with pytest.raises(CannotBranch, match=r"there is no env_factory .*; use strategy='process_fork'"):
        BranchManager.create(Trail(), strategy="action_replay")
    with pytest.raises(CannotBranch, match=r"; pass env_factory=\.\.\., or host the environment"):
        BranchManager.create(RemoteTrail(), strategy="action_replay")


async def test_a_replay_without_actions() -> None:
    async with BranchManager.create(Trail(), strategy="action_replay", env_factory=Trail) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        state = (await mgr.env.step(state, "a")).next_state
        with pytest.raises(CannotBranch, match=r"the actions that led to step 1 are not known; pass actions="):
            await mgr.checkpoint("here", state)
        await mgr.checkpoint("here", state, ["a"], {"seed": 1})


async def test_a_remote_environment_is_not_forked() -> None:
    async with trail(RemoteTrail) as (mgr, env, _):
        assert mgr.strategy == "action_replay"
        with pytest.raises(CannotBranch, match=r"behind an address.*strategy='action_replay'"):
            await env.fork()


async def test_a_live_object_cannot_be_forked_alone() -> None:
    async with BranchManager.create(Trail()) as mgr:
        with pytest.raises(CannotBranch, match=r"use mgr\.checkpoint\(\) and mgr\.branch\(\), or host\(factory\)"):
            await mgr.env.fork()
    async with BranchManager.create(PureTrail()) as mgr:
        with pytest.raises(CannotBranch, match=r"call reset\(\) first"):
            await mgr.env.fork()
        await mgr.env.reset(seed=1)
        env, state = await mgr.env.fork()
        assert (await env.step(state, "a")).next_state.observation == "1:None/a"
        assert len(await mgr.env.fork(2)) == 2


def test_something_that_cannot_be_copied() -> None:
    class Stubborn(Trail):
        def __deepcopy__(self, memo: object) -> Any:
            raise RuntimeError("no copies")

    async def main() -> None:
        async with BranchManager.create(Stubborn(), strategy="clone") as mgr:
            state, _ = await mgr.env.reset()
            with pytest.raises(CannotBranch, match=r"RuntimeError: no copies.*use strategy='process_fork'"):
                await mgr.checkpoint("here", state)

    anyio.run(main)


async def test_gymnasium_style_objects_are_refused() -> None:
    wrap = r"env = GymnasiumEnvironment\(env\)"
    for make in (BranchManager.create, blocking.BranchManager.create):
        with pytest.raises(InvalidEnvironment, match=wrap):
            make(GymLike())
    with pytest.raises(InvalidEnvironment, match=wrap):
        await host(GymLike)
    with pytest.raises(InvalidEnvironment, match=r"no reset\(\) and no step\(\)"):
        BranchManager.create(object())
    with pytest.raises(InvalidEnvironment, match=r"pass its class, or a function that makes it"):
        host(Trail())  # type: ignore[arg-type]


class FiveTuple(GymLike):
    def step(self, state: Any, action: Any = 0) -> Any:  # type: ignore[override]
        return super().step(action)

    def reset(self, **_: Any) -> Any:
        return State(0), {}


async def test_a_step_that_returns_a_tuple() -> None:
    async with host(FiveTuple) as env:
        state, _ = await env.reset()
        with pytest.raises(
            InvalidEnvironment, match=r"must return a StepResult, got a tuple of 5.*GymnasiumEnvironment"
        ):
            await env.step(state, 1)


async def test_a_factory_that_fails() -> None:
    with pytest.raises(HostFailed, match=r"no_such_module_anywhere.*ModuleNotFoundError"):
        await host("no_such_module_anywhere:Env")
    with pytest.raises(HostFailed, match=r"the factory raised TypeError"):
        await host(Trail, args=(1, 2, 3))
    with pytest.raises(HostFailed, match=r"cannot be pickled .*or name it as 'module:attr'"):
        host(Trail, args=(sys._getframe(),))
    with pytest.raises(InvalidEnvironment, match=r"'module:attr', such as"):
        host("tests.core.envs")


async def test_defaults_of_a_spec() -> None:
    async with host(Bare) as env:
        assert env.spec == EnvironmentSpec("Bare")
    assert BranchManager.create(Bare()).env.spec.name == "Bare"


# -- without a block -----------------------------------------------------------------------------------


async def test_without_a_block() -> None:
    with anyio.fail_after(30):
        env = await host(Trail)
        mgr = BranchManager.create(env)
        state, _ = await env.reset(seed=1)
        await mgr.checkpoint("here", state)
        branch, branch_state = await mgr.branch("here")
        await branch.step(branch_state, "a")
        await mgr.aclose()
        await mgr.aclose()  # twice does no harm
        assert not alive(branch.pid)
        await env.aclose()
        await env.aclose()
        assert not alive(env.pid)
        with pytest.raises(BranchClosed):
            await env.reset()


async def test_dropped_without_being_closed() -> None:
    said: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        assert category is ResourceWarning
        said.append(str(message))  # the warning itself holds what was dropped

    before: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        for _ in range(2):  # the first time the event loop gets an epoll set
            before = set(open_fds())
            env = await host(Trail)
            mgr = BranchManager.create(env)
            state, _info = await env.reset(seed=1)
            await mgr.checkpoint("here", state)
            branch, branch_state = await mgr.branch("here")
            pids = [env.pid, branch.pid]
            del mgr, env, branch, state, branch_state
            gc.collect()
            await eventually(lambda pids=pids: not any(map(alive, pids)))  # type: ignore[misc]
    assert len([text for text in said if text.startswith("<BranchManager of host-")]) == 2
    assert said.count("a host or manager was dropped without being closed") == 2
    await eventually(lambda: set(open_fds()) == before)


def test_left_open_at_the_end_of_a_program() -> None:
    finished = run_script(
        """
        import anyio, sys
        from ramet import BranchManager, host
        from tests.core.envs import Trail

        async def main():
            global env, mgr, pair
            env = await host(Trail)
            mgr = BranchManager.create(env)
            state, _ = await env.reset(seed=1)
            await mgr.checkpoint("here", state)
            pair = await mgr.branch("here")
            print(env.pid, pair[0].pid)

        anyio.run(main)
        """
    )
    assert finished.returncode == 0, finished.stderr
    assert "Exception ignored" not in finished.stderr
    wait_until(lambda: not any(alive(int(pid)) for pid in finished.stdout.split()), timeout=1)


async def test_an_environment_is_closed_once(tmp_path: Any) -> None:
    note = tmp_path / "note"
    async with trail(lambda: Closing(str(note))) as (mgr, _, _), mgr.branch("here") as (env, state):
        await env.step(state, "a")
    assert note.read_text() == "closed after 1\n"


# -- forks and the rest of the proxy -------------------------------------------------------------------


async def test_fork() -> None:
    async with trail(Trail, "a") as (_, env, state):
        child, child_state = await env.fork()
        (only,) = await env.fork(1)
        many = await env.fork(3)
        assert isinstance(only, tuple)
        assert len(many) == 3
        assert child_state.observation == "1:None/a"
        grandchild, grandchild_state = await child.fork()
        for number, (fork, fork_state) in enumerate([(child, child_state), only, *many]):
            result = await fork.step(fork_state, number)
            assert result.next_state.observation == f"1:None/a/{number}"
        assert (await grandchild.step(grandchild_state, "g")).next_state.observation == "1:None/a/g"
        assert (await env.step(state, "on")).next_state.observation == "1:None/a/on"
        async with child:
            pass
        assert not alive(child.pid)
        assert not alive(grandchild.pid)  # it belonged to the child's block
        assert alive(only[0].pid)
        pids = [only[0].pid, *(fork.pid for fork, _ in many)]
    assert not any(map(alive, pids))


async def test_fork_before_a_reset() -> None:
    async with host(Trail) as env:
        child, _ = await env.fork()
        state, _ = await child.reset(seed=5)
        assert state.observation == "5:None"
        with pytest.raises(ForeignState, match="use the state that reset, step or branch returned"):
            await env.step(State(), "a")


async def test_hidden_stays_behind_unless_asked_for() -> None:
    async with trail(Trail, "a") as (mgr, env, state):
        assert state.hidden is Hidden.IN_BRANCH
        assert repr(state.hidden) == "<in the branch: await env.hidden(state)>"
        assert await env.hidden(state) == {"secret": 1}
        async with mgr.branch("here") as (branch, branch_state):
            assert branch_state.hidden is Hidden.IN_BRANCH
            assert await branch.hidden(branch_state) == {"secret": 1}
            after = (await branch.step(branch_state, "b")).next_state
            assert await branch.hidden(after) == {"secret": 2}


async def test_call() -> None:
    async with trail(Trail, "a") as (_, env, _):
        assert await env.call("length") == 2
        assert await env.call("way") == ["1:None", "a"]
        with pytest.raises(InvalidEnvironment, match="'_state' is private"):
            await env.call("_state")
        with pytest.raises(EnvironmentFailed, match="AttributeError") as caught:
            await env.call("no_such_method")
        assert caught.value.type_name == "builtins:AttributeError"
        with pytest.raises(AttributeError, match=r"await env.call"):
            _ = env.unwrapped


async def test_an_environment_that_raises() -> None:
    async with trail(Trail, "a") as (mgr, env, state):
        with pytest.raises(EnvironmentFailed, match=f"step of {env.name} raised ValueError: told to raise") as caught:
            await env.step(state, "raise")
        assert caught.value.type_name == "builtins:ValueError"
        assert 'raise ValueError("told to raise")' in caught.value.traceback
        assert caught.value.__notes__[0].startswith(f"in {env.name}:\nTraceback")
        assert (await env.step(state, "b")).next_state.observation == "1:None/a/b"  # it stays usable
        async with mgr.branch("here") as (branch, branch_state):
            with pytest.raises(BranchLost, match=r"is gone: killed by SIGKILL; out of memory\?") as lost:
                await branch.step(branch_state, "die")
            assert lost.value.pid == branch.pid
            with pytest.raises(BranchLost):
                await branch.step(branch_state, "again")
            assert branch.node.fate == "killed by SIGKILL; out of memory?"


async def test_step_timeout() -> None:
    async with host(Trail, step_timeout=0.3) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (branch, branch_state):
            with pytest.raises(StepTimeout, match=r"a call took longer than 0\.3 s"):
                await branch.step(branch_state, "hang")
            with pytest.raises(TimeoutError):
                await branch.call("length")
            await eventually(lambda: not alive(branch.pid))
        pairs = await mgr.branches("here", 3)
        results = await mgr.step_all(pairs, ["a", "hang", "b"])
        assert [type(result) for result in results] == [StepResult, StepTimeout, StepResult]
        await env.step(state, "on")


# -- randomness ----------------------------------------------------------------------------------------


async def rolls(mgr: BranchManager, n: int, **options: Any) -> list[Any]:
    async with mgr.branches("here", n, **options) as pairs:
        results = await mgr.step_all(pairs, [0] * n)
        return [result.next_state.observation for result in results]  # type: ignore[union-attr]


async def test_an_exact_copy_continues_exactly() -> None:
    async with trail(Dice, "0") as (mgr, env, state):
        one, two = await rolls(mgr, 2)
        assert one == two == (await env.step(state, 0)).next_state.observation
        async with mgr.branch("here") as (branch, _):
            assert branch.reseeded == ()


async def test_a_seed() -> None:
    async with trail(Dice, "0") as (mgr, env, _):
        (exact,) = await rolls(mgr, 1)
        first = await rolls(mgr, 3, seed=7)
        assert first == await rolls(mgr, 3, seed=7)
        assert len({*first, exact}) == 4
        assert all(roll[:2] == exact[:2] for roll in first)  # what was rolled before stays
        assert set(await rolls(mgr, 3, seed=8)).isdisjoint(first)
        async with mgr.branch("here", seed=7) as (branch, _):
            assert "env.rng" in branch.reseeded
            assert "random" in branch.reseeded
        child, _ = await env.fork(seed=7)
        assert "env.rng" in child.reseeded
        with pytest.raises(TypeError, match="a seed is an integer, 'fresh' or None, got 'new'"):
            await mgr.branch("here", seed="new")  # type: ignore[arg-type]


async def test_fresh_seeds() -> None:
    async with trail(Dice, "0") as (mgr, env, _):
        seen = [*await rolls(mgr, 3, seed="fresh"), *await rolls(mgr, 3, seed="fresh")]
        assert len(set(seen)) == 6
        forks = await env.fork(2, seed="fresh")
        a, b = [(await fork.step(state, 0)).next_state.observation for fork, state in forks]
        assert a != b


@pytest.mark.parametrize("hosted", [True, False])
async def test_a_seed_for_a_pure_environment(hosted: bool) -> None:
    @asynccontextmanager
    async def source() -> AsyncIterator[Any]:
        if hosted:
            async with host(PureDice) as env:
                yield env
        else:
            yield PureDice()

    async with source() as env, BranchManager.create(env) as mgr:
        assert mgr.strategy == "direct"
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        plain = await rolls(mgr, 2)
        assert plain[0] == plain[1]
        seeded = await rolls(mgr, 2, seed=7)
        assert seeded == await rolls(mgr, 2, seed=7)
        assert len({*plain, *seeded}) == 3


async def test_a_seed_that_nothing_can_take() -> None:
    class Deaf(Bare):
        pass

    class DeafPure(PureTrail):
        spec = EnvironmentSpec("deaf", pure_step=True)

    async with trail(Bare) as (mgr, env, _):
        with pytest.raises(CannotReseed, match=r"give the environment a reseed\(seed\) method"):
            await mgr.branch("here", seed=1)
        with pytest.raises(CannotReseed):
            await env.fork(seed="fresh")
        assert [node.kind for node in mgr.tree().nodes()] == ["host", "checkpoint"]
        async with mgr.branch("here") as (branch, state):
            await branch.step(state, 1)
    for env_object, strategy in ((Deaf(), "clone"), (DeafPure(), "direct")):
        async with BranchManager.create(env_object, strategy=strategy) as live:  # type: ignore[arg-type]
            state, _ = await live.env.reset()
            await live.checkpoint("here", state)
            with pytest.raises(CannotReseed, match="strategy='process_fork'"):
                await live.branch("here", seed=1)
    async with trail(Trail) as (mgr, _, _), mgr.branch("here", seed=1) as (branch, state):  # it draws nothing
        assert (await branch.step(state, "a")).next_state.observation == "1:None/a"


async def test_a_seed_of_a_clone_leaves_the_agents_globals_alone() -> None:
    import random

    async with BranchManager.create(Dice(), strategy="clone") as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        before = random.getstate()
        async with mgr.branches("here", 2, seed=7) as ((one, _), (two, _)):
            assert one.reseeded == two.reseeded == ("env.rng",)
            assert one.unwrapped.rng.getstate() != two.unwrapped.rng.getstate()
        assert random.getstate() == before


# -- values --------------------------------------------------------------------------------------------


ERRORS = [
    ramet.errors.RametError("plain"),
    CannotBranch("direct", "it is not pure", instead="use another"),
    CannotBranch(None, "nothing serves"),
    CannotReseed("clone", "nothing takes it"),
    ramet.errors.BranchLimitError("RLIMIT_NOFILE", value=10, used=9, needed=5),
    ramet.errors.ReplayDiverged(3, "a", "b"),
    UnknownCheckpoint("a", ["b", "c"]),
    InvalidEnvironment("none"),
    HostFailed("a:b", "no"),
    EnvironmentFailed("branch-1", "step", type_name="builtins:ValueError", text="no", traceback="tb"),
    StaleState("branch-1", at=2, state=1),
    ForeignState("branch-1", "branch-2"),
    BranchBusy("branch-1"),
    BranchClosed("branch-1"),
    BranchLost("branch-1", pid=5, status=9),
    StepTimeout("branch-1", pid=5, timeout=0.5),
    ramet.errors.EncodeError('value["a"]', "no form"),
    ramet.errors.ProtocolError("nonsense"),
]


def test_every_error_is_in_the_list() -> None:
    kinds = {
        value for value in vars(ramet.errors).values() if isinstance(value, type) and issubclass(value, RametError)
    }
    assert kinds == {type(error) for error in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pickle(error: RametError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
        assert getattr(again, "__notes__", []) == getattr(error, "__notes__", [])


def test_results_pickle() -> None:
    state = State("seen", {"hidden": 1}, StateMetadata(3, "episode", True, {"a": 1}))
    result = StepResult(state, 1.5, {"a": 1.0}, True, False, {"b": 2})
    again = pickle.loads(pickle.dumps(result))
    assert again == result
    assert again.done
    assert pickle.loads(pickle.dumps(EnvironmentSpec("x", pure_step=True))) == EnvironmentSpec("x", pure_step=True)
    action = Action.from_tool_call("search", {"q": "x"}, id="1")
    assert pickle.loads(pickle.dumps(action)) == action
    assert pickle.loads(pickle.dumps(Hidden.IN_BRANCH)) is Hidden.IN_BRANCH


async def test_what_the_proxies_look_like() -> None:
    async with trail() as (mgr, env, _):
        assert repr(env) == f"<{env.name}: trail in process {env.pid}>"
        assert repr(mgr) == f"<BranchManager of {env.name}: process_fork, 1 checkpoints>"
        assert mgr.env is env
    plain = Trail()
    mgr = BranchManager.create(plain)
    assert isinstance(mgr.env, LocalEnvironment)
    assert mgr.env.unwrapped is plain
    assert repr(mgr.env) == "<trail: trail in this process>"


async def test_no_warning_for_a_host() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with trail() as (mgr, _, _), mgr.branch("here") as (env, state):
            await env.step(state, "on")
