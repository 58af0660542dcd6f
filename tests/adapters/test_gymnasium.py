"""The Gymnasium adapter."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import gymnasium
import nle  # noqa: F401  # it registers its games
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.experimental.functional import FuncEnv

from ramet import (
    Action,
    BranchManager,
    EnvironmentFailed,
    HostFailed,
    InvalidEnvironment,
    StrategyName,
    blocking,
    host,
)
from ramet.adapters._actions import ActionReader
from ramet.adapters.gymnasium import FunctionalEnvironment, GymnasiumEnvironment, make_environment
from tests.helpers import run_script

MAKE = "ramet.adapters.gymnasium:make_environment"
ONE_LOOP = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": False})], ids=["asyncio"])


class Masked(gymnasium.Env[int, int]):
    """Has what masked policies ask for, and a generator of its own."""

    def __init__(self) -> None:
        self.action_space: Any = spaces.Discrete(3)
        self.observation_space: Any = spaces.Discrete(1000)
        self.dice = np.random.RandomState(0)
        self.level = 4

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return 0, {"options": options}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return int(self.dice.randint(1000)), 1, False, True, {"lucky": True}

    def action_masks(self) -> list[bool]:
        return [True, False, True]

    def clone(self) -> Masked:
        raise AssertionError("it would lose its wrapper")


class Walk(FuncEnv[int, int, int, float, bool, Any, Any]):
    """A walk on the integers that slips now and then."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Discrete(2**31)
    length = 5

    def initial(self, rng: Any, params: Any = None) -> int:
        return int(rng.integers(1000))

    def transition(self, state: int, action: int, rng: Any, params: Any = None) -> int:
        return state + (1 if action else -1) * int(rng.integers(1, self.length + 1))

    def observation(self, state: int, rng: Any, params: Any = None) -> int:
        return state

    def reward(self, state: int, action: int, next_state: int, rng: Any, params: Any = None) -> float:
        return next_state - state

    def terminal(self, state: int, rng: Any, params: Any = None) -> bool:
        return state < 0

    def transition_info(self, state: int, action: int, next_state: int, params: Any = None) -> dict[str, Any]:
        return {"from": state}


def make_masked() -> GymnasiumEnvironment:
    return GymnasiumEnvironment(Masked())


# -- making one ----------------------------------------------------------------------------------------


def test_spec_of_an_id() -> None:
    env = make_environment("CartPole-v1", max_episode_steps=30)
    spec = env.spec
    assert (spec.name, spec.adapter, spec.max_steps) == ("CartPole-v1", "gymnasium", 30)
    assert spec.supports_seed
    assert spec.deterministic
    assert not spec.pure_step
    assert not spec.supports_clone
    assert spec.metadata["action_space"] == "Discrete(2)"
    assert spec.metadata["observation_space"].startswith("Box(")


def test_spec_of_an_object_claims_no_more_than_is_known() -> None:
    spec = make_masked().spec
    assert spec.name == "Masked"
    assert not spec.deterministic
    assert spec.max_steps is None


def test_nethack_knows_its_limit() -> None:
    env = make_environment("NetHackScore-v0", max_episode_steps=70)
    assert isinstance(env, GymnasiumEnvironment)
    assert env.spec.max_steps == 70
    env.close()


def test_an_instance_and_a_registered_spec_serve_too() -> None:
    assert make_environment(gymnasium.spec("CartPole-v1")).spec.name == "CartPole-v1"
    assert make_environment(gymnasium.make("CartPole-v1")).spec.name == "CartPole-v1"


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: make_environment("CartPole-v1", render_mode="human"), "window.*rgb_array"),
        (lambda: GymnasiumEnvironment(gymnasium.make("CartPole-v1", render_mode="human")), "window.*rgb_array"),
        (lambda: GymnasiumEnvironment(gymnasium.make_vec("CartPole-v1", num_envs=2)), "step_all"),
        (lambda: make_environment("CartPole-v1", pure_step=True), "CartPole-v1 keeps its state inside.*FuncEnv"),
        (lambda: make_environment(Walk, pure_step=False), "pure by itself"),
        (lambda: make_environment(Walk(), length=3), "length= cannot apply"),
        (lambda: make_environment(gymnasium.make("CartPole-v1"), render_mode="ansi"), "render_mode= cannot apply"),
        (lambda: GymnasiumEnvironment(Walk()), "FunctionalEnvironment"),
        (lambda: GymnasiumEnvironment("CartPole-v1"), "make_environment"),
        (lambda: GymnasiumEnvironment(object()), "gymnasium.Env, got object"),
    ],
)
def test_what_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(InvalidEnvironment, match=reason):
        make()


