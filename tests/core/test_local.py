"""Live objects: environments that live in the agent's own process."""

from __future__ import annotations

import os
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import anyio
import pytest
import sniffio

from ramet import (
    BranchManager,
    CannotBranch,
    EnvironmentFailed,
    ForkSafetyWarning,
    InvalidEnvironment,
    State,
    StepResult,
    blocking,
)
from tests.core.envs import AnyLoopTrail, AsyncPureTrail, AsyncTrail, CloneTrail, Gate, PureTrail, Trail
from tests.core.surfaces import threads_here
from tests.helpers import alive, eventually, run_script

pytestmark = threads_here


# -- the proxy -----------------------------------------------------------------------------------------


async def test_the_proxy_is_async_whatever_the_strategy() -> None:
    for env, strategy in ((PureTrail(), "direct"), (CloneTrail(), "clone"), (Trail(), "process_fork")):
        async with BranchManager.create(env) as mgr:
            assert mgr.strategy == strategy
            assert mgr.env.unwrapped is env
            state, info = await mgr.env.reset(seed=1)
            assert info["pid"] == os.getpid()
            await mgr.checkpoint("here", state)
            branch, branch_state = await mgr.branch("here")
            assert (await branch.step(branch_state, "a")).next_state.observation == "1:None/a"
            assert (await branch.call("pid") == os.getpid()) is (strategy != "process_fork")
            if strategy != "process_fork":
                assert (branch.unwrapped is env) is (strategy == "direct")


async def test_the_object_may_be_stepped_by_hand() -> None:
    env = Trail()
    state, _ = env.reset(seed=1)
    state = env.step(state, "a").next_state
    async with BranchManager.create(env) as mgr:
        await mgr.checkpoint("here", state)
        branch, branch_state = await mgr.branch("here")
        assert branch_state == state
        assert (await branch.step(branch_state, "b")).next_state.observation == "1:None/a/b"
        assert env.step(state, "c").next_state.observation == "1:None/a/c"
        async with mgr.branch("here") as (other, other_state):
            assert (await other.step(other_state, "d")).next_state.observation == "1:None/a/d"


async def test_the_rest_of_the_proxy() -> None:
    async with BranchManager.create(CloneTrail()) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        assert await mgr.env.call("length") == 1
        assert await mgr.env.call("way") == ["1:None"]
        assert await mgr.env.hidden(state) == {"secret": 0}
        with pytest.raises(InvalidEnvironment, match="'_state' is private"):
            await mgr.env.call("_state")
        with pytest.raises(EnvironmentFailed, match="step of clone trail raised ValueError: told to raise") as caught:
            await mgr.env.step(state, "raise")
        assert isinstance(caught.value.__cause__, ValueError)
        assert (await mgr.env.step(state, "a")).next_state.observation == "1:None/a"


async def test_the_object_is_not_closed() -> None:
    class Closable(Trail):
        closed = 0

        def close(self) -> None:
            type(self).closed += 1

    for strategy in ("clone", "process_fork"):
        async with BranchManager.create(Closable(), strategy=strategy) as mgr:
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("here", state)
            async with mgr.branch("here"):
                pass
    assert Closable.closed == 0


async def test_a_deep_copy_shares_what_the_original_shares() -> None:
    class Shared(Trail):
        def reset(self, **arguments: Any) -> Any:
            state, info = super().reset(**arguments)
            return replace(state, hidden=self.way), info

        def step(self, state: State, action: Any) -> StepResult:
            assert state.hidden is self.way
            result = super().step(state, action)
            return replace(result, next_state=replace(result.next_state, hidden=self.way))

    async with BranchManager.create(Shared(), strategy="clone") as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        async with mgr.branches("here", 2) as pairs:
            for env, state in pairs:
                after = (await env.step(state, "a")).next_state
                assert (await env.step(after, "b")).next_state.observation == "1:None/a/b"


# -- the event loop ------------------------------------------------------------------------------------


async def test_direct_lets_others_run() -> None:
    class Slow(PureTrail):
        def step(self, state: State, action: Any) -> StepResult:
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            return super().step(state, action)

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await anyio.lowlevel.checkpoint()

    async with BranchManager.create(Slow()) as mgr, anyio.create_task_group() as tg:
        state, _ = await mgr.env.reset()
        await mgr.checkpoint("here", state)
        env, state = await mgr.branch("here")
        tg.start_soon(tick)
        for _ in range(50):
            await env.step(state, "a")
        tg.cancel_scope.cancel()
    assert ticks >= 5


