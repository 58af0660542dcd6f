"""How requests and answers travel when buffers are full, event loops change and the system says no."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from ramet import (
    BranchEnvironment,
    BranchLimitError,
    BranchManager,
    StaleState,
    State,
    StepResult,
    StepTimeout,
    blocking,
    drive,
    host,
    pump,
)
from tests.core.envs import Gate, PureTrail, pass_gate
from tests.core.surfaces import threads_here
from tests.helpers import ROOT

pytestmark = [threads_here, pytest.mark.timeout(30)]

BIG = 2_000_000  # larger than what a socket's buffers hold
BACKENDS = ["asyncio", "trio"]


class Bulk:
    """Observes and takes as many bytes as it is told to."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[State, dict[str, Any]]:
        return State(b""), {}

    def step(self, state: State, action: Any) -> StepResult:
        if isinstance(action, str):
            pass_gate(action.removeprefix("gate "))
            return StepResult(State(b"x" * BIG))
        return StepResult(State(len(action)))

    def size(self, data: bytes) -> int:
        """How much has come."""
        return len(data)


async def abandon(env: Any, state: State, gate: Gate) -> None:
    """A step that waits at the gate and is cancelled there."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(env.step, state, gate.word)
        with anyio.fail_after(10):
            while not gate.arrived():
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


# -- a late answer and a request, both larger than the buffers -------------------------------------------


async def test_a_big_request_takes_in_a_big_late_answer(gate: Gate) -> None:
    async with host(Bulk) as env:
        state, _ = await env.reset()
        await abandon(env, state, gate)
        gate.open()
        with anyio.fail_after(10):
            assert await env.call("size", b"y" * BIG) == BIG
            assert await env.call("size", b"y") == 1


async def test_a_round_takes_in_a_big_late_answer(gate: Gate) -> None:
    async with host(Bulk) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        pairs = list(await mgr.branches("start", 3))
        await abandon(*pairs[1], gate)
        gate.open()
        with anyio.fail_after(10):
            results: Any = await mgr.step_all([pairs[0], pairs[2]], [b"z" * BIG] * 2)
            assert [r.next_state.observation for r in results] == [BIG] * 2
            # The late step counts, so this one is stale; its answer comes all the same.
            (result,) = await mgr.step_all([pairs[1]], [b"z" * BIG])
            assert isinstance(result, StaleState)


class Alarm(Exception):
    """Interrupts a blocking call."""


@pytest.fixture
def interrupt(gate: Gate) -> Iterator[None]:
    """Interrupts the call that waits at the gate."""

    def strike(*_: Any) -> None:
        if gate.arrived():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise Alarm

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("timeout", [None, 20.0])
@pytest.mark.usefixtures("interrupt")
def test_a_big_blocking_request_takes_in_a_big_late_answer(gate: Gate, timeout: float | None) -> None:
    with blocking.host(Bulk, step_timeout=timeout) as env:
        state, _ = env.reset()
        with pytest.raises(Alarm):
            env.step(state, gate.word)
        gate.open()
        assert env.call("size", b"y" * BIG) == BIG


@pytest.mark.usefixtures("interrupt")
def test_a_blocking_write_keeps_to_its_timeout(gate: Gate) -> None:
    with blocking.host(Bulk, step_timeout=2.0) as env:
        state, _ = env.reset()
        with pytest.raises(Alarm):
            env.step(state, gate.word)
        with pytest.raises(StepTimeout):
            env.call("size", b"y" * BIG)


async def test_a_hung_branch_holds_up_no_other(gate: Gate) -> None:
    """`step_all` ends the one whose request there is no room for, and the others answer."""
    async with host(Bulk, step_timeout=2.0) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        pairs = list(await mgr.branches("start", 4))
        await abandon(*pairs[0], gate)
        with anyio.fail_after(10):
            first, *others = await mgr.step_all(pairs, [b"z" * BIG] * 4)
        assert isinstance(first, StepTimeout)
        assert [r.next_state.observation for r in others if isinstance(r, StepResult)] == [BIG] * 3


async def test_a_round_cancelled_in_a_half_written_request_loses_that_branch_only(gate: Gate) -> None:
    async with host(Bulk) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        pairs = list(await mgr.branches("start", 2))
        await abandon(*pairs[0], gate)
        with anyio.move_on_after(0.1):
            await mgr.step_all(pairs, [b"z" * BIG, b"z"])
        first, second = await mgr.step_all([(env, await env.current()) for env, _ in pairs[1:]] + pairs[:1], [b"z"] * 2)
        assert isinstance(first, StepResult)
        assert "half written" in str(second)


async def test_a_big_request_is_not_copied_for_each_write() -> None:
    ours, theirs = socket.socketpair()
    data = b"z" * (4 * BIG)
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        link: Any = SimpleNamespace(sock=ours, port=None, inbox=None, name="it")
        left = drive.send_at_once(link, data)
        assert isinstance(left, memoryview)
        rest = drive.Rest(link, left)
        came = 0
        while came < len(data):
            came += len(theirs.recv(1 << 20))
            if rest._left.obj is data and rest.go_on():  # type: ignore[union-attr]
                break
        assert rest._left.obj is data  # type: ignore[union-attr]
        rest.leave("")
        link.port.close()


# -- SIGPIPE ---------------------------------------------------------------------------------------------

SIGPIPE = """
import os, signal, sys
import anyio
import anyio.lowlevel
from ramet import BranchLost, blocking, host
from tests.core.envs import Trail
from tests.helpers import alive, wait_until