@ONE_LOOP
async def test_a_refusal_comes_out_of_a_host() -> None:
    with pytest.raises(HostFailed, match="window"):
        async with host(MAKE, args=("CartPole-v1",), kwargs={"render_mode": "human"}):
            pass


def test_without_gymnasium_it_says_what_to_install() -> None:
    finished = run_script(
        """
        import sys
        sys.modules["gymnasium"] = None
        import ramet.adapters.gymnasium
        """
    )
    assert finished.stderr.splitlines()[-1] == (
        'ModuleNotFoundError: gymnasium is not installed: pip install "ramet[gymnasium]"'
    )


def test_only_the_adapter_imports_gymnasium() -> None:
    finished = run_script("import sys, ramet, ramet.adapters; ramet.host; print('gymnasium' in sys.modules)")
    assert finished.stdout == "False\n", finished.stderr


# -- actions -------------------------------------------------------------------------------------------


def reader(space: spaces.Space[Any], **texts: Any) -> ActionReader:
    return ActionReader(
        space, name="Game", texts={text.replace("_", " "): value for text, value in texts.items()}, check=True
    )


@pytest.mark.parametrize(
    "action",
    [
        *[2, np.int64(2), np.array(2), np.array([2]), "2", " 2 ", "go on", "Go On\n"],
        *[Action.from_text("2"), Action.from_text("go on"), Action(payload=2), Action(payload="go on")],
    ],
    ids=repr,
)
def test_ways_to_say_two(action: Any) -> None:
    assert reader(spaces.Discrete(3), stay=0, go_on=2)(action) == 2


@pytest.mark.parametrize(
    "action",
    [3, -1, 1.0, None, "3", "jump", "", "[1", Action(), Action.from_text("jump"), Action(payload=7), [0, 1]],
    ids=repr,
)
def test_what_is_no_action_names_what_is(action: Any) -> None:
    with pytest.raises(
        ValueError, match=r"is no action of Game: it takes one of 'stay', 'go on', or an integer from 0 to 2"
    ):
        reader(spaces.Discrete(3), stay=0, go_on=2)(action)


def test_a_tool_call_alone_is_no_action() -> None:
    with pytest.raises(ValueError, match="go_left"):
        reader(spaces.Discrete(3))(Action.from_tool_call("go_left"))


def test_the_first_action_need_not_be_zero() -> None:
    read = reader(spaces.Discrete(2, start=5))
    assert read("6") == 6
    with pytest.raises(ValueError, match="from 5 to 6"):
        read(0)


@pytest.mark.parametrize(
    "action", [[0.5, 1], (0.5, 1.0), np.array([0.5, 1.0]), "[0.5, 1]", Action.from_text("[0.5, 1]")], ids=repr
)
def test_a_box_takes_lists(action: Any) -> None:
    value = reader(spaces.Box(-1, 1, (2,), np.float32))(action)
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, [0.5, 1.0])


@pytest.mark.parametrize("action", [[0.5, 1.5], [0.5], "NaN", "x", ["a", "b"]], ids=repr)
def test_outside_of_a_box(action: Any) -> None:
    with pytest.raises(ValueError, match=r"float32 numbers of shape \(2,\) from -1 to 1"):
        reader(spaces.Box(-1, 1, (2,), np.float32))(action)


def test_other_spaces() -> None:
    assert reader(spaces.Text(5))("ab") == "ab"
    assert reader(spaces.MultiDiscrete([2, 300]))([1, 299]).tolist() == [1, 299]
    nested = spaces.Dict(
        {"move": spaces.Discrete(2), "aim": spaces.Tuple([spaces.Box(0, 1, (1,)), spaces.Discrete(2)])}
    )
    value = reader(nested)('{"move": 1, "aim": [[0.5], 0]}')
    assert nested.contains(value)
    with pytest.raises(ValueError, match="an element of Dict"):
        reader(nested)({"move": 1})
    with pytest.raises(ValueError, match="an element of MultiDiscrete"):
        reader(spaces.MultiDiscrete([2, 3]))([0.5, 1])
    with pytest.raises(ValueError, match="uint8 numbers"):
        reader(spaces.Box(0, 255, (1,), np.uint8))([300])


