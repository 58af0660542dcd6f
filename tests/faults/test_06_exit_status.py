"""Row 6: a reaper steals the exit status of a child that the environment started with `subprocess`."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from typing import Any

import anyio
import pytest

from ramet import BranchLost, BranchManager, host
from tests.faults.envs import Counter
from tests.helpers import state


class Tool(Counter):
    """Runs a command at each step."""

    def act(self, action: Any) -> Any:
        if isinstance(action, int):
            return subprocess.run(["sh", "-c", f"exit {action}"], check=False).returncode
        if action == "begin":
            self.process = subprocess.Popen(["sh", "-c", "read word; exit 9"], stdin=subprocess.PIPE)
            return self.process.pid
        self.process.communicate(b"end\n")
        return self.process.returncode


class Reaper(Tool):
    """Reaps every child that it finds, as some supervisors do."""

    def __init__(self, *, thread: bool = False) -> None:
        super().__init__()
        self.reaped: list[int] = []
        signal.signal(signal.SIGCHLD, self.reap)
        if thread:  # then it is forked in the other of the two ways
            threading.Thread(target=threading.Event().wait, name="idle", daemon=True).start()

    def reap(self, *signal_and_frame: Any) -> None:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.reaped.append(pid)


async def run_tools(env: Any, at: Any, codes: range) -> None:
    for code in codes:
        at = (await env.step(at, code)).next_state
        assert at.observation == code


async def come_and_go(mgr: BranchManager, count: int) -> None:
    for _ in range(count):
        async with mgr.branch("start") as (branch, at):
            await branch.step(at, 0)


async def test_a_reaper_steals_the_exit_status_of_a_subprocess() -> None:
    """`subprocess.run` keeps its true return code while branches come and go, in the host and in branches."""
    async with host(Tool) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 2) as pairs, anyio.create_task_group() as group:
                group.start_soon(run_tools, env, at, range(1, 20))
                for branch, below in pairs:
                    group.start_soon(run_tools, branch, below, range(1, 20))
                group.start_soon(come_and_go, mgr, 20)


async def test_a_fork_steals_the_exit_status_of_a_subprocess_that_runs() -> None:
    """A process that was started before a fork and ends after it gives its status to the one that started it."""
    async with host(Tool) as env:
        at, _ = await env.reset()
        at = (await env.step(at, "begin")).next_state
        copies = await env.fork(3)
        for copy, below in copies:
            await copy.step(below, 5)
            await copy.aclose()
        assert (await env.step(at, "end")).next_state.observation == 9


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
async def test_an_environment_that_reaps_every_child_steals_the_branches(thread: bool) -> None:
    """An environment's own reaper finds its own children only, and branches end and are reaped all the same."""
    async with host(Reaper, kwargs={"thread": thread}, allow_threads=True) as env:
        await env.reset()
        copies = await env.fork(3)
        for copy, at in copies:
            await copy.step(at, "begin")
            await copy.aclose()
        pids = [copy.pid for copy, _ in copies]
        assert [state(pid) for pid in pids] == [None] * 3
        assert not set(await env.call("reaped")) & set(pids)


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
async def test_a_tree_steals_the_exit_status_of_the_agents_own_subprocess() -> None:
    """The agent's own children keep their status while hosts and checkpoints of live objects come and go."""
    live = Tool()
    at, _ = live.reset()
    before: Any = live.act("begin")
    with live.process:
        async with BranchManager.create(live) as mgr:
            await mgr.checkpoint("start", at)
            await come_and_go(mgr, 3)
            assert live.act(4) == 4
        assert state(before) is not None
        assert live.act("end") == 9


def reap_any() -> int:
    pid, _ = os.waitpid(-1, 0)
    return pid


async def test_the_agent_reaps_every_child_itself() -> None:
    """An agent that collects all its children leaves the runtime without a status, and with nothing else amiss."""
    async with host(Counter) as env:
        at, _ = await env.reset()
        warden = env.source.link.tree.pid if env.source.link else 0
        os.kill(warden, signal.SIGKILL)
        assert reap_any() == warden
        with pytest.raises(BranchLost):
            await env.step(at, "go")