@pytest.mark.parametrize("factory", [PureTrail, CloneTrail])
async def test_a_step_is_a_cancellation_checkpoint(factory: Any) -> None:
    env = factory()
    async with BranchManager.create(env) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        branch, branch_state = await mgr.branch("here")
        for stepped, at in ((mgr.env, state), (branch, branch_state)):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await stepped.step(at, "a")
                raise AssertionError("the step came back")
            assert scope.cancelled_caught
        for stepped, at in ((mgr.env, state), (branch, branch_state)):  # nothing was done
            assert (await stepped.step(at, "b")).next_state.observation == "1:None/b"


async def test_a_loop_of_direct_steps_can_be_cancelled() -> None:
    async with BranchManager.create(PureTrail()) as mgr:
        state, _ = await mgr.env.reset()
        with anyio.move_on_after(0.02) as scope:
            while True:
                await mgr.env.step(state, "a")
        assert scope.cancelled_caught


# -- async environments --------------------------------------------------------------------------------


class AsyncClone(AsyncTrail):
    """Copied by `deepcopy`."""


def on_trio() -> bool:
    return sniffio.current_async_library() == "trio"


@pytest.mark.parametrize("factory, strategy", [(AsyncPureTrail, "direct"), (AsyncClone, "clone")])
async def test_an_async_environment_needs_its_loop(factory: Any, strategy: Any) -> None:
    if on_trio():
        with pytest.raises(CannotBranch, match=r"an async environment of asyncio, and the agent runs trio; host it"):
            BranchManager.create(factory(), strategy=strategy)
        return
    async with BranchManager.create(factory(), strategy=strategy) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        async with mgr.branches("here", 2) as pairs:
            seen = [(await env.step(state, i)).next_state.observation for i, (env, state) in enumerate(pairs)]
        assert seen == ["1:None/0", "1:None/1"]
        assert (await mgr.env.step(state, "a")).next_state.observation == "1:None/a"


async def test_an_async_environment_of_any_loop() -> None:
    async with BranchManager.create(AnyLoopTrail()) as mgr:
        assert mgr.strategy == "direct"
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (env, state):
            assert (await env.step(state, "a")).next_state.observation == "1:None/a"


async def test_branches_of_an_async_environment_run_at_once() -> None:
    class Meeting(AnyLoopTrail):
        def __init__(self) -> None:
            super().__init__()
            self.there = 0
            self.all_there = anyio.Event()

        async def breathe(self) -> None:
            self.there += 1
            if self.there == 3:
                self.all_there.set()
            await self.all_there.wait()

    env = Meeting()
    start, _ = PureTrail().reset(seed=1)
    with anyio.fail_after(5):
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("here", start)
            async with mgr.branches("here", 3) as pairs, anyio.create_task_group() as tg:
                for branch, state in pairs:
                    tg.start_soon(branch.step, state, "a")
    assert env.there == 3


@pytest.mark.parametrize(
    "factory, strategy", [(AsyncPureTrail, "direct"), (AsyncTrail, "clone"), (AnyLoopTrail, "direct")]
)
def test_no_async_environment_in_the_blocking_api(factory: Any, strategy: Any) -> None:
    with pytest.raises(CannotBranch, match=r"there is no event loop here; host it: `with host\(factory\) as env`"):
        blocking.BranchManager.create(factory(), strategy=strategy)


async def test_an_async_live_object_is_forked_from_any_loop() -> None:
    env = AsyncTrail()
    env.way = ["1:None", "a"]
    state = env._state()
    with anyio.fail_after(20):
        async with BranchManager.create(env) as mgr:
            assert mgr.strategy == "process_fork"
            await mgr.checkpoint("here", state)
            async with mgr.branches("here", 2) as pairs:
                for number, (branch, branch_state) in enumerate(pairs):
                    after = (await branch.step(branch_state, number)).next_state
                    assert after.observation == f"1:None/a/{number}"
                    fork, fork_state = await branch.fork()
                    assert (await fork.step(fork_state, "f")).next_state.observation == f"1:None/a/{number}/f"
                    assert await fork.call("length") == 4


def test_an_async_live_object_is_forked_by_the_blocking_api() -> None:
    env = AsyncTrail()
    env.way = ["1:None", "a"]
    with blocking.BranchManager.create(env) as mgr:
        mgr.checkpoint("here", env._state())
        with mgr.branch("here") as (branch, state):
            assert branch.step(state, "b").next_state.observation == "1:None/a/b"


# -- forks of the agent itself -------------------------------------------------------------------------


