"""A thousand branches alive at once, and nothing left behind however it ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from ramet import BranchLost, BranchManager, State, host
from tests.core.envs import Trail
from tests.helpers import descendants, eventually, open_fds, processes, run_script, start_script, wait_until

BRANCHES = 1000
STEPS = 20
WITHIN = 1.0  # seconds for everything to be gone


@asynccontextmanager
async def checkpointed() -> AsyncIterator[BranchManager]:
    async with host(Trail) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset(seed=1)
        await mgr.checkpoint("here", state)
        yield mgr


async def rollout(mgr: BranchManager, number: int, seen: dict[int, str]) -> None:
    async with mgr.branch("here") as (env, state):
        for step in range(STEPS):
            await anyio.sleep(0.005)  # stands for the model's answer
            state = (await env.step(state, f"{number}.{step}")).next_state
        seen[number] = state.observation


async def go_on_for_ever(mgr: BranchManager, waiting: list[Any]) -> None:
    """A rollout in the middle of its way, for as long as it is let."""
    async with mgr.branch("here") as (env, state):
        state = (await env.step(state, "a")).next_state
        waiting.append(env)
        while True:
            await anyio.sleep(0.05)
            state = (await env.step(state, "b")).next_state


async def gone_within(seconds: float, fds: dict[int, str]) -> None:
    """Nothing below this process and no descriptor more than before, zombies and all."""
    await eventually(lambda: not descendants(os.getpid()), timeout=seconds, what="no process is left")
    # The event loop keeps the epoll set that it got with its first branch until its last one has gone.
    await eventually(lambda: not open_fds().keys() - fds.keys(), timeout=seconds, what="no descriptor is left")


@pytest.mark.timeout(120)
async def test_a_thousand_branches_at_once() -> None:
    seen: dict[int, str] = {}

    async def alive_at_once(pair: Any, number: int) -> None:
        env, state = pair
        for step in range(STEPS):
            await anyio.sleep(0.005)
            state = (await env.step(state, f"{number}.{step}")).next_state
        seen[number] = state.observation

    with anyio.fail_after(100):
        async with checkpointed() as mgr:
            async with mgr.branches("here", BRANCHES) as pairs:
                assert len({env.pid for env, _ in pairs}) == BRANCHES
                async with anyio.create_task_group() as tg:
                    for number, pair in enumerate(pairs):
                        tg.start_soon(alive_at_once, pair, number)
            assert not any(node.ended is None for node in mgr.tree().nodes() if node.kind == "branch")
    ways = {n: "1:None/" + "/".join(f"{n}.{step}" for step in range(STEPS)) for n in range(BRANCHES)}
    assert seen == ways


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_thousand_rollouts() -> None:
    seen: dict[int, str] = {}
    with anyio.fail_after(100):
        async with checkpointed() as mgr, anyio.create_task_group() as tg:
            for number in range(BRANCHES):
                tg.start_soon(rollout, mgr, number, seen)
    assert seen == {n: "1:None/" + "/".join(f"{n}.{step}" for step in range(STEPS)) for n in range(BRANCHES)}


@pytest.mark.parametrize("count", [200, pytest.param(BRANCHES, marks=pytest.mark.slow)])
async def test_a_cancel_in_the_middle(count: int) -> None:
    fds = open_fds()
    waiting: list[Any] = []
    with anyio.fail_after(50):
        async with checkpointed() as mgr:
            below = len(descendants(os.getpid()))
            async with anyio.create_task_group() as tg:
                for _ in range(count):
                    tg.start_soon(go_on_for_ever, mgr, waiting)
                # some are stepped, some are made just now
                await eventually(lambda: len(waiting) > count // 2, timeout=30)
                tg.cancel_scope.cancel()
                began = time.monotonic()
            await eventually(lambda: len(descendants(os.getpid())) == below, timeout=WITHIN)
            assert time.monotonic() - began < WITHIN
            async with mgr.branch("here") as (env, state):  # the manager is as good as new
                await env.step(state, "a")
    await gone_within(WITHIN, fds)


async def test_an_exception_in_one_rollout() -> None:
    fds = open_fds()
    waiting: list[Any] = []

    async def fail(mgr: BranchManager) -> None:
        async with mgr.branch("here") as (env, state):
            await env.step(state, "a")
            await eventually(lambda: len(waiting) > 30, timeout=30)
            raise LookupError("this one")

    began = 0.0
    with anyio.fail_after(50):
        with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - the time is taken inside
            async with checkpointed() as mgr:
                try:
                    async with anyio.create_task_group() as tg:
                        for _ in range(60):
                            tg.start_soon(go_on_for_ever, mgr, waiting)
                        tg.start_soon(fail, mgr)
                finally:
                    began = time.monotonic()
        assert caught.group_contains(LookupError, match="this one")
        assert time.monotonic() - began < WITHIN
        await gone_within(WITHIN, fds)


@pytest.mark.parametrize("word", ["die", "exit"])
async def test_a_crash_of_one_branch(word: str) -> None:
    lost: list[BranchLost] = []
    seen: list[str] = []

    async def go(pair: tuple[Any, State], number: int) -> None:
        env, state = pair
        for step in range(5):
            await anyio.sleep(0.001)
            try:
                state = (await env.step(state, word if (number, step) == (7, 2) else step)).next_state
            except BranchLost as error:
                lost.append(error)
                return
        seen.append(state.observation)

    with anyio.fail_after(50):
        async with checkpointed() as mgr, mgr.branches("here", 20) as pairs:
            async with anyio.create_task_group() as tg:
                for number, pair in enumerate(pairs):
                    tg.start_soon(go, pair, number)
            assert [error.pid for error in lost] == [pairs[7][0].pid]
            assert seen == ["1:None/0/1/2/3/4"] * 19
            states = {process.pid: process.state for process in descendants(os.getpid())}
            assert lost[0].pid not in states  # not even as a zombie
            assert set(states) >= {env.pid for number, (env, _) in enumerate(pairs) if number != 7}


# -- the end of the agent ------------------------------------------------------------------------------

AGENT = """
import os, sys, anyio
from ramet import BranchManager, host
from tests.core.envs import Trail

