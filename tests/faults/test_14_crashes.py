"""Row 14: a worker's crash shows as `EOFError`, the true error buried."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
import sys
import termios
from pathlib import Path
from typing import Any

import anyio
import pytest

import ramet.blocking
from ramet import BranchEnvironment, BranchLost, BranchManager, EnvironmentFailed, HostFailed, StepResult, host
from tests.faults.envs import Counter, wait_for_file
from tests.helpers import state, wait_until


class Undying:
    """An object whose destructor raises."""

    def __del__(self) -> None:
        raise RuntimeError("from __del__")


class Crashing(Counter):
    """Ends in many ways."""

    def __init__(self, directory: str = "") -> None:
        super().__init__()
        self.directory = directory

    def hang(self) -> None:
        Path(self.directory, "hanging").touch()
        while True:
            signal.pause()

    def act(self, action: Any) -> Any:
        match action:
            case "segfault":
                ctypes.string_at(0)
            case "_exit":
                os._exit(3)
            case "kill":  # as the kernel does when memory runs out
                os.kill(os.getpid(), signal.SIGKILL)
            case "abort":
                os.abort()
            case "sys.exit":
                sys.exit(4)
            case "sys.exit text":
                sys.exit("no more cards")
            case "interrupt":
                raise KeyboardInterrupt
            case "del":
                Undying()
            case "recurse":
                return self.act(action)
            case "wait":
                wait_for_file(f"{self.directory}/go")
            case "large":
                return b"x" * 50_000_000
        return self.count


class BornCrashing(Counter):
    """Ends while it is built."""

    def __init__(self, action: str) -> None:
        super().__init__()
        Crashing.act(self, action)  # type: ignore[arg-type]


ENDS = {
    "segfault": "killed by SIGSEGV",
    "_exit": "exited with status 3",
    "kill": "killed by SIGKILL; out of memory?",
    "abort": "killed by SIGABRT",
    "sys.exit": "exited with status 4",
    "sys.exit text": "exited with status 1",
}


async def test_the_true_error_of_a_crash_is_buried(tmp_path: Path) -> None:
    """`BranchLost` names the process and how it ended, at once and at every later call; siblings go on."""
    async with host(Crashing, output=tmp_path / "output") as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            for action, reason in ENDS.items():
                async with mgr.branches("start", 2) as ((branch, below), (sibling, its)):
                    pid = branch.pid
                    with anyio.fail_after(10), pytest.raises(BranchLost) as caught:
                        await branch.step(below, action)
                    assert caught.value.reason == reason
                    assert str(caught.value) == f"{branch.name} (pid {pid}) is gone: {reason}"
                    assert caught.value.pid == pid
                    assert state(pid) is None
                    assert caught.value.__cause__ is None
                    assert caught.value.__suppress_context__
                    with pytest.raises(BranchLost, match="is gone"):
                        await branch.call("pid")
                    assert f"· {reason}" in str(mgr.tree())
                    assert (await sibling.step(its, "go")).reward == 1.0
    assert "no more cards" in (tmp_path / "output").read_text()


async def test_the_true_error_of_a_crash_in_many_branches_is_buried() -> None:
    """`step_all` gives each branch that died its own error, and the others their results."""
    async with host(Crashing, output="discard") as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", len(ENDS) + 2) as pairs:
                results = await mgr.step_all(pairs, ["go", *ENDS, "go"])
                assert isinstance(results, list)
                assert isinstance(results[0], StepResult)
                assert isinstance(results[-1], StepResult)
                for result, (branch, _), reason in zip(results[1:-1], pairs[1:-1], ENDS.values(), strict=True):
                    assert isinstance(result, BranchLost)
                    assert (result.pid, result.reason) == (branch.pid, reason)


async def test_the_true_error_of_a_crash_of_the_host_is_buried() -> None:
    """A host that died is `BranchLost` too, its branches go on, and the block ends without another error."""
    async with host(Crashing) as env:
        at, _ = await env.reset()
        copy, below = await env.fork()
        with pytest.raises(BranchLost, match=r"host-[0-9]+ .* exited with status 3"):
            await env.step(at, "_exit")
        with pytest.raises(BranchLost, match="exited with status 3"):
            await env.fork()
        assert (await copy.step(below, "go")).reward == 1.0


@pytest.mark.parametrize("action", ["segfault", "_exit", "kill", "sys.exit"])
def test_the_true_error_of_a_crash_in_the_factory_is_buried(action: str) -> None:
    """A process that ends while the environment is built gives `HostFailed` with how it ended."""
    with pytest.raises(HostFailed) as caught:
        ramet.blocking.host(BornCrashing, args=(action,), output="discard")
    assert "BornCrashing" in str(caught.value)
    assert ENDS[action] in caught.value.reason


async def test_an_exception_in_a_destructor_ends_a_branch(tmp_path: Path) -> None:
    """An exception in `__del__` is printed by Python as always, and nothing else happens."""
    async with host(Crashing, output=tmp_path / "output") as env:
        at, _ = await env.reset()
        copy, below = await env.fork()
        for one, its in ((env, at), (copy, below)):
            its = (await one.step(its, "del")).next_state
            assert (await one.step(its, "go")).next_state.observation == 2
    assert (tmp_path / "output").read_text().count("RuntimeError: from __del__") == 2


async def test_an_odd_exception_ends_a_branch() -> None:
    """What the environment raises is its own failure, whatever it is, and the branch stays usable."""
    async with host(Crashing) as env:
        at, _ = await env.reset()
        for action, name in (("recurse", "RecursionError"), ("interrupt", "KeyboardInterrupt")):
            with pytest.raises(EnvironmentFailed, match=name):
                await env.step(at, action)
            assert await env.call("pid") == env.pid


def unread(env: BranchEnvironment) -> int:
    """How many bytes of an environment's answers the agent has not read."""
    assert env.source.link is not None
    answer = fcntl.ioctl(env.source.link.sock, termios.FIONREAD, b"0000")
    return int(struct.unpack("i", answer)[0])


