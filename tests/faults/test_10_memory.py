"""Row 10: the memory of children blows up at the first garbage collection. What it costs is measured in `bench/`."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from ramet import BranchManager, host
from ramet.process.memory import private_memory
from tests.faults.envs import Counter


class Heap(Counter):
    """Many small objects, as a world of a game has them."""

    def __init__(self) -> None:
        super().__init__()
        self.world = [{"x": number, "y": [number]} for number in range(100_000)]

    def act(self, action: Any) -> Any:
        if action == "collect":
            gc.collect()
        return gc.get_freeze_count()


async def test_memory_of_children_blows_up_at_the_first_collection() -> None:
    """A child's heap is frozen, so that its collections leave the shared pages alone; the parent's is not."""
    async with host(Heap) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 2) as pairs:
                (idle, idle_at), (busy, busy_at) = pairs
                assert (await idle.step(idle_at, "look")).next_state.observation > 200_000
                assert (await busy.step(busy_at, "collect")).next_state.observation > 200_000
                # Without the freeze a collection writes to every object's header: some 30 MiB here.
                more = private_memory(busy.pid)["Private_Dirty"] - private_memory(idle.pid)["Private_Dirty"]
                assert more < 4 << 20
            live, live_at = await env.fork()
            assert (await live.step(live_at, "collect")).next_state.observation > 200_000
            assert private_memory(live.pid)["Private_Dirty"] < 12 << 20
        at = (await env.step(at, "look")).next_state
        assert at.observation == 0  # the parent goes on collecting what it makes


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in the test process
async def test_memory_of_a_live_objects_branches_blows_up() -> None:
    """The same for a copy of the agent, whose own heap is given back to its collector."""
    env = Heap()
    at, _ = env.reset()
    async with BranchManager.create(env) as mgr:
        await mgr.checkpoint("start", at)
        assert gc.get_freeze_count() == 0
        for _ in range(2):
            async with mgr.branch("start") as (branch, below):
                assert (await branch.step(below, "collect")).next_state.observation > 200_000
