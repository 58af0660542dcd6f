"""Row 15: logging or allocator locks held across a fork."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from ramet import BranchManager, host
from tests.faults.envs import Counter
from tests.helpers import run_script


class Unbuffered(logging.Handler):
    """Writes each record at once. Python's buffered files have a lock that no fork can save from a thread."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def emit(self, record: logging.LogRecord) -> None:
        os.write(self.fd, (self.format(record) + "\n").encode())


class Logger(Counter):
    """Logs from its steps, and takes memory of all sizes."""

    def __init__(self, path: str, *, thread: bool = False, threads: int = 1) -> None:
        super().__init__()
        self.log = logging.getLogger("game")
        self.log.setLevel(logging.INFO)
        self.log.addHandler(Unbuffered(path) if thread else logging.FileHandler(path))
        for _ in range(threads * thread):
            threading.Thread(target=self.work_for_ever, name="busy", daemon=True).start()

    def work_for_ever(self) -> None:
        while True:
            self.work("thread")

    def work(self, who: Any) -> None:
        self.log.info("%s at %d", who, self.count)
        for size in (10, 1000, 100_000, 2_000_000):
            bytearray(size)

    def act(self, action: Any) -> Any:
        for _ in range(20):
            self.work(action)
        return self.count


async def step_for_ever(env: Any, at: Any) -> None:
    while True:
        at = (await env.step(at, "parent")).next_state


@pytest.mark.parametrize("thread", [False, True])
@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
async def test_logging_locks_held_across_a_fork(thread: bool, tmp_path: Path) -> None:
    """Forked while the environment logs in a tight loop, children still log, and none hangs."""
    log = tmp_path / "log"
    count = 8
    async with host(Logger, args=(str(log),), kwargs={"thread": thread}, allow_threads=True) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            with anyio.fail_after(30):
                async with mgr.branch("start") as (busy, below), anyio.create_task_group() as group:
                    group.start_soon(step_for_ever, busy, below)
                    for number in range(count):
                        async with mgr.branch("start") as (branch, its):
                            await branch.step(its, f"child {number}")
                        if not thread:
                            at = (await env.step(at, "host")).next_state
                        copy, its = await env.fork()
                        await copy.step(its, f"copy {number}")
                        await copy.aclose()
                    group.cancel_scope.cancel()
    lines = log.read_text()
    for number in range(count):
        assert lines.count(f"child {number} at") == 20
        assert lines.count(f"copy {number} at") == 20


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_logging_locks_of_the_agent_held_across_a_fork(backend: str, tmp_path: Path) -> None:
    """A live object's branches log while threads of the agent log in tight loops."""
    agent = """
        import sys, warnings
        import anyio
        from ramet import BranchManager
        from tests.faults.test_15_locks import Logger

        async def main():
            warnings.simplefilter("ignore")
            env = Logger(sys.argv[2], thread=True, threads=3)
            at, _ = env.reset()
            async with BranchManager.create(env) as mgr:
                for number in range(5):
                    await mgr.checkpoint("start", at)
                    async with mgr.branches("start", 3) as pairs:
                        for branch, below in pairs:
                            with anyio.fail_after(10):
                                await branch.step(below, f"branch {number}")
            print("done")

        anyio.run(main, backend=sys.argv[1])
    """
    log = tmp_path / "log"
    done = run_script(agent, args=[backend, str(log)], timeout=50)
    assert done.stdout == "done\n", done.stderr
    assert log.read_text().count("branch 4 at") == 60