def test_a_text_for_what_is_no_action_is_found_at_once() -> None:
    with pytest.raises(ValueError, match="7 is no action of CartPole-v1"):
        make_environment("CartPole-v1", actions={"left": 7})


def test_unchecked_actions_pass() -> None:
    env = make_environment("Pendulum-v1", check_actions=False)
    state, _ = env.reset(seed=1)
    env.step(state, [5.0])
    with pytest.raises(ValueError, match="'jump' is no action"):
        env.step(state, "jump")


# -- one episode ---------------------------------------------------------------------------------------


def test_states_and_results() -> None:
    env = make_masked()
    state, info = env.reset(seed=3, options={"task": 1})
    assert info == {"options": {"task": 1}}
    assert (state.metadata.step, state.metadata.episode_id, state.metadata.is_terminal) == (0, "1", False)
    result = env.step(state, 1)
    assert isinstance(result.reward, float)
    assert (result.terminated, result.truncated, result.info) == (False, True, {"lucky": True})
    assert (result.next_state.metadata.step, result.next_state.metadata.is_terminal) == (1, True)
    assert env.reset()[0].metadata.episode_id == "2"


def test_it_reaches_what_the_game_has_besides() -> None:
    env = GymnasiumEnvironment(gymnasium.wrappers.TimeLimit(Masked(), 10))
    assert env.level == 4
    assert env.action_masks() == [True, False, True]
    assert env.action_space == spaces.Discrete(3)
    for name in ("_np_random", "clone", "no_such_thing"):
        with pytest.raises(AttributeError):
            getattr(env, name)


def test_it_pickles() -> None:
    env = pickle.loads(pickle.dumps(make_environment("CartPole-v1", actions={"left": 0})))
    state, _ = env.reset(seed=1)
    assert env.step(state, "left").reward == 1.0


def test_a_reseed_reaches_every_generator() -> None:
    env = GymnasiumEnvironment(gymnasium.wrappers.TimeLimit(Masked(), 10))
    env.reset(seed=1)
    named = env.reseed(5)
    assert {"env.unwrapped.np_random", "env.unwrapped.dice"} <= set(named)
    assert any("action_space" in name for name in named)
    inner = env.unwrapped
    first = inner.dice.randint(1000), inner.np_random.random(), env.action_space.sample()
    env.reseed(5)
    assert first == (inner.dice.randint(1000), inner.np_random.random(), env.action_space.sample())


@pytest.mark.filterwarnings("ignore:.*share an object")  # newer Gymnasiums say so of NLE; the adapter copies
def test_a_reset_seeds_nethack() -> None:
    games = []
    for _ in range(2):
        env = make_environment("NetHackScore-v0")
        assert isinstance(env, GymnasiumEnvironment)
        state, _ = env.reset(seed=5)
        games.append(state.observation["chars"])
        kept = state.observation["chars"].copy()
        for key in range(8):
            env.step(state, key)
        np.testing.assert_array_equal(kept, games[-1])  # not overwritten by later steps
        assert not env.unwrapped.get_seeds()[2]
        second, _ = env.reset()
        assert not env.unwrapped.get_seeds()[2]
        games.append(second.observation["chars"])
        env.seed(core=5, disp=5)  # NLE's own way
        third, _ = env.reset()
        np.testing.assert_array_equal(third.observation["chars"], games[0])
        env.close()
    np.testing.assert_array_equal(games[0], games[2])
    np.testing.assert_array_equal(games[1], games[3])  # Gymnasium's rule: the next game follows from the first seed
    assert (games[0] != games[1]).any()


# -- in a process of its own ---------------------------------------------------------------------------


async def test_in_a_host() -> None:
    kwargs = {"actions": {"push left": 0, "push right": 1}, "render_mode": "rgb_array"}
    async with host(make_environment, args=("CartPole-v1",), kwargs=kwargs) as env, BranchManager.create(env) as mgr:
        assert mgr.strategy == "process_fork"
        assert env.spec.max_steps == 500
        state, _ = await env.reset(seed=1)
        for action in (1, "push left", np.int64(1), Action.from_text("push right"), Action(payload=0)):
            state = (await env.step(state, action)).next_state
        assert state.observation.dtype == np.float32
        with pytest.raises(EnvironmentFailed, match=r"'jump' is no action.*'push left', 'push right', or"):
            await env.step(state, "jump")
        await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (branch, _):
            picture = await branch.call("render")
            assert picture.shape == (400, 600, 3)
            assert picture.dtype == np.uint8


