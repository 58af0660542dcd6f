"""Rows 13 and 19: a late reply answers the next request; a silent retry runs a step twice."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import ramet.blocking
from ramet import BranchLost, BranchManager, EnvironmentFailed, StepTimeout, host
from ramet.errors import EncodeError
from tests.faults.envs import Counter, snapshot, wait_for_file
from tests.helpers import eventually, state, wait_until


class Slow(Counter):
    """A step waits until a file is there; each step leaves a line in a log."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.directory = directory

    def act(self, action: Any) -> Any:
        with open(f"{self.directory}/log", "a") as log:
            log.write(f"{action}\n")
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if str(action).startswith("wait"):
            wait_for_file(f"{self.directory}/{action}")
        return f"{action} was step {self.count}"

    def echo(self, value: Any) -> Any:
        return value


def log(directory: Path) -> list[str]:
    path = directory / "log"
    return path.read_text().splitlines() if path.exists() else []


async def test_a_late_reply_answers_the_next_request(tmp_path: Path) -> None:
    """After a cancelled step the next call gets its own answer, and the step was done once."""
    async with host(Slow, args=(str(tmp_path),)) as root:
        env = root
        at, _ = await env.reset()
        for number in range(3):
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(env.step, at, f"wait{number}")
                    await eventually(lambda n=number: f"wait{n}" in log(tmp_path))  # type: ignore[misc]
                    scope.cancel()
            (tmp_path / f"wait{number}").touch()
            assert await env.call("echo", number) == number
            env, at = await env.fork()  # which asks for the newest state
            assert at.observation == f"wait{number} was step {2 * number + 1}"
            at = (await env.step(at, "go")).next_state
            assert at.observation == f"go was step {2 * number + 2}"
    assert log(tmp_path) == ["wait0", "go", "wait1", "go", "wait2", "go"]


async def test_late_replies_of_many_branches_answer_the_next_requests(tmp_path: Path) -> None:
    """A cancelled `step_all` leaves every branch usable, each with its own next answer."""
    async with host(Slow, args=(str(tmp_path),)) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 4) as pairs:
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as group:
                        group.start_soon(mgr.step_all, pairs, ["go", "wait", "wait", "go"])
                        await eventually(lambda: len(log(tmp_path)) == 4)
                        scope.cancel()
                (tmp_path / "wait").touch()
                for number, (branch, _) in enumerate(pairs):
                    assert await branch.call("echo", number) == number
                copies = [await branch.fork() for branch, _ in pairs]
                results = await mgr.step_all(copies, ["next"] * 4)
                assert isinstance(results, list)
                assert [result.next_state.observation for result in results if hasattr(result, "next_state")] == [
                    "next was step 2"
                ] * 4


async def test_a_late_reply_to_a_fork_answers_the_next_request(tmp_path: Path) -> None:
    """A cancelled fork leaves no process, and the next fork's pids are its own."""
    async with host(Slow, args=(str(tmp_path),)) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            checkpoint = next(node.pid for node in mgr.tree().nodes() if node.kind == "checkpoint")
            before = snapshot()
            os.kill(checkpoint, signal.SIGSTOP)  # so that the answer is late for certain
            try:
                with anyio.move_on_after(0.05) as scope:
                    await mgr.branches("start", 5)
                assert scope.cancelled_caught
            finally:
                os.kill(checkpoint, signal.SIGCONT)
            async with mgr.branches("start", 2) as pairs:
                assert {state(branch.pid) for branch, _ in pairs} <= {"S", "R"}
                for branch, below in pairs:
                    assert await branch.call("pid") == branch.pid
                    assert (await branch.step(below, "go")).next_state.observation == "go was step 1"
            await eventually(lambda: snapshot() == before)


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in the test process
async def test_a_late_reply_that_nobody_waits_for_ends_the_tree(tmp_path: Path, capfd: Any) -> None:
    """A copy of the agent whose late answer finds its connection closed goes on for the branches that it has."""
    live = Slow(str(tmp_path))
    at, _ = live.reset()
    async with BranchManager.create(live) as mgr:
        await mgr.checkpoint("start", at)
        branch, below = await mgr.branch("start")
        checkpoint = next(node.pid for node in mgr.tree().nodes() if node.kind == "checkpoint")
        os.kill(checkpoint, signal.SIGSTOP)
        try:
            with anyio.move_on_after(0.05):
                await mgr.branches("start", 3)
            await mgr.checkpoint("start", at)  # the old one goes, its branch runs on
        finally:
            os.kill(checkpoint, signal.SIGCONT)
        copy, _ = await branch.fork()
        await copy.aclose()  # the request to end it comes behind the late fork
        assert state(copy.pid) is None
        assert (await branch.step(below, "go")).reward == 1.0
        async with mgr.branch("start") as (other, below):
            assert (await other.step(below, "go")).reward == 1.0
    assert capfd.readouterr().err == ""