async def test_a_branch_at_a_gate_does_not_hold_up_its_siblings(gate: Gate) -> None:
    async with BranchManager.create(Trail()) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        (one, one_state), (two, two_state) = await mgr.branches("here", 2)
        async with anyio.create_task_group() as tg:
            tg.start_soon(one.step, one_state, gate.word)
            await eventually(gate.arrived)
            assert (await two.step(two_state, "b")).next_state.observation == "1:None/b"
            async with mgr.branch("here") as (three, three_state):
                assert (await three.step(three_state, "c")).next_state.observation == "1:None/c"
            gate.open()


async def test_what_was_forked_outlives_its_checkpoint() -> None:
    async with BranchManager.create(Trail()) as mgr:
        state, _ = await mgr.env.reset(seed=1)
        await mgr.checkpoint("here", state)
        env, env_state = await mgr.branch("here")
        await mgr.checkpoint("here", state)  # the frozen process of the first goes, as soon as it may
        assert (await env.step(env_state, "a")).next_state.observation == "1:None/a"
        fork, fork_state = await env.fork()
        assert (await fork.step(fork_state, "b")).next_state.observation == "1:None/a/b"
        checkpoints = [node.pid for node in mgr.tree().nodes() if node.kind == "checkpoint"]
        assert all(map(alive, checkpoints))
        await env.aclose()
        assert not alive(fork.pid)
        await eventually(lambda: [alive(pid) for pid in checkpoints] == [False, True])


class Talker(Trail):
    """Holds a connection; `echo` sends on it."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__()
        self.sock = sock

    def echo(self, text: str) -> None:
        self.sock.sendall(text.encode())


async def test_descriptors_of_the_environment() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5)
        async with BranchManager.create(Talker(theirs), keep_fds=[theirs.fileno()]) as mgr:
            state, _ = await mgr.env.reset()
            with pytest.warns(ForkSafetyWarning, match=f"open connections.*fd {theirs.fileno()}"):
                await mgr.checkpoint("here", state)
            branch, _ = await mgr.branch("here")
            await branch.call("echo", "hello")
            assert ours.recv(10) == b"hello"
        async with BranchManager.create(Talker(theirs)) as mgr:  # it is taken for the agent's own
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("here", state)
            async with mgr.branch("here") as (branch, _):
                with pytest.raises(EnvironmentFailed, match="OSError"):
                    await branch.call("echo", "hello")


async def test_threads_of_the_agent_are_warned_of() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="a busy one")
    thread.start()
    try:
        async with BranchManager.create(Trail()) as mgr:
            state, _ = await mgr.env.reset(seed=1)
            with pytest.warns(ForkSafetyWarning, match=r"other threads \(.*a busy one.*`async with host\(factory\)"):
                await mgr.checkpoint("here", state)
            async with mgr.branch("here") as (branch, branch_state):  # the copies have one thread each
                assert (await branch.step(branch_state, "a")).next_state.observation == "1:None/a"
    finally:
        stop.set()
        thread.join()


PROGRAM = """
import os, sys, anyio
from ramet import BranchManager
from tests.core.envs import Trail, AsyncTrail
from tests.helpers import descendants

async def main():
    for env in (Trail(), AsyncTrail()):
        async with BranchManager.create(env) as mgr:
            env.way = ["1:None"]
            await mgr.checkpoint("here", env._state())
            async with mgr.branches("here", 5) as pairs:
                results = await mgr.step_all(pairs, range(5))
                assert [r.next_state.observation for r in results] == [f"1:None/{i}" for i in range(5)], results
                child, state = await pairs[0][0].fork()
                assert (await child.step(state, "x")).next_state.observation == "1:None/0/x"
        assert descendants(os.getpid()) == []
    print("done")

backend, uvloop = sys.argv[1:]
options = {"use_uvloop": uvloop == "uvloop"} if backend == "asyncio" else {}
anyio.run(main, backend=backend, backend_options=options)
"""


@pytest.mark.parametrize("loop", ["asyncio -", "asyncio uvloop", "trio -"])
def test_a_program_without_threads_is_not_warned(loop: str) -> None:
    finished = run_script(PROGRAM, args=loop.split(), flags=["-W", "error"])
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "done\n", "")


def test_a_blocking_program_without_threads_is_not_warned() -> None:
    source = """
        from ramet.blocking import BranchManager
        from tests.core.envs import Trail

        env = Trail()
        state, _ = env.reset(seed=1)
        with BranchManager.create(env) as mgr:
            mgr.checkpoint("here", state)
            for i in range(3):
                with mgr.branch("here") as (branch, branch_state):
                    assert branch.step(branch_state, i).next_state.observation == f"1:None/{i}"
        print("done")
    """
    finished = run_script(source, flags=["-W", "error"])
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "done\n", "")