async def rollout(mgr, number):
    async with mgr.branch("here") as (env, state):
        state = (await env.step(state, "a")).next_state
        ready.append(number)
        await everybody.wait()
        while True:
            await anyio.sleep(0.005)
            state = (await env.step(state, "b")).next_state

async def say():
    while len(ready) < count:
        await anyio.sleep(0.005)
    everybody.set()
    print("ready", os.getpid(), flush=True)

async def main():
    global everybody
    everybody = anyio.Event()
    async with host(Trail) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset(seed=1)
        await mgr.checkpoint("here", state)
        async with anyio.create_task_group() as tg:
            for number in range(count):
                tg.start_soon(rollout, mgr, number)
            tg.start_soon(say)

ready = []
count, backend, uvloop = sys.argv[1:]
count = int(count)
options = {"use_uvloop": uvloop == "uvloop"} if backend == "asyncio" else {}
anyio.run(main, backend=backend, backend_options=options)
"""

BLOCKING_AGENT = """
import os, sys
from ramet.blocking import BranchManager, host
from tests.core.envs import Trail

with host(Trail) as env, BranchManager.create(env) as mgr:
    state, _ = env.reset(seed=1)
    mgr.checkpoint("here", state)
    with mgr.branches("here", int(sys.argv[1])) as pairs:
        states = [branch.step(state, "a").next_state for branch, state in pairs]
        print("ready", os.getpid(), flush=True)
        while True:
            states = [branch.step(state, "b").next_state for (branch, _), state in zip(pairs, states)]
"""

LOOPS = ["asyncio -", "asyncio uvloop", "trio -", "blocking"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "count, number",
    [
        pytest.param(BRANCHES, signal.SIGKILL, id="SIGKILL"),
        pytest.param(50, signal.SIGINT, id="SIGINT"),
        pytest.param(50, signal.SIGTERM, id="SIGTERM"),
        pytest.param(BRANCHES, signal.SIGINT, id="SIGINT-many", marks=pytest.mark.slow),
        pytest.param(BRANCHES, signal.SIGTERM, id="SIGTERM-many", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_the_agent(count: int, number: signal.Signals, loop: str) -> None:
    source = BLOCKING_AGENT if loop == "blocking" else AGENT
    with start_script(source, args=[str(count), *loop.split()]) as agent:
        assert agent.stdout is not None
        line = agent.stdout.readline()
        assert line.startswith("ready"), agent.communicate(timeout=5)
        below = descendants(agent.pid)
        assert len(below) == count + 3
        # The agent alone gets it: what is below has a session of its own, so Ctrl-C in a terminal is the same.
        assert {os.getsid(process.pid) for process in below}.isdisjoint({os.getsid(agent.pid)})
        os.kill(agent.pid, number)
        began = time.monotonic()
        pids = {(process.pid, process.start) for process in below}
        wait_until(lambda: not pids & _there(), timeout=WITHIN, what="the tree has ended")
        assert time.monotonic() - began < WITHIN
        stderr = agent.communicate(timeout=10)[1]
    assert agent.returncode != 0
    if number is signal.SIGINT:
        assert "KeyboardInterrupt" in stderr
        assert "was dropped without being closed" not in stderr
    else:
        assert agent.returncode == -number
        assert stderr == ""


def _there() -> set[tuple[int, int]]:
    """Every process but the zombies of init, which reaps orphans when it likes."""
    return {(p.pid, p.start) for p in processes().values() if not (p.state == "Z" and p.ppid == 1)}


def test_an_exception_in_the_agent() -> None:
    source = """
        import os
        from ramet.blocking import BranchManager, host
        from tests.core.envs import Trail

        env = host(Trail)
        mgr = BranchManager.create(env)
        state, _ = env.reset(seed=1)
        mgr.checkpoint("here", state)
        pairs = mgr.branches("here", 20)
        print(*(branch.pid for branch, _ in pairs), flush=True)
        raise SystemExit(3)
    """
    finished = run_script(source)
    assert finished.returncode == 3
    pids = set(map(int, finished.stdout.split()))
    assert len(pids) == 20
    wait_until(lambda: not pids & {pid for pid, _ in _there()}, timeout=WITHIN)
