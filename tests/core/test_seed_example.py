"""The example that the library started from: five steps, a checkpoint, a hundred ways to go on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from ramet import Action, BranchManager, CannotBranch, EnvironmentConfig, UnknownCheckpoint, blocking, host
from ramet.types import EnvironmentSpec, State
from tests.core.envs import CloneTrail, PureTrail, RemoteTrail, Trail
from tests.core.surfaces import AsyncSurface, BlockingSurface, Surface, finish, threads_here

pytestmark = threads_here

STRATEGIES = ["direct", "clone", "process_fork", "action_replay"]
ENVIRONMENTS: dict[str, type[Any]] = {
    "direct": PureTrail,
    "clone": CloneTrail,
    "process_fork": Trail,
    "action_replay": RemoteTrail,
}
WAY = "42:0/step-0/step-1/step-2/step-3/step-4"
RESET = {"seed": 42, "task_index": 0}

Scenario = Callable[[Surface, Any, str, bool], Coroutine[Any, Any, None]]


async def five_steps(env: Any) -> tuple[State, tuple[Action, ...]]:
    state, _ = await env.reset(seed=42, options={"task_index": 0})
    actions = []
    for i in range(5):
        action = Action.from_text(f"step-{i}")
        actions.append(action)
        state = (await env.step(state, action)).next_state
    assert state.observation == WAY
    assert state.metadata.step == 5
    return state, tuple(actions)


def options_for(strategy: str, explicit: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"strategy": strategy} if explicit else {}
    if strategy == "action_replay":
        options["env_factory"] = ENVIRONMENTS[strategy]
    return options


async def hundred_continuations(surface: Surface, env: Any, strategy: str, explicit: bool) -> None:
    state, actions = await five_steps(env)
    async with surface.manager(env, **options_for(strategy, explicit)) as mgr:
        assert mgr.strategy == strategy
        await mgr.checkpoint("step5", state, actions=actions, reset_options=RESET)
        pairs = [await mgr.branch("step5") for _ in range(100)]
        seen = []
        for number, (branch, branch_state) in enumerate(pairs):
            assert branch_state.observation == WAY
            assert branch_state.metadata.step == 5
            result = await branch.step(branch_state, Action.from_text(f"way-{number}"))
            result = await branch.step(result.next_state, "end")
            assert result.done
            assert result.reward == 7.0
            seen.append(result.next_state.observation)
        assert seen == [f"{WAY}/way-{number}/end" for number in range(100)]
        # The environment itself stands where it stood.
        assert (await env.step(state, "on")).next_state.observation == f"{WAY}/on"


async def nested(surface: Surface, env: Any, strategy: str, explicit: bool) -> None:
    state, actions = await five_steps(env)
    seen = []
    async with surface.manager(env, **options_for(strategy, explicit)) as mgr:
        await mgr.checkpoint("A", state, actions, RESET)
        for i in range(3):
            b_env, b_state = await mgr.branch("A")
            result = await b_env.step(b_state, f"a{i}")
            async with surface.manager(b_env, **options_for(strategy, explicit)) as sub:
                assert sub.strategy == strategy or strategy == "clone"
                await sub.checkpoint("B", result.next_state, (*actions, f"a{i}"), RESET)
                for j in range(3):
                    bb_env, bb_state = await sub.branch("B")
                    seen.append((await bb_env.step(bb_state, f"b{j}")).next_state.observation)
            after = await b_env.step(result.next_state, "home")
            assert after.next_state.observation == f"{WAY}/a{i}/home"
    assert seen == [f"{WAY}/a{i}/b{j}" for i in range(3) for j in range(3)]


async def release_overwrite_tree(surface: Surface, env: Any, strategy: str, explicit: bool) -> None:
    state, actions = await five_steps(env)
    async with surface.manager(env, **options_for(strategy, explicit)) as mgr:
        before = len(list(mgr.tree().nodes()))
        await mgr.checkpoint("here", state, actions, RESET)
        old_env, old_state = await mgr.branch("here")
        later = (await env.step(state, "later")).next_state
        await mgr.checkpoint("here", later, (*actions, "later"), RESET)
        assert mgr.checkpoints == ("here",)
        new_env, new_state = await mgr.branch("here")
        assert new_state.observation == f"{WAY}/later"
        assert (await new_env.step(new_state, "new")).next_state.observation == f"{WAY}/later/new"
        assert (await old_env.step(old_state, "old")).next_state.observation == f"{WAY}/old"
        await mgr.checkpoint("other", later, (*actions, "later"), RESET)
        await mgr.release("here")
        assert mgr.checkpoints == ("other",)
        with pytest.raises(UnknownCheckpoint, match="no checkpoint named 'here'"):
            await mgr.branch("here")
        with pytest.raises(UnknownCheckpoint):
            await mgr.release("here")
        async with mgr.branch("other") as (branch, branch_state):
            assert (await branch.step(branch_state, "x")).next_state.observation == f"{WAY}/later/x"
        nodes = list(mgr.tree().nodes())[before:]
        assert [(node.kind, node.step) for node in nodes] == [
            ("checkpoint", 5),
            ("branch", 5),
            ("checkpoint", 6),
            ("branch", 6),
            ("checkpoint", 6),
            ("branch", 6),
        ]
        assert [node.fate for node in nodes if node.kind == "checkpoint"] == ["replaced", "released", "live"]
        assert "├─ checkpoint here · step 5" in str(mgr.tree())


SCENARIOS = [hundred_continuations, nested, release_overwrite_tree]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_live_object(scenario: Scenario, strategy: str) -> None:
    surface = AsyncSurface()
    with anyio.fail_after(30):
        await scenario(surface, surface.live(ENVIRONMENTS[strategy]()), strategy, False)


@pytest.mark.parametrize("strategy", ["direct", "process_fork", "action_replay"])
async def test_hosted(strategy: str) -> None:
    surface = AsyncSurface()
    with anyio.fail_after(30):
        async with surface.host(ENVIRONMENTS[strategy]) as env:
            for scenario in SCENARIOS if strategy == "process_fork" else SCENARIOS[1:]:
                await scenario(surface, env, strategy, True)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_live_object_blocking(scenario: Scenario, strategy: str) -> None:
    surface = BlockingSurface()
    finish(scenario(surface, surface.live(ENVIRONMENTS[strategy]()), strategy, True))


@pytest.mark.parametrize("strategy", ["direct", "process_fork", "action_replay"])
def test_hosted_blocking(strategy: str) -> None:
    async def main() -> None:
        surface = BlockingSurface()
        async with surface.host(ENVIRONMENTS[strategy]) as env:
            for scenario in SCENARIOS if strategy == "process_fork" else SCENARIOS[1:]:
                await scenario(surface, env, strategy, False)

    finish(main())


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_continuations_at_once(strategy: str) -> None:
    surface = AsyncSurface()
    env = surface.live(ENVIRONMENTS[strategy]())
    seen = []

    async def rollout(mgr: BranchManager, number: int) -> None:
        async with mgr.branch("step5") as (branch, state):
            result = await branch.step(state, f"way-{number}")
            seen.append((await branch.step(result.next_state, "end")).next_state.observation)

    with anyio.fail_after(30):
        state, actions = await five_steps(env)
        async with surface.manager(env, **options_for(strategy, True)) as mgr:
            await mgr.checkpoint("step5", state, actions=actions, reset_options=RESET)
            async with anyio.create_task_group() as tg:
                for number in range(50):
                    tg.start_soon(rollout, mgr, number)
    assert sorted(seen) == sorted(f"{WAY}/way-{number}/end" for number in range(50))


# -- which strategy ------------------------------------------------------------------------------------


def test_what_is_chosen_for_a_live_object() -> None:
    for make in (BranchManager.create, blocking.BranchManager.create):
        assert make(PureTrail()).strategy == "direct"
        assert make(CloneTrail()).strategy == "clone"
        assert make(Trail()).strategy == "process_fork"
        assert make(RemoteTrail(), env_factory=RemoteTrail).strategy == "action_replay"
        with pytest.raises(CannotBranch, match="action_replay: there is no env_factory"):
            make(RemoteTrail())


@pytest.mark.parametrize(
    "factory, strategy",
    [
        (PureTrail, "direct"),
        (CloneTrail, "process_fork"),  # the agent holds no object that could be cloned
        (Trail, "process_fork"),
        (RemoteTrail, "action_replay"),
    ],
)
def test_what_is_chosen_for_a_host(factory: type[Any], strategy: str) -> None:
    async def main() -> None:
        async with host(factory) as env, BranchManager.create(env) as mgr:
            assert mgr.strategy == strategy

    anyio.run(main)
    with blocking.host(factory) as env, blocking.BranchManager.create(env) as mgr:
        assert mgr.strategy == strategy


def test_a_spec_that_promises_too_little_for_a_replay() -> None:
    class NoSeed(RemoteTrail):
        spec = EnvironmentSpec("no seed", state_location="remote")

    with pytest.raises(CannotBranch, match="behind an address"):
        BranchManager.create(NoSeed(), env_factory=NoSeed)
    # Asked for by name, it is the user's word against the spec's.
    assert BranchManager.create(NoSeed(), strategy="action_replay", env_factory=NoSeed).strategy == "action_replay"


def test_configuration() -> None:
    for make in (BranchManager.create, blocking.BranchManager.create):
        config = EnvironmentConfig(name="trail", adapter="trail", branching_strategy="process_fork")
        assert make(CloneTrail(), config=config).strategy == "process_fork"
        assert make(CloneTrail(), config=config, strategy="clone").strategy == "clone"
        silent = EnvironmentConfig(name="trail")
        assert make(CloneTrail(), config=silent).strategy == "clone"
        assert make(CloneTrail(), strategy="action_replay", env_factory=CloneTrail).strategy == "action_replay"
    with pytest.raises(ValueError, match="direct, clone, process_fork, action_replay or None, got 'fork'"):
        EnvironmentConfig(name="trail", branching_strategy="fork")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="strategy must be one of"):
        BranchManager.create(Trail(), strategy="fork")  # type: ignore[arg-type]
