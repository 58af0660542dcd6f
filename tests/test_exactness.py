"""A copy goes on exactly as the original would have: real games, byte for byte.

The same suffix is played by the original and by two copies, after a third copy went another way.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium
import nle  # noqa: F401  # it registers its games
import numpy as np
import pytest

from ramet import BranchEnvironment, BranchManager, CannotBranch, LocalEnvironment, State, StepResult, host
from ramet.adapters.gymnasium import GymnasiumEnvironment, make_environment
from ramet.protocol.codec import Codec

ONE_LOOP = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])

MAKE = "ramet.adapters.gymnasium:make_environment"
SEED = 7

codec = Codec()


class Dice:
    """Draws from the generators that every library shares."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, dict[str, Any]]:
        random.seed(seed)
        np.random.seed(seed)
        return State(0), {}

    def step(self, state: State, action: int) -> StepResult:
        rolled = [random.randrange(1000), int(np.random.randint(1000)), random.random(), float(np.random.normal())]
        return StepResult(State([action, *rolled]), reward=rolled[2])


@dataclass(frozen=True)
class Game:
    """A game, and ways to play it.

    Attributes:
        factory: what makes it.
        args: the factory's arguments.
        actions: how many actions there are.
        reseeded: what a seed reaches, besides the shared generators.
        random: whether its steps draw random numbers.
    """

    name: str
    factory: Any = MAKE
    args: tuple[Any, ...] = ()
    actions: int = 2
    reseeded: set[str] = field(default_factory=lambda: {"env.unwrapped.np_random"})
    random: bool = True

    def way(self, number: int, length: int) -> list[int]:
        return [int(action) for action in np.random.default_rng(number).integers(self.actions, size=length)]


GAMES = [
    Game("cartpole", args=("CartPole-v1",), random=False),
    Game("frozen-lake", args=("FrozenLake8x8-v1",), actions=4),
    Game("lunar-lander", args=("LunarLander-v3",), actions=4),
    # The compass and a search: nothing that asks a question.
    Game("nethack", args=("nle:NetHackScore-v0",), actions=8, reseeded={"env.unwrapped.np_random", "nethack"}),
    Game("dice", factory=Dice, actions=6, reseeded=set()),
]
EACH_GAME = pytest.mark.parametrize("game", GAMES, ids=lambda game: game.name)


async def play(
    env: BranchEnvironment | LocalEnvironment, state: State, actions: Sequence[int]
) -> tuple[State, list[bytes]]:
    """The last state, and what was seen of each step, encoded."""
    seen = []
    for action in actions:
        result = await env.step(state, action)
        state = result.next_state
        facts = [state.observation, result.reward, result.terminated, result.truncated, result.info]
        seen.append(codec.encode(facts))
        if result.done:
            break
    return state, seen


@EACH_GAME
async def test_copies_go_on_exactly(game: Game) -> None:
    suffix = game.way(1, 25)
    async with host(game.factory, args=game.args) as env, BranchManager.create(env) as mgr:
        assert mgr.strategy == "process_fork"
        state, _ = await env.reset(seed=SEED)
        state, prefix = await play(env, state, game.way(0, 6))
        assert len(prefix) == 6
        await mgr.checkpoint("here", state)
        fork, fork_state = await env.fork()
        async with mgr.branch("here") as (branch, branch_state), mgr.branch("here") as (other, other_state):
            assert codec.encode(branch_state.observation) == codec.encode(state.observation)
            _, elsewhere = await play(other, other_state, game.way(2, 25))
            _, original = await play(env, state, suffix)
            _, of_branch = await play(branch, branch_state, suffix)
            _, of_fork = await play(fork, fork_state, suffix)
            assert branch.reseeded == fork.reseeded == ()
        assert of_branch == original
        assert of_fork == original
        assert elsewhere != original
        async with mgr.branch("here") as (late, late_state):  # the checkpoint stands where it stood
            assert (await play(late, late_state, suffix))[1] == original


@ONE_LOOP
@EACH_GAME
async def test_fresh_seeds_make_siblings_differ(game: Game) -> None:
    suffix = game.way(1, 25)
    async with host(game.factory, args=game.args) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset(seed=SEED)
        state, _ = await play(env, state, game.way(0, 3))
        await mgr.checkpoint("here", state)
        ways = set()
        async with mgr.branches("here", 4, seed="fresh") as pairs:
            for branch, branch_state in [*pairs, *await env.fork(4, seed="fresh")]:
                assert set(branch.reseeded) >= {"random", "numpy.random"} | game.reseeded
                ways.add(b"".join((await play(branch, branch_state, suffix))[1]))
        assert (len(ways) > 1) == game.random


