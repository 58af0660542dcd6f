"""Fault 40: the supervisor itself is killed.

What ends then: the host, every branch and checkpoint (their parent's death is a signal to them), and what they
have started, as far as it is in their session: the agent ends that. What has left the session, as a daemon does,
survives this one case.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import pytest

from ramet import BranchLost, BranchManager, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import Parental
from tests.helpers import alive, descendants, eventually, wait_until

PLENTY = 20.0


@contextmanager
def ended_at_last(pids: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("busy", [False, True])
async def test_the_supervisor_itself_is_killed(busy: bool) -> None:
    """Every process of the tree ends at once; each call says that it is lost, and clean-up works as always."""
    with anyio.fail_after(PLENTY):
        async with host(Parental) as env, BranchManager.create(env) as mgr:
            state, _ = await env.reset()
            await mgr.checkpoint("start", state)
            async with mgr.branches("start", 8) as pairs:
                helpers = [await branch.call("start", daemon=False) for branch, _ in pairs]
                daemon = await pairs[0][0].call("start", daemon=True)
                with ended_at_last([daemon]):
                    (warden, *tree) = descendants(os.getpid())
                    assert len(tree) == 10 + len(helpers) + 1
                    async with anyio.create_task_group() as tg:
                        if busy:
                            for branch, at in pairs:
                                tg.start_soon(lost_in, branch, at)
                            await eventually(lambda: all(branch._link.busy for branch, _ in pairs))  # type: ignore[union-attr]
                        os.kill(warden.pid, signal.SIGKILL)
                    branches = [process.pid for process in tree if process.pid not in (daemon, *helpers)]
                    await eventually(lambda: not any(map(alive, branches)))
                    for branch, at in (*pairs, (env, state)):
                        with pytest.raises(BranchLost) as caught:
                            await branch.step(at, 1)
                        assert branch.name in str(caught.value) or "tree" in str(caught.value)
                    with pytest.raises(BranchLost):
                        await mgr.branch("start")
                    with pytest.raises(BranchLost):
                        await env.fork()
                    await eventually(lambda: not any(map(alive, helpers)))
                    assert alive(daemon)


async def lost_in(branch: Any, at: Any) -> None:
    with pytest.raises(BranchLost):
        await branch.call("wait")


def test_the_supervisor_is_killed_under_a_blocking_agent() -> None:
    """The same without an event loop."""
    with blocking_host(Parental) as env, BlockingManager.create(env) as mgr:
        state, _ = env.reset()
        mgr.checkpoint("start", state)
        with mgr.branch("start") as (branch, at):
            helper = branch.call("start", daemon=False)
            (warden, *tree) = descendants(os.getpid())
            os.kill(warden.pid, signal.SIGKILL)
            wait_until(lambda: not any(alive(process.pid) for process in tree if process.pid != helper))
            with pytest.raises(BranchLost):
                branch.step(at, 1)
            with pytest.raises(BranchLost):
                mgr.branch("start")
            wait_until(lambda: not alive(helper))


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
async def test_the_fork_of_the_agent_is_killed() -> None:
    """A checkpoint of a live object is the supervisor of its branches: they end with it, and the next one works."""
    with anyio.fail_after(PLENTY):
        async with BranchManager.create(Parental(), strategy="process_fork") as mgr:
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("start", state)
            branch, at = await mgr.branch("start")
            helper = await branch.call("start", daemon=False)
            (warden, *tree) = descendants(os.getpid())
            os.kill(warden.pid, signal.SIGKILL)
            await eventually(lambda: not any(alive(process.pid) for process in tree if process.pid != helper))
            with pytest.raises(BranchLost):
                await branch.step(at, 1)
            await eventually(lambda: not alive(helper))
            await mgr.checkpoint("start", state)
            async with mgr.branch("start") as (branch, at):
                assert (await branch.step(at, 1)).next_state.observation == 1
