"""What is left where there is no fork. Simulated: the modules and functions that Windows lacks are taken away."""

from __future__ import annotations

from tests.helpers import run_script

SCRIPT = """
import asyncio, multiprocessing, os, select, signal, subprocess, sys, tempfile
import anyio, anyio._backends._asyncio

sys.modules["fcntl"] = sys.modules["resource"] = None
del os.fork, os.register_at_fork, select.epoll, select.poll, signal.SIGKILL
sys.platform = "win32"

import ramet.blocking
from ramet import BranchManager, CannotBranch, EnvironmentSpec, State, StepResult, host


class Doubling:
    spec = EnvironmentSpec(name="doubling", pure_step=True)

    def reset(self, *, seed=None, options=None):
        return State(1), {}

    def step(self, state, action):
        return StepResult(State(state.observation * 2))


class Copied(Doubling):
    spec = EnvironmentSpec(name="copied")


async def main():
    for env, strategy in ((Doubling(), None), (Copied(), "clone")):
        state, _ = env.reset()
        async with BranchManager.create(env, strategy=strategy) as mgr:
            await mgr.checkpoint("start", state)
            async with mgr.branch("start") as (branch, state):
                print(mgr.strategy, (await branch.step(state, "x")).next_state.observation)
    try:
        BranchManager.create(Copied())
    except CannotBranch as error:
        print("no fork" in str(error))
    try:
        async with host(Copied):
            pass
    except CannotBranch as error:
        print("WSL" in str(error))


anyio.run(main)
"""


def test_without_fork_direct_and_clone_work_and_the_rest_is_refused() -> None:
    """`import ramet`, `direct` and `clone` work; everything else raises `CannotBranch` and says what would work."""
    finished = run_script(SCRIPT)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == ["direct", "2", "clone", "2", "True", "True"]