@ONE_LOOP
async def test_other_methods_through_call() -> None:
    async with host(make_masked) as env:
        await env.reset(seed=1)
        assert await env.call("action_masks") == [True, False, True]
        assert await env.call("level") == 4
        with pytest.raises(EnvironmentFailed, match="no_such_thing"):
            await env.call("no_such_thing")


def test_blocking() -> None:
    with blocking.host(MAKE, args=("CartPole-v1",)) as env, blocking.BranchManager.create(env) as mgr:
        state, _ = env.reset(seed=1)
        mgr.checkpoint("here", state)
        with mgr.branch("here") as (branch, branch_state):
            here = branch.step(branch_state, 1).next_state.observation
        np.testing.assert_array_equal(env.step(state, 1).next_state.observation, here)


@ONE_LOOP
async def test_action_replay_by_name() -> None:
    async with host(MAKE, args=("FrozenLake-v1",)) as env, BranchManager.create(env, strategy="action_replay") as mgr:
        state, _ = await env.reset(seed=1)
        for action in (0, 0, 3, 0):
            state = (await env.step(state, action)).next_state
        await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (branch, branch_state):
            assert branch_state.observation == state.observation
            for _ in range(4):
                mine, theirs = await env.step(state, 0), await branch.step(branch_state, 0)
                assert mine.next_state.observation == theirs.next_state.observation
                state, branch_state = mine.next_state, theirs.next_state


# -- pure ones -----------------------------------------------------------------------------------------


def test_a_functional_environment_is_pure() -> None:
    env = make_environment(Walk, max_steps=3, length=2, actions={"up": 1})
    assert isinstance(env, FunctionalEnvironment)
    assert env.length == 2
    assert env.spec.pure_step
    assert env.spec.max_steps == 3
    state, info = env.reset(seed=1)
    assert info == {}
    first, second = env.step(state, "up"), env.step(state, "up")
    assert first == second  # the generator is part of the state
    assert first.reward in (1, 2)
    assert first.info == {"from": state.observation}
    third = env.step(env.step(first.next_state, 1).next_state, 1)
    assert third.truncated
    assert third.next_state.metadata.step == 3
    assert third.next_state.metadata.is_terminal
    draws = {env.step(env.reseed(state, seed), 1).reward for seed in range(20)}
    assert draws == {1, 2}


async def test_a_functional_environment_branches_directly() -> None:
    async with BranchManager.create(make_environment(Walk())) as mgr:
        assert mgr.strategy == "direct"
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (one, one_state), mgr.branch("here") as (two, two_state):
            assert await one.step(one_state, 1) == await two.step(two_state, 1)


@ONE_LOOP
@pytest.mark.parametrize("strategy", [None, "direct", "process_fork", "action_replay"])
async def test_a_hosted_functional_environment(strategy: StrategyName | None) -> None:
    async with host(make_environment, args=(Walk,)) as env, BranchManager.create(env, strategy=strategy) as mgr:
        assert mgr.strategy == (strategy or "direct")
        state, _ = await env.reset(seed=1)
        if strategy == "action_replay":
            await mgr.checkpoint("here", state, actions=[], reset_options={"seed": 1})
        else:
            state = (await env.step(state, 1)).next_state
            await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (branch, branch_state):
            theirs = [(await branch.step(branch_state, action)).next_state.observation for action in (1, 1, 0)]
        mine = [(await env.step(state, action)).next_state.observation for action in (1, 1, 0)]
        assert mine == theirs
        assert mine[0] == mine[1]
        seen = set()
        for seed in (1, 2, 3, 4, 5, 6, 6):
            async with mgr.branch("here", seed=seed) as (branch, branch_state):
                if mgr.strategy != "direct":
                    assert "state" in branch.reseeded
                seen.add((seed, (await branch.step(branch_state, 1)).reward))
        assert len({reward for _, reward in seen}) > 1
        assert len(seen) == 6
