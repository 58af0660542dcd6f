"""Row 5: zombies pile up until `fork: Resource temporarily unavailable`."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import anyio
import pytest

from ramet import BranchLost, BranchManager, host
from tests.faults.envs import Counter, snapshot
from tests.helpers import descendants, eventually, state


class Messy(Counter):
    """Starts processes that it does not wait for."""

    def act(self, action: Any) -> Any:
        if action == "start":
            return subprocess.Popen(["true"]).pid  # never waited for
        if action == "orphan":  # its parent ends first
            text = subprocess.check_output(["sh", "-c", "sleep 1000 >/dev/null & echo $!"], text=True)
            return int(text)
        if action == "exit":
            os._exit(3)
        return self.count


async def cycle(mgr: BranchManager, action: str = "go") -> int:
    async with mgr.branch("start") as (branch, at):
        await branch.step(at, action)
        return branch.pid


def zombies() -> list[str]:
    return [str(process) for process in descendants(os.getpid()) if process.state == "Z"]


async def test_zombies_pile_up() -> None:
    """When a branch is closed it has been reaped; many cycles leave process and fd counts where they were."""
    async with host(Counter) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            before = snapshot()
            for _ in range(100):
                assert state(await cycle(mgr)) is None
            async with anyio.create_task_group() as group:
                for _ in range(50):
                    group.start_soon(cycle, mgr)
            for _ in range(30):
                copy, _ = await env.fork()
                await copy.aclose()
            assert snapshot() == before


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in the test process
async def test_zombies_of_a_forked_agent_pile_up() -> None:
    """The same for a live object: its checkpoints are children of the agent, its branches are theirs."""
    env = Counter()
    at, _ = env.reset()
    before: Any = None
    async with BranchManager.create(env) as mgr:
        for _ in range(8):
            await mgr.checkpoint("start", at)
            for _ in range(8):
                assert state(await cycle(mgr)) is None
            assert not zombies()
            before = before or (len(snapshot()[0]), len(snapshot()[1]))
            assert (len(snapshot()[0]), len(snapshot()[1])) == before


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_zombies_pile_up_over_ten_thousand_cycles(anyio_backend: Any) -> None:
    """10,000 branch/close cycles leave process and fd counts where they were."""
    async with host(Counter) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            before = snapshot()
            for _ in range(10_000):
                await cycle(mgr)
            assert snapshot() == before


async def test_branches_that_end_by_themselves_stay_as_zombies() -> None:
    """A branch that dies, and the processes that branches leave unreaped, are reaped by the warden."""
    async with host(Messy) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            for _ in range(10):
                async with mgr.branch("start") as (branch, below):
                    with pytest.raises(BranchLost, match="exited with status 3"):
                        await branch.step(below, "exit")
                    assert state(branch.pid) is None
            async with mgr.branch("start") as (branch, below):
                below = (await branch.step(below, "start")).next_state
                unwaited = below.observation
                orphan = (await branch.step(below, "orphan")).next_state.observation
            await eventually(lambda: state(unwaited) is None, what="the branch's child is reaped")
            assert not zombies()
            assert state(orphan) is not None  # it belongs to the tree, and ends with it
    await eventually(lambda: state(orphan) is None)