async def test_a_crash_in_the_middle_of_an_answer_hangs_the_agent() -> None:
    """A branch that dies while it writes a large answer is lost, though the agent looks only later."""
    async with host(Crashing) as env:
        await env.reset()
        copy, at = await env.fork()

        async def attempt() -> None:
            with pytest.raises(BranchLost, match="SIGKILL"):
                await copy.step(at, "large")

        with anyio.fail_after(10):
            async with anyio.create_task_group() as group:
                group.start_soon(attempt)
                await anyio.wait_all_tasks_blocked()
                # This blocks the loop on purpose, so that the data and the end come to it as one event.
                wait_until(lambda: unread(copy) > 1 << 16 and state(copy.pid) == "S")
                os.kill(copy.pid, signal.SIGKILL)
                wait_until(lambda: state(copy.pid) in ("Z", None))


async def test_a_crash_behind_a_late_answer_hangs_the_agent(tmp_path: Path) -> None:
    """A branch that answers a cancelled call and dies in the next one is lost, though both come as one event."""
    async with host(Crashing, args=(str(tmp_path),)) as env:
        await env.reset()
        copy, at = await env.fork()

        async def attempt() -> None:
            with pytest.raises(BranchLost, match="SIGKILL"):
                await copy.call("hang")

        with anyio.fail_after(10):
            with anyio.move_on_after(0.02):
                await copy.step(at, "wait")
            async with anyio.create_task_group() as group:
                group.start_soon(attempt)
                await anyio.wait_all_tasks_blocked()
                (tmp_path / "go").touch()
                wait_until(lambda: unread(copy) > 0 and (tmp_path / "hanging").exists())
                os.kill(copy.pid, signal.SIGKILL)
                wait_until(lambda: state(copy.pid) in ("Z", None))