@ONE_LOOP
@EACH_GAME
async def test_a_seed_makes_the_same_branch_again(game: Game) -> None:
    suffix = game.way(1, 25)
    async with host(game.factory, args=game.args) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset(seed=SEED)
        await mgr.checkpoint("here", state)
        ways = []
        for _ in range(2):
            async with mgr.branch("here", seed=2**62 + 3) as (branch, branch_state):
                ways.append((await play(branch, branch_state, suffix))[1])
        assert ways[0] == ways[1]


# -- what copying objects does instead -----------------------------------------------------------------


def test_a_deep_copy_of_the_lander_is_silently_another() -> None:
    env = gymnasium.make("LunarLander-v3")
    env.reset(seed=SEED)
    env.step(2)
    copied = copy.deepcopy(env)  # no error
    env.step(2)
    with pytest.raises(AssertionError):  # it was never reset
        copied.step(2)
    env.close()  # type: ignore[no-untyped-call]


def test_nethack_cannot_be_deep_copied() -> None:
    env = gymnasium.make("NetHackScore-v0")
    env.reset(seed=SEED)
    with pytest.raises(TypeError, match="pickle"):
        copy.deepcopy(env)
    env.close()  # type: ignore[no-untyped-call]


@ONE_LOOP
@pytest.mark.parametrize(
    "name, reason", [("LunarLander-v3", "never reset"), ("NetHackScore-v0", "pickle")], ids=["lander", "nethack"]
)
async def test_clone_refuses_both(name: str, reason: str) -> None:
    env = make_environment(name)
    async with BranchManager.create(env, strategy="clone") as mgr:
        state, _ = await mgr.env.reset(seed=SEED)
        with pytest.raises(CannotBranch, match=reason) as caught:
            await mgr.checkpoint("here", state)
        assert "process_fork" in str(caught.value)
    assert isinstance(env, GymnasiumEnvironment)
    env.close()


@ONE_LOOP
async def test_a_deep_copy_of_cartpole_is_exact() -> None:
    game = GAMES[0]
    async with BranchManager.create(make_environment("CartPole-v1"), strategy="clone") as mgr:
        state, _ = await mgr.env.reset(seed=SEED)
        state, _ = await play(mgr.env, state, game.way(0, 6))
        await mgr.checkpoint("here", state)
        branch, branch_state = await mgr.branch("here")
        _, original = await play(mgr.env, state, game.way(1, 25))
        assert (await play(branch, branch_state, game.way(1, 25)))[1] == original


# -- NetHack's files -----------------------------------------------------------------------------------


def make_wizard() -> GymnasiumEnvironment:
    """NetHack with every key and the wizard's teleport between levels."""
    env = make_environment(
        "NetHackScore-v0",
        wizard=True,
        actions=tuple(range(256)),
        allow_all_yn_questions=True,
        allow_all_modes=True,
        check_actions=False,
    )
    assert isinstance(env, GymnasiumEnvironment)
    return env


def keys(text: str) -> list[int]:
    return [ord(key) for key in text]


def to_level(number: int) -> str:
    return f"\x16{number}\r"


@ONE_LOOP
async def test_levels_that_copies_of_nethack_leave_are_their_own(tmp_path: Path) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path), "USER": "nobody"}
    suffix = keys(to_level(1) + "hhjj" + to_level(3) + "lll" + to_level(2) + "kkk")
    async with host(make_wizard, environ=environ) as env:
        state, _ = await env.reset(seed=SEED)
        state, _ = await play(env, state, keys(to_level(2) + "lll"))
        (one, one_state), (two, two_state), (other, other_state) = await env.fork(3)
        await play(other, other_state, keys("jjjj" + to_level(3) + "kkkh" + to_level(1) + "hh" + to_level(2)))
        state, original = await play(env, state, suffix)
        assert state.observation["blstats"][12] == 2
        assert (await play(one, one_state, suffix))[1] == original
        assert (await play(two, two_state, suffix))[1] == original
        # A new game in a copy is exact too, and so is its copy.
        one_state, _ = await one.reset(seed=SEED)
        again, again_state = await one.fork()
        _, first = await play(one, one_state, suffix)
        assert (await play(again, again_state, suffix))[1] == first
    assert os.listdir(tmp_path) == []


@ONE_LOOP
async def test_copies_of_nethack_do_not_fill_the_disk(tmp_path: Path) -> None:
    async with host(make_wizard, environ={**os.environ, "TMPDIR": str(tmp_path), "USER": "nobody"}) as env:
        state, _ = await env.reset(seed=SEED)
        for _ in range(12):
            fork, fork_state = await env.fork()
            await play(fork, fork_state, keys("h"))
            await fork.aclose()
            state, _ = await play(env, state, keys("l"))
        (home,) = os.listdir(tmp_path)
        rooms = [name for name in os.listdir(tmp_path / home) if name.startswith("room-")]
        assert 0 < len(rooms) <= 6
