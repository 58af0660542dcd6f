"""What a tree of processes promises beyond the faults: nothing stays, nothing grows, limits are for steps."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

import ramet.blocking
from ramet import BranchManager, State, StateMetadata, StepResult, host
from tests.helpers import alive, run_script, wait_until


class Starter:
    """Starts a program at each step, and can make garbage."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.slow_reseed = False

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        self.slow_reseed = bool(options)
        return State(0), {}

    def step(self, state: State, action: Any) -> StepResult:
        if action == "start":
            self.started.append(subprocess.Popen(["sleep", "60"]).pid)
        if action == "garbage":
            for _ in range(50):
                cycle: list[Any] = [bytearray(20_000)]
                cycle.append(cycle)
        return StepResult(State(list(self.started), metadata=StateMetadata(step=state.metadata.step + 1)))

    def resident(self) -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def reseed(self, seed: int) -> None:
        if self.slow_reseed:
            threading.Event().wait(60)


async def test_a_branch_takes_along_what_it_has_started() -> None:
    """Leaving the block of a branch ends the programs that the environment has started in it."""
    async with host(Starter) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            pids: list[int] = []
            for _ in range(10):
                async with mgr.branch("start") as (branch, at):
                    result = await branch.step(at, "start")
                    pids += result.next_state.observation
            wait_until(lambda: not any(map(alive, pids)), timeout=5)


async def test_a_forking_host_still_collects_its_garbage() -> None:
    """One fork for each step does not keep the collector of the environment's process from its work."""
    async with host(Starter) as env:
        state, _ = await env.reset()
        sizes = []
        for number in range(300):
            state = (await env.step(state, "garbage")).next_state
            child, _ = await env.fork()
            await child.aclose()
            if number % 100 == 99:
                sizes.append(await env.call("resident"))
        assert sizes[-1] - sizes[0] < 60 << 20, sizes


def test_a_blocked_signal_of_the_agent_does_not_reach_the_warden() -> None:
    """A thread that has SIGCHLD blocked may start a host: its branches are reaped all the same."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        began = time.monotonic()
        with ramet.blocking.host(Starter) as env:
            env.reset()
            child, _ = env.fork()
            child.close()
        assert time.monotonic() - began < 5
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_a_dropped_host_ends_although_warnings_are_errors() -> None:
    """`-W error` turns the ResourceWarning into an error, and the tree ends nevertheless."""
    finished = run_script(
        """
        import gc, os, warnings
        from tests.core.test_tree import Starter
        from tests.helpers import alive, wait_until
        import ramet.blocking
        env = ramet.blocking.host(Starter)
        pid = env.pid
        warnings.simplefilter("error")
        del env
        gc.collect()
        wait_until(lambda: not alive(pid), timeout=5)
        print("gone")
        """
    )
    assert finished.stdout.split() == ["gone"], finished.stderr


async def test_a_step_timeout_holds_for_reseeding_too() -> None:
    """A `reseed` that never returns is ended by `step_timeout`, and the parent is unharmed."""
    async with host(Starter, step_timeout=0.5) as env:
        state, _ = await env.reset(options={"slow": True})
        with anyio.fail_after(20), pytest.raises(ramet.StepTimeout):
            await env.fork(seed=7)
        await env.step(state, "nothing")


async def test_a_step_timeout_is_not_for_forks() -> None:
    """A limit that a large batch of forks exceeds does not end the checkpoint that makes them."""
    async with host(Starter, step_timeout=0.05) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            for _ in range(2):
                async with mgr.branches("start", 200) as pairs:
                    assert len(pairs) == 200


async def test_what_ends_by_itself_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The logger `ramet` tells of hosts and forks at DEBUG, and of lost processes at WARNING."""
    caplog.set_level(logging.DEBUG, "ramet")
    async with host(Starter) as env:
        await env.reset()
        child, _ = await env.fork()
        os.kill(child.pid, signal.SIGKILL)
        with anyio.fail_after(10), pytest.raises(ramet.BranchLost):
            await child.call("resident")
    text = caplog.text
    assert "was forked into" in text
    assert "killed by SIGKILL" in text
    assert "have ended" in text
    gc.collect()
