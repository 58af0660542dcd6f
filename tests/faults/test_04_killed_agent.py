"""Row 4: the driver is killed by SIGKILL, and the tree lives on, grandchildren too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ramet.process import fork as forks
from ramet.process.server import Server
from tests.faults.envs import Counter
from tests.helpers import Process, marked, start_script, wait_until

WITHIN = 1.0  # seconds


class Busy(Counter):
    """Spins in its steps, and starts processes that do not want to end."""

    def act(self, action: Any) -> Any:
        if action == "spin":
            while True:
                pass
        if action == "start":
            return [self.start_child(), self.start_daemon()]
        return self.count

    def start_child(self) -> int:
        return subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True).pid

    def start_daemon(self) -> int:
        """Forks twice and leaves the session, as daemons do."""
        receive, send = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                os.write(send, str(os.getpid()).encode())
                while True:
                    signal.pause()
            os._exit(0)
        os.wait()
        pid = int(os.read(receive, 20))
        os.close(receive)
        os.close(send)
        return pid

    def start_runaway(self) -> None:
        """A process that is never the same for long: it forks, and its parent ends."""
        if os.fork() == 0:
            while True:
                if os.fork() != 0:
                    os._exit(0)

    def kill_agent(self, agent: int, moment: str) -> None:
        """The next fork of this process kills the agent, at some moment of it."""

        def kill() -> None:
            os.kill(agent, signal.SIGKILL)

        def before(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                kill()
                return real(*args)

            return call

        def after(real: Callable[..., Any], *, in_child: bool) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                result = real(*args)
                if (result == 0) == in_child:
                    kill()
                return result

            return call

        if moment == "before the fork":
            forks.sibling = before(forks.sibling)
        elif moment == "in the child, at once":
            forks.sibling = after(forks.sibling, in_child=True)
        elif moment == "in the parent, at once":
            forks.sibling = after(forks.sibling, in_child=False)
        else:
            assert moment == "before the child is itself"
            Server._become = before(Server._become)  # type: ignore[method-assign]


STUBBORN = """
import signal
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
while True:
    signal.pause()
"""

PRELUDE = """
    import os, signal, sys
    import anyio
    from ramet import BranchManager, host
    from tests.faults.test_04_killed_agent import Busy

    LOOPS = {
        "asyncio": {},
        "uvloop": {"backend_options": {"use_uvloop": True}},
        "trio": {"backend": "trio"},
    }

    def run(main):
        anyio.run(main, **LOOPS[sys.argv[1]])

"""

# Branches that spin, that wait, and that are made and ended all the time; each has started two processes.
CROWD = (
    PRELUDE
    + """
    async def spin(env, at):
        await env.step(at, "spin")

    async def come_and_go(make):
        while True:
            branch, at = await make()
            await branch.step(at, "go")
            print("made", flush=True)
            await branch.aclose()

    async def crowd(mgr, at):
        await mgr.checkpoint("start", at)
        async with mgr.branches("start", 40) as pairs, anyio.create_task_group() as group:
            for branch, below in pairs[:3]:
                below = (await branch.step(below, "start")).next_state
                group.start_soon(spin, branch, below)
            nested = await pairs[6][0].fork(5)
            for pair in [*pairs[7:9], *nested[:2]]:
                group.start_soon(spin, *pair)
            for branch, _ in pairs[15:18]:
                group.start_soon(come_and_go, lambda: mgr.branch("start"))
                group.start_soon(come_and_go, branch.fork)

    async def hosted():
        async with host(Busy) as env, BranchManager.create(env) as mgr:
            at, _ = await env.reset()
            await crowd(mgr, at)

    async def adopted():
        env = Busy()
        at, _ = env.reset()
        async with BranchManager.create(env) as mgr:
            await crowd(mgr, at)

    run({"hosted": hosted, "adopted": adopted}[sys.argv[2]])
"""
)


@contextlib.contextmanager
def agent(script: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[], list[Process]]]]:
    """An agent, and what finds every process that came from it."""
    mark = f"ramet-row-4-{uuid.uuid4().hex}"
    with start_script(script, env={"RAMET_MARK": mark}, args=args) as process:
        yield process, lambda: marked(mark)


def killed_at(script: str, *args: str, lines: int) -> None:
    """Kills the agent when it has printed some lines; nothing is alive a second later."""
    with agent(script, *args) as (process, family):
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline(), process.stderr and process.stderr.read()
        process.kill()
        began = time.monotonic()
        process.wait()
        wait_until(lambda: not family(), timeout=WITHIN, what=f"nothing is alive, but {family()}")
        assert time.monotonic() - began < 2 * WITHIN


@pytest.mark.parametrize("loop, lines", [("asyncio", 1), ("uvloop", 5), ("trio", 20)])
@pytest.mark.parametrize("kind", ["hosted", "adopted"])
def test_a_killed_agent_leaves_its_tree_alive(kind: str, loop: str, lines: int) -> None:
    """Killed amid busy branches and running forks, with daemonised grandchildren: all are gone in a second."""
    killed_at(CROWD, loop, kind, lines=lines)


RUNAWAY = (
    PRELUDE
    + """
    async def main():
        async with host(Busy) as env:
            await env.reset()
            copy, _ = await env.fork()
            await copy.call("start_runaway")
            print("started", flush=True)
            await anyio.sleep_forever()

    run(main)
