"""Row 12: clean-up waits for ever under a shield."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

from ramet import BranchClosed, BranchLost, BranchManager, EnvironmentSpec, HostFailed, StepTimeout, drive, host
from ramet.process import plans
from tests.faults.envs import Counter, wait_for_file
from tests.helpers import eventually, state

WITHIN = 5.0  # seconds; without a bound each of these would take for ever


class Hanging(Counter):
    """Hangs in its steps or at its end, deaf to every signal but one."""

    def __init__(self, directory: str = "") -> None:
        super().__init__()
        self.directory = directory
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def act(self, action: Any) -> Any:
        if action == "hang":
            Path(self.directory, "hanging").touch()
            while True:
                signal.pause()
        if action == "wait":
            wait_for_file(f"{self.directory}/go")
        return self.count


class HangingAtItsEnd(Hanging):
    def close(self) -> None:
        self.act("hang")


class Pure(Hanging):
    """One process serves all branches, whose calls queue."""

    spec = EnvironmentSpec("pure", pure_step=True)


async def test_a_close_that_never_returns_holds_up_the_end(tmp_path: Path) -> None:
    """An environment's own `close()` has its grace and is then ended with its process, cancelled or not."""
    for cancelled in (False, True):
        began = time.monotonic()
        with anyio.fail_after(WITHIN), anyio.CancelScope() as scope:
            async with host(HangingAtItsEnd, args=(str(tmp_path),), grace=0.2) as env:
                await env.reset()
                if cancelled:
                    scope.cancel()
        assert 0.2 < time.monotonic() - began < WITHIN
        assert state(env.pid) is None


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_step_that_never_returns_holds_up_the_end(cancelled: bool, tmp_path: Path) -> None:
    """Leaving a block ends its branches at once, whatever they are at; so with a manager and with a host."""
    with anyio.fail_after(WITHIN):
        async with host(Hanging, args=(str(tmp_path),), grace=0.2) as env:
            at, _ = await env.reset()
            async with BranchManager.create(env) as mgr:
                await mgr.checkpoint("start", at)
                with anyio.CancelScope() as scope:
                    async with mgr.branch("start") as (branch, below), anyio.create_task_group() as group:
                        group.start_soon(branch.step, below, "hang")
                        await eventually((tmp_path / "hanging").exists)
                        (scope if cancelled else group.cancel_scope).cancel()
                assert state(branch.pid) is None
                other, below = await mgr.branch("start")
                with anyio.move_on_after(0.05):
                    await other.step(below, "hang")
            assert state(other.pid) is None
            with anyio.move_on_after(0.05):
                await env.step(at, "hang")
    assert state(env.pid) is None


async def test_calls_that_queue_hold_up_the_end(tmp_path: Path) -> None:
    """A host that several branches share ends at once, though a call of another one has just got its turn."""
    closed: list[BranchClosed] = []

    async def end_behind_a_call(env: Any, at: Any) -> None:
        await env.step(at, "wait")
        await env.aclose()

    async def hang(env: Any, at: Any) -> None:
        try:
            await env.step(at, "hang")
        except BranchClosed as error:
            closed.append(error)

    env = await host(Pure, args=(str(tmp_path),), grace=0.2)
    at, _ = await env.reset()
    async with BranchManager.create(env) as mgr:
        assert mgr.strategy == "direct"
        await mgr.checkpoint("start", at)
        branch, below = await mgr.branch("start")
        with anyio.fail_after(WITHIN):
            async with anyio.create_task_group() as group:
                group.start_soon(end_behind_a_call, env, at)
                await anyio.wait_all_tasks_blocked()
                group.start_soon(hang, branch, below)
                await anyio.wait_all_tasks_blocked()
                (tmp_path / "go").touch()
    assert state(env.pid) is None
    assert len(closed) == 1


async def test_a_warden_that_does_not_answer_holds_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """When even the warden hangs, a branch, a manager and a host end within their bound, cancelled or not."""
    assert plans.END_WITHIN <= 10
    kept = plans.end.__kwdefaults__
    assert kept is not None
    monkeypatch.setitem(kept, "timeout", 0.2)
    monkeypatch.setattr(plans, "END_WITHIN", 0.2)
    env = await host(Counter, grace=0.2)
    at, _ = await env.reset()
    mgr = BranchManager.create(env)
    await mgr.checkpoint("start", at)
    branch, _ = await mgr.branch("start")
    link = env.source.link
    assert link is not None
    warden = link.tree.pid
    os.kill(warden, signal.SIGSTOP)
    try:
        with anyio.fail_after(WITHIN):
            await branch.aclose()
            with anyio.CancelScope() as scope:
                scope.cancel()
                await mgr.aclose()
            await env.aclose()
    finally:
        os.kill(warden, signal.SIGCONT)
    assert link.tree.reap(WITHIN)  # which the tree does by itself when it is dropped


async def test_a_lost_branch_waits_for_ever_for_its_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a branch that died comes within seconds, even without its status."""
    assert drive._STATUS_WITHIN <= 2
    monkeypatch.setattr(drive, "_STATUS_WITHIN", 0.2)
    async with host(Counter) as env:
        await env.reset()
        copy, below = await env.fork()
        assert env.source.link is not None
        warden = env.source.link.tree.pid
        os.kill(warden, signal.SIGSTOP)
        try:
            os.kill(copy.pid, signal.SIGKILL)
            with anyio.fail_after(WITHIN), pytest.raises(BranchLost, match="not known"):
                await copy.step(below, "go")
        finally:
            os.kill(warden, signal.SIGCONT)


async def test_a_start_that_never_ends(tmp_path: Path) -> None:
    """A factory that hangs is given up after `start_timeout`, and leaves nothing."""
    with anyio.fail_after(WITHIN), pytest.raises(HostFailed, match=r"longer than 0\.3 s"):
        await host(hang_at_start, args=(str(tmp_path),), start_timeout=0.3)


def hang_at_start(directory: str) -> Any:
    Hanging(directory).act("hang")


async def test_a_fork_that_never_ends() -> None:
    """A checkpoint that hangs is ended by `step_timeout`, and so is every wait for it."""
    async with host(Counter, step_timeout=0.3) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            checkpoint = next(node.pid for node in mgr.tree().nodes() if node.kind == "checkpoint")
            os.kill(checkpoint, signal.SIGSTOP)
            with anyio.fail_after(WITHIN), pytest.raises(StepTimeout):
                await mgr.branch("start")