signal.signal(signal.SIGPIPE, signal.SIG_DFL)

async def main():
    async with host(Trail) as env:
        state, _ = await env.reset()
        copy, below = await env.fork()
        os.kill(copy.pid, signal.SIGKILL)
        wait_until(lambda: not alive(copy.pid))
        try:
            await copy.step(below, "a")
        except BranchLost:
            print("lost")

if __name__ == "__main__":
    anyio.run(main)
    with blocking.host(Trail) as env:
        state, _ = env.reset()
        copy, below = env.fork()
        os.kill(copy.pid, signal.SIGKILL)
        wait_until(lambda: not alive(copy.pid))
        try:
            copy.step(below, "a")
        except BranchLost:
            print("lost")
"""


def test_a_program_with_the_default_sigpipe_survives() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGPIPE], cwd=ROOT, capture_output=True, text=True, timeout=25, check=False
    )
    assert (done.returncode, done.stdout) == (0, "lost\nlost\n"), done.stderr


# -- event loops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", BACKENDS)
@pytest.mark.parametrize("second", BACKENDS)
def test_a_host_goes_on_in_another_run(first: str, second: str) -> None:
    async def begin() -> tuple[BranchEnvironment, State]:
        env = await host(Bulk)
        state, _ = await env.reset()
        return env, (await env.step(state, b"a")).next_state

    async def go_on(env: BranchEnvironment, state: State) -> None:
        with anyio.fail_after(10):
            state = (await env.step(state, b"b" * BIG)).next_state
            async with BranchManager.create(env) as mgr:
                await mgr.checkpoint("start", state)
                (result,) = await mgr.step_all(await mgr.branches("start", 1), [b"abc"])
                assert isinstance(result, StepResult)
                (result,) = await mgr.step_all([(env, state)], [b"abc"])
                assert isinstance(result, StepResult)
            copy, _ = await env.fork()
            await copy.aclose()
            await env.aclose()

    env, state = anyio.run(begin, backend=first)
    anyio.run(go_on, env, state, backend=second)


@pytest.mark.parametrize("first", BACKENDS)
@pytest.mark.parametrize("second", BACKENDS)
def test_calls_queue_in_another_run(first: str, second: str) -> None:
    """Branches of a pure environment share one connection, and the lock before it."""

    async def walk(env: BranchEnvironment, mgr: BranchManager) -> None:
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for branch, state in await mgr.branches("start", 3):
                    tasks.start_soon(branch.step, state, "a")

    async def begin() -> tuple[BranchEnvironment, BranchManager]:
        env = await host(PureTrail)
        state, _ = await env.reset()
        mgr = BranchManager.create(env)
        await mgr.checkpoint("start", state)
        await walk(env, mgr)
        return env, mgr

    async def go_on(env: BranchEnvironment, mgr: BranchManager) -> None:
        await walk(env, mgr)
        await mgr.aclose()
        await env.aclose()

    env, mgr = anyio.run(begin, backend=first)
    anyio.run(go_on, env, mgr, backend=second)


def test_trio_half_imported_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    trio = ModuleType("trio")
    monkeypatch.setitem(sys.modules, "trio", trio)
    assert not pump.running_on_trio()
    trio.lowlevel = ModuleType("trio.lowlevel")  # type: ignore[attr-defined]
    assert not pump.running_on_trio()


async def test_a_socket_that_epoll_refuses_leaves_no_port() -> None:
    with tempfile.TemporaryFile() as file:
        with pytest.raises(PermissionError):
            pump.open_port(file)  # type: ignore[arg-type]
        assert file.fileno() not in pump._pump_here()._ports
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pump.open_port(ours).close()  # and the pump ends with its last port


# -- what the system says --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.EMFILE])
async def test_no_room_for_a_message_is_no_end(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(number, "no room")

    async with host(Bulk) as env:
        await env.reset()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", refuse)
            with pytest.raises(BranchLimitError, match="no room"):
                await env.fork()
        copy, _ = await env.fork()
        await copy.aclose()
    with blocking.host(Bulk) as plain:
        plain.reset()
        with monkeypatch.context() as patch:
            patch.setattr(socket, "send_fds", refuse)
            with pytest.raises(BranchLimitError, match="no room"):
                plain.fork()
        plain.fork()[0].close()


# -- cancelled plans -------------------------------------------------------------------------------------


def failing() -> Generator[Any, Any, None]:
    """A plan whose clean-up fails."""
    try:
        yield None
    finally:
        raise ValueError("the clean-up failed")


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a plan waits for ever."""

    async def wait(_: Any) -> None:
        await anyio.sleep_forever()

    monkeypatch.setattr(drive, "_do", wait)


@pytest.mark.usefixtures("endless")
async def test_a_cancellation_outlives_a_failed_clean_up() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await drive.run(failing())
    assert scope.cancelled_caught


@pytest.mark.usefixtures("endless")
def test_a_cancelled_task_ends_as_cancelled_after_a_failed_clean_up() -> None:
    async def main() -> None:
        task = asyncio.create_task(drive.run(failing()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert task.cancelled()
        assert isinstance(caught.value.__cause__, ValueError)

    asyncio.run(main())