class Unreadable:
    """A value that pickles here, and cannot be unpickled anywhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("seven",)


async def test_an_error_about_the_request_answers_the_next_request() -> None:
    """A request that its branch cannot read is answered under its own number, whatever came before it."""
    async with host(Slow, args=("/nowhere",), allow_pickle=True) as env:
        await env.reset()
        for _ in range(2):
            with pytest.raises(EncodeError):
                await env.call("echo", threading.Lock())  # it takes a number and is never sent
            with anyio.fail_after(10), pytest.raises(EncodeError, match=r"cannot read it.*seven"):
                await env.call("echo", Unreadable())
            assert await env.call("echo", 7) == 7


def test_a_late_reply_answers_the_next_request_after_an_interrupt(tmp_path: Path) -> None:
    """In the blocking API too: an interrupted step leaves the branch usable."""
    with ramet.blocking.host(Slow, args=(str(tmp_path),)) as env:
        at, _ = env.reset()
        with interrupted_when(lambda: "wait" in log(tmp_path)), pytest.raises(KeyboardInterrupt):
            env.step(at, "wait")
        (tmp_path / "wait").touch()
        assert env.call("echo", 5) == 5
        copy, at = env.fork()
        assert at.observation == "wait was step 1"
        copy.close()
    assert log(tmp_path) == ["wait"]


@contextmanager
def interrupted_when(predicate: Any) -> Iterator[None]:
    """A child sends SIGINT to this process when the predicate holds."""
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads
        pid = os.fork()
    if pid == 0:
        try:
            wait_until(predicate, timeout=20)
            os.kill(parent, signal.SIGINT)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        os.waitpid(pid, 0)


@pytest.mark.parametrize("action", ["die", "wait"])
async def test_a_silent_retry_runs_a_step_twice(tmp_path: Path, action: str) -> None:
    """A step whose branch dies or is given up is an error, and was sent once."""
    async with host(Slow, args=(str(tmp_path),), step_timeout=0.3) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branch("start") as (branch, below):
                with pytest.raises(BranchLost) as caught:
                    await branch.step(below, action)
                assert isinstance(caught.value, StepTimeout) == (action == "wait")
                for _ in range(2):
                    with pytest.raises(BranchLost):
                        await branch.step(below, action)
            assert (await env.step(at, "go")).reward == 1.0
    assert log(tmp_path) == [action, "go"]


async def test_a_step_that_failed_is_tried_again(tmp_path: Path) -> None:
    """An environment's exception is raised once for one step, which is not repeated."""
    async with host(Slow, args=(str(tmp_path / "missing"),)) as env:
        at, _ = await env.reset()
        with pytest.raises(EnvironmentFailed, match="FileNotFoundError"):
            await env.step(at, "go")
        (tmp_path / "missing").mkdir()
        assert (await env.step(at, "go")).next_state.observation == "go was step 2"
