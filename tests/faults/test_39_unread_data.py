"""Fault 39: closing a socket with unread data gives the peer ECONNRESET and a traceback instead of EOF."""

from __future__ import annotations

import pytest

from tests.helpers import run_script

SCRIPT = """
import os, signal, sys, warnings
import anyio
from ramet import BranchManager, host
from tests.faults.probes import Slow

warnings.simplefilter("ignore")
loop, kind = sys.argv[1:]

async def drive(mgr):
    state, _ = await mgr.env.reset()
    await mgr.checkpoint("start", state)
    for round in range(3):
        async with mgr.branches("start", 4) as pairs:
            # Answers that nobody reads: each is longer than what a socket holds.
            for branch, _ in pairs:
                with anyio.move_on_after(0.01):
                    await branch.call("bulky")
    async with mgr.branches("start", 4) as pairs:
        for branch, _ in pairs:
            with anyio.move_on_after(0.01):
                await branch.call("bulky")
        if kind == "killed":
            print("done", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "gone":
            print("done", flush=True)
            os._exit(0)
        for branch, _ in pairs:
            branch._link.sock.close()  # with unread data in it: the child gets ECONNRESET or EPIPE

async def main():
    async with host(Slow) as env, BranchManager.create(env) as mgr:
        await drive(mgr)
    async with BranchManager.create(Slow(), strategy="process_fork") as mgr:
        await drive(mgr)

anyio.run(main, backend=loop)
print("done", flush=True)
"""


@pytest.mark.parametrize("kind", ["closed", "killed", "gone"])
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_closing_a_socket_with_unread_data(loop: str, kind: str) -> None:
    """An end with unread data counts as the end of the stream: nobody prints a traceback, in the agent or below."""
    done = run_script(SCRIPT, args=[loop, kind])
    assert done.stderr == ""
    assert done.stdout == "done\n"
    assert done.returncode == (-9 if kind == "killed" else 0)