"""
)


def test_a_killed_agent_leaves_a_runaway_alive() -> None:
    """A process that forks faster than it can be looked for is ended with its group."""
    killed_at(RUNAWAY, "asyncio", lines=1)


@pytest.mark.slow
@pytest.mark.parametrize("lines", range(2, 60, 3))
@pytest.mark.parametrize("kind", ["hosted", "adopted"])
def test_a_killed_agent_leaves_its_tree_alive_at_many_moments(kind: str, lines: int) -> None:
    """The same at many moments."""
    killed_at(CROWD, "uvloop", kind, lines=lines)


DYING_IN_A_FORK = (
    PRELUDE
    + """
    async def main():
        async with host(Busy) as env:
            at, _ = await env.reset()
            at = (await env.step(at, "start")).next_state
            copies = await env.fork(3)
            await env.call("kill_agent", os.getpid(), sys.argv[2])
            print("armed", flush=True)
            if sys.argv[3] == "checkpoint":
                mgr = BranchManager.create(env)
                await mgr.checkpoint("start", at)
            else:
                await env.fork(3)
            await anyio.sleep_forever()  # a child says hello first, and kills the agent then

    run(main)
"""
)


@pytest.mark.parametrize(
    "moment",
    [
        "before the fork",
        "in the child, at once",
        "in the parent, at once",
        "before the child is itself",
    ],
)
@pytest.mark.parametrize("what", ["fork", "checkpoint"])
def test_an_agent_killed_at_a_moment_of_a_fork_leaves_its_tree_alive(moment: str, what: str) -> None:
    """The agent is killed by the very process that forks, or is forked, at each moment of a fork."""
    with agent(DYING_IN_A_FORK, "asyncio", moment, what) as (process, family):
        assert process.stdout is not None
        # A child says hello before it is itself, so the agent may get a little further than the fork.
        assert process.stdout.read().startswith("armed\n")
        assert process.wait(WITHIN) == -signal.SIGKILL
        wait_until(lambda: not family(), timeout=WITHIN, what=f"nothing is alive, but {family()}")


# The agent kills itself at its n-th Python call in an operation, so that every moment of it can be tried.
DYING_IN_A_CALL = (
    PRELUDE
    + """
    def die_at(number):
        def count(frame, event, argument):
            nonlocal number
            if event in ("call", "c_call"):
                number -= 1
                if number == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)

    async def start():
        die_at(int(sys.argv[3]))
        async with host(Busy) as env:
            sys.setprofile(None)

    async def fork():
        async with host(Busy) as env:
            at, _ = await env.reset()
            at = (await env.step(at, "start")).next_state
            await env.fork()
            die_at(int(sys.argv[3]))
            await env.fork(2)
            sys.setprofile(None)

    async def adopt():
        env = Busy()
        at, _ = env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("first", at)
            die_at(int(sys.argv[3]))
            await mgr.checkpoint("second", at)
            await mgr.branch("second")
            sys.setprofile(None)

    async def end():
        async with host(Busy) as env:
            at, _ = await env.reset()
            at = (await env.step(at, "start")).next_state
            async with BranchManager.create(env) as mgr:
                await mgr.checkpoint("start", at)
                await mgr.branches("start", 3)
                die_at(int(sys.argv[3]))
        sys.setprofile(None)

    run({"start": start, "fork": fork, "adopt": adopt, "end": end}[sys.argv[2]])
"""
)


def killed_in_a_call(operation: str, number: int) -> bool:
    """Whether the operation has so many calls."""
    with agent(DYING_IN_A_CALL, "asyncio", operation, str(number)) as (process, family):
        assert process.stderr is not None
        code = process.wait()
        assert code in (0, -signal.SIGKILL), process.stderr.read()
        wait_until(lambda: not family(), timeout=WITHIN, what=f"nothing is alive, but {family()}")
    return code != 0


@pytest.mark.parametrize("number", [1, 100, 600])
@pytest.mark.parametrize("operation", ["start", "fork", "adopt", "end"])
def test_an_agent_killed_in_any_call_leaves_its_tree_alive(operation: str, number: int) -> None:
    """The agent is killed at its n-th call while it starts a host, forks, checkpoints itself, or ends a tree."""
    killed_in_a_call(operation, number)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", ["start", "fork", "adopt", "end"])
def test_an_agent_killed_in_every_call_leaves_its_tree_alive(operation: str) -> None:
    """The same at calls all over the operation, up to its end."""
    number = 5
    while killed_in_a_call(operation, number):
        number = number * 11 // 10 + 7
