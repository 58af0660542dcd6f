"""Fault 23: Ctrl-C kills the workers before the driver can clean up."""

from __future__ import annotations

import os
import signal

import pytest

from tests.helpers import descendants, start_script, wait_until

ASYNC = """
import signal, sys, warnings
import anyio
from ramet import BranchManager, host
from tests.faults.probes import Counter

warnings.simplefilter("ignore")
loop, kind = sys.argv[1:]

async def drive(env, mgr):
    state, _ = await mgr.env.reset()
    await mgr.checkpoint("start", state)
    branch, state = await mgr.branch("start")
    try:
        print("ready", flush=True)
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True):
            result = await branch.step(state, 3)
        print("the branch still works:", result.next_state.observation, flush=True)

async def main():
    try:
        if kind == "host":
            async with host(Counter) as env, BranchManager.create(env) as mgr:
                await drive(env, mgr)
        else:
            env = Counter()
            async with BranchManager.create(env, strategy="process_fork") as mgr:
                await drive(env, mgr)
    finally:
        print("unwound", flush=True)

try:
    backend = "trio" if loop == "trio" else "asyncio"
    anyio.run(main, backend=backend, backend_options={"use_uvloop": True} if loop == "uvloop" else {})
except KeyboardInterrupt:
    print("interrupted", flush=True)
signal.pause()  # the agent lives on; its tree must not
"""

BLOCKING = """
import signal
from ramet.blocking import BranchManager, host
from tests.faults.probes import Endless

try:
    with host(Endless, grace=0.1) as env, BranchManager.create(env) as mgr:
        state, _ = env.reset()
        mgr.checkpoint("start", state)
        with mgr.branch("start") as (branch, at):
            try:
                print("ready", flush=True)
                branch.step(at, -1)
            finally:
                with mgr.branch("start") as (other, at):
                    print("the branch still works:", other.step(at, 3).next_state.observation, flush=True)
except KeyboardInterrupt:
    print("unwound\\ninterrupted", flush=True)
signal.pause()
"""


def interrupt(source: str, *args: str) -> None:
    with start_script(source, args=args) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        assert len(descendants(process.pid)) >= 2
        os.killpg(process.pid, signal.SIGINT)  # as the terminal does: to the whole foreground group
        assert process.stdout.readline() == "the branch still works: 3\n"
        assert process.stdout.readline() == "unwound\n"
        assert process.stdout.readline() == "interrupted\n"
        wait_until(lambda: not descendants(process.pid))
        process.kill()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("kind", ["host", "live"])
@pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])
def test_ctrl_c_kills_the_workers_before_the_driver_can_clean_up(loop: str, kind: str) -> None:
    """An interrupt of the foreground group leaves the branches to the driver, which unwinds and ends them."""
    interrupt(ASYNC, loop, kind)


def test_ctrl_c_in_a_blocking_step() -> None:
    """The same without an event loop, in the middle of a step that never ends."""
    interrupt(BLOCKING)
