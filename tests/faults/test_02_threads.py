"""Row 2: a fork in a process with threads deadlocks in the child."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings

import pytest

from ramet import BranchManager, CannotBranch, ForkSafetyWarning, host
from tests.faults.envs import Counter
from tests.helpers import run_script, state


class Threaded(Counter):
    """Runs a thread beside its steps."""

    def __init__(self, name: str = "poller") -> None:
        super().__init__()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, name=name, daemon=True)
        self.thread.start()

    def end_thread(self) -> None:
        self.stop.set()
        self.thread.join()
        while len(os.listdir("/proc/self/task")) > 1:  # joined is not yet gone
            time.sleep(0.001)


class NativelyThreaded(Counter):
    """A library of its has started a thread that Python does not know."""

    def __init__(self) -> None:
        super().__init__()
        libc = ctypes.CDLL(None)
        thread = ctypes.c_ulong()
        sleep = ctypes.cast(libc.sleep, ctypes.c_void_p)
        assert libc.pthread_create(ctypes.byref(thread), None, sleep, ctypes.c_void_p(10_000)) == 0
        assert libc.pthread_setname_np(thread, b"render-worker") == 0


async def test_fork_in_a_process_with_python_threads_is_refused() -> None:
    """A Python thread in the environment's process is named, and nothing is harmed by the refusal."""
    async with host(Threaded) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            with pytest.raises(CannotBranch, match=r"poller.*allow_threads") as caught:
                await mgr.checkpoint("start", at)
            assert caught.value.strategy == "process_fork"
            with pytest.raises(CannotBranch, match="poller"):
                await env.fork(3)
            at = (await env.step(at, "go")).next_state
            await env.call("end_thread")
            await mgr.checkpoint("start", at)
            async with mgr.branch("start") as (branch, below):
                assert (await branch.step(below, "go")).next_state.observation == 2


async def test_fork_in_a_process_with_python_threads_may_be_allowed() -> None:
    """With `allow_threads=True` the fork goes ahead, warns once, and leaves no process unreaped."""
    async with host(Threaded, allow_threads=True) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            with pytest.warns(ForkSafetyWarning, match="poller") as caught:
                await mgr.checkpoint("start", at)
            assert len(caught) == 1
            copies = await env.fork(2)
            async with mgr.branch("start") as (branch, below):
                pid = branch.pid
                assert (await branch.step(below, "go")).next_state.observation == 1
            assert state(pid) is None
            for copy, below in copies:
                assert (await copy.step(below, "go")).next_state.observation == 1
                await copy.aclose()
                assert state(copy.pid) is None


async def test_known_idle_threads_only_warn() -> None:
    """`tqdm`'s monitor thread does not stand in the way of a fork."""
    async with host(Threaded, args=("tqdm_monitor",)) as env:
        await env.reset()
        with pytest.warns(ForkSafetyWarning, match="tqdm_monitor"):
            copy, at = await env.fork()
        assert (await copy.step(at, "go")).reward == 1.0


async def test_fork_in_a_process_with_native_threads_warns_once_and_names_them() -> None:
    """Native threads give one `ForkSafetyWarning` with their names, and the children work."""
    async with host(NativelyThreaded) as env:
        at, _ = await env.reset()
        with pytest.warns(ForkSafetyWarning, match="native threads.*render-worker") as caught:
            first, _ = await env.fork()
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second, at = await env.fork()
            third, at = await second.fork()  # a child has one thread, and the raw clone serves again
            assert (await third.step(at, "go")).next_state.observation == 1
        pids = [copy.pid for copy in (third, second, first)]
        for copy in (third, second, first):
            await copy.aclose()
        assert [state(pid) for pid in pids] == [None, None, None]


AGENT = """
    import sys, threading, warnings
    import anyio
    from ramet import BranchManager, ForkSafetyWarning
    from tests.faults.envs import Counter

    async def main():
        threading.Thread(target=threading.Event().wait, name="downloader", daemon=True).start()
        env = Counter()
        state, _ = env.reset()
        async with BranchManager.create(env) as mgr:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                await mgr.checkpoint("start", state)
            print(*(f"{w.category.__name__}: {w.message}" for w in caught), sep="\\n")
            async with mgr.branch("start") as (branch, state):
                result = await branch.step(state, "go")
                print("observed", result.next_state.observation)

    anyio.run(main, backend=sys.argv[1])
"""


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_an_agent_with_threads_is_warned_before_it_is_forked(backend: str) -> None:
    """A live object in an agent that has threads works, with one warning that names them and `host()`."""
    done = run_script(AGENT, args=[backend])
    assert done.returncode == 0, done.stderr
    warned, observed = done.stdout.splitlines()
    assert warned.startswith("ForkSafetyWarning")
    assert "downloader" in warned
    assert "host(factory)" in warned
    assert observed == "observed 1"


def test_a_lock_that_a_thread_holds_is_not_waited_for_in_the_child() -> None:
    """The runtime itself takes no lock in a child that another thread of the parent may have held."""
    agent = """
        import threading, warnings
        from ramet.blocking import BranchManager
        from tests.faults.envs import Counter

        def churn():  # import lock, allocator, logging, warnings: whatever a busy thread may hold
            import logging
            log = logging.getLogger("churn")
            log.addHandler(logging.NullHandler())
            while True:
                log.warning("x" * 100)
                warnings.filters
                bytearray(1 << 20)

        warnings.simplefilter("ignore")
        for _ in range(3):
            threading.Thread(target=churn, daemon=True).start()
        env = Counter()
        state, _ = env.reset()
        with BranchManager.create(env, step_timeout=10) as mgr:
            for _ in range(6):
                mgr.checkpoint("start", state)
                with mgr.branch("start") as (branch, at):
                    branch.step(at, "go")
        print("done")
    """
    done = run_script(agent)
    assert done.stdout == "done\n", done.stderr
