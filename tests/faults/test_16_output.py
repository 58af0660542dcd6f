"""Row 16: buffered stdout is printed twice; atexit handlers run in children."""

from __future__ import annotations

import atexit
import multiprocessing.util
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from ramet import BranchManager, host
from tests.faults.envs import Counter
from tests.helpers import run_script


class Talker(Counter):
    """Leaves output in buffers, and handlers for the end."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.file = open(name, "w") if name else None  # noqa: SIM115 - it stays open on purpose
        atexit.register(print, "atexit handler", flush=True)
        self.finalizer = weakref.finalize(self, print, "finalizer", flush=True)
        multiprocessing.util.Finalize(None, print, args=("multiprocessing finalizer",), exitpriority=1)
        sys.stdout.write("before the fork, ")
        if self.file:
            self.file.write("before the fork, ")

    def act(self, action: Any) -> Any:
        # Flushed, or what a branch has inherited in its buffers would never be seen.
        for file in filter(None, (sys.stdout, self.file)):
            file.write(f"{action}\n")
            file.flush()
        if action == "exit":
            sys.exit(0)
        return self.count

    def close(self) -> None:
        sys.stdout.flush()
        sys.stdout.write("closed\n")
        sys.stdout.flush()
        if self.file:
            self.file.close()


async def test_buffered_output_is_printed_twice_and_exit_handlers_run_in_children(tmp_path: Path) -> None:
    """What was printed before a fork appears once, and no exit handler or finalizer runs in a copy."""
    output, written = tmp_path / "output", tmp_path / "written"
    async with host(Talker, args=(str(written),), output=output) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 3) as pairs:
                for branch, below in pairs[:2]:
                    await branch.step(below, "branch")
                with pytest.raises(Exception, match="exited with status 0"):
                    await pairs[2][0].step(pairs[2][1], "exit")
            copy, below = await env.fork()
            await copy.step(below, "copy")
    text = output.read_text()
    assert text.count("before the fork") == 1
    assert text.count("closed") == 1  # by the host alone
    assert "handler" not in text
    assert "finalizer" not in text
    assert written.read_text().count("before the fork") == 1


AGENT = """
    import os, sys
    import anyio
    from ramet import BranchManager
    from tests.faults.test_16_output import Talker

    async def main():
        env = Talker()
        state, _ = env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            sys.stdout.write("between, ")
            async with mgr.branches("start", 3) as pairs:
                for branch, at in pairs:
                    await branch.step(at, "branch")
            await mgr.checkpoint("later", state)
            async with mgr.branch("later") as (branch, at):
                await branch.step(at, "later")
        sys.stdout.write("after, ")

    if sys.argv[1] == "blocking":
        from ramet.blocking import BranchManager
        env = Talker()
        state, _ = env.reset()
        with BranchManager.create(env) as mgr:
            mgr.checkpoint("start", state)
            sys.stdout.write("between, ")
            with mgr.branches("start", 3) as pairs:
                for branch, at in pairs:
                    branch.step(at, "branch")
        sys.stdout.write("after, ")
    else:
        anyio.run(main, **eval(sys.argv[2]))
"""


@pytest.mark.parametrize(
    "loop, options",
    [
        ("asyncio", "{}"),
        ("uvloop", "{'backend_options': {'use_uvloop': True}}"),
        ("trio", "{'backend': 'trio'}"),
        ("blocking", "{}"),
    ],
)
def test_buffered_output_of_the_agent_is_printed_twice(loop: str, options: str) -> None:
    """A forked agent's own buffers and exit handlers work once, in the agent."""
    done = run_script(AGENT, args=[loop, options])
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for once in ("before the fork", "between", "after", "atexit handler", "finalizer\n"):
        assert done.stdout.count(once) == (2 if once == "finalizer\n" else 1), done.stdout
