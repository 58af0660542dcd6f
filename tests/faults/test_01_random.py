"""Rows 1 and 1b: siblings draw the same random numbers; CPython reseeds `random` in every forked child."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from ramet import BranchManager, CannotReseed, ForkSafetyWarning, host
from tests.faults.envs import Counter


class Dice(Counter):
    """Draws from every kind of generator at each step."""

    def __init__(self) -> None:
        super().__init__()
        random.seed(1)
        np.random.seed(2)
        self.held = random.Random(3)
        self.np_random = np.random.default_rng(4)

    def act(self, action: Any) -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),  # it keeps a second number for the next call
            float(np.random.random()),
            self.held.random(),
            float(self.np_random.random()),
        ]


class ThreadedDice(Dice):
    """Its process has an idle thread, so that it is forked in the other of the two ways."""

    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, name="idle", daemon=True).start()


async def throws(env: Any, state: Any, n: int = 5) -> list[Any]:
    seen = []
    for _ in range(n):
        state = (await env.step(state, "throw")).next_state
        seen.append(state.observation)
    return seen


async def test_siblings_draw_the_same_random_numbers_by_default() -> None:
    """A branch without `seed=` is an exact copy, so siblings draw alike from every generator."""
    async with host(Dice) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            async with mgr.branches("start", 3) as pairs:
                first, second, third = [await throws(*pair) for pair in pairs]
                assert [branch.reseeded for branch, _ in pairs] == [(), (), ()]
    assert first == second == third


async def test_siblings_that_ask_for_fresh_seeds_differ_in_every_generator() -> None:
    """`seed="fresh"` reseeds the global and the held generators, and the answer lists them."""
    async with host(Dice) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            async with mgr.branches("start", 2, seed="fresh") as pairs:
                first, second = [await throws(*pair) for pair in pairs]
                for branch, _ in pairs:
                    assert set(branch.reseeded) == {
                        "random",
                        "numpy.random",
                        "env.held",
                        "env.np_random",
                    }
            exact = await throws(env, state)
    for generator in range(5):
        assert first[0][generator] != second[0][generator]
        assert first[0][generator] != exact[0][generator]


async def test_a_seed_reseeds_reproducibly_and_each_sibling_differently() -> None:
    """The same integer gives the same draws in every run, and siblings of one call get seeds of their own."""
    async with host(Dice) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            runs = []
            for _ in range(2):
                async with mgr.branches("start", 2, seed=7) as pairs:
                    runs.append([await throws(*pair) for pair in pairs])
            forks = await env.fork(2, seed=7)
            live = [await throws(*pair) for pair in forks]
    assert runs[0] == runs[1] == live
    assert runs[0][0] != runs[0][1]


async def test_a_seed_that_nothing_can_take_is_refused() -> None:
    """Where no generator was found, a requested seed raises instead of giving one sample twice."""
    async with host(Counter) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            with pytest.raises(CannotReseed):
                await mgr.branch("start", seed="fresh")
            async with mgr.branch("start") as (branch, state):
                assert (await branch.step(state, "go")).reward == 1.0


@pytest.mark.parametrize("factory", [Dice, ThreadedDice])
async def test_cpython_reseeds_the_global_generator_in_every_forked_child(factory: type[Dice]) -> None:
    """A game that draws from `random` goes on byte for byte in the parent, the branch and the branch's fork."""
    async with host(factory, allow_threads=True) as env:
        state, _ = await env.reset()
        state = (await env.step(state, "throw")).next_state
        if factory is ThreadedDice:
            with pytest.warns(ForkSafetyWarning):
                child, at = await env.fork()
        else:
            child, at = await env.fork()
        grandchild, below = await child.fork()
        assert await throws(env, state) == await throws(child, at) == await throws(grandchild, below)


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in the test process
async def test_cpython_reseeds_the_global_generator_in_a_fork_of_the_agent() -> None:
    """A live object's branches draw what the agent itself would have drawn, and the agent's draws stay its own."""
    live = Dice()
    state, _ = live.reset()
    expected = random.Random()
    expected.setstate(random.getstate())
    async with BranchManager.create(live) as mgr:
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 2) as pairs:
            transcripts = [await throws(*pair) for pair in pairs]
        first = transcripts[0][0][0]
        assert transcripts[0] == transcripts[1]
    assert random.random() == first == expected.random()
