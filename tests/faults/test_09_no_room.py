"""Row 9: EAGAIN or ENOMEM part-way through a batch."""

from __future__ import annotations

import errno
import os
import resource
from typing import Any

import pytest

from ramet import BranchLimitError, BranchManager, host
from ramet.process import fork as forks
from tests.faults.envs import Counter, snapshot
from tests.helpers import eventually, open_fds, run_script


class Full(Counter):
    """Its machine has no room for more processes, after some."""

    def fail_after(self, made: int, number: int) -> None:
        """Every way to fork succeeds `made` times and fails then."""
        left = made

        def wrap(real: Any) -> Any:
            def fork() -> int:
                nonlocal left
                if left == 0:
                    raise OSError(number, os.strerror(number))
                left -= 1
                pid: int = real()
                return pid

            return fork

        self.real = forks.sibling, forks.orphan
        forks.sibling, forks.orphan = map(wrap, self.real)

    def recover(self) -> None:
        forks.sibling, forks.orphan = self.real


class Unprivileged(Counter):
    """Runs as a user who may have few processes."""

    def limit(self, processes: int) -> int:
        """Returns how many more there may be."""
        if os.getuid() == 0:
            os.setuid(54321)  # nobody else is this user
        else:
            processes = 1  # this user has others, so there is no room for any
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
        return processes - 1


async def still_works(pairs: list[Any]) -> None:
    for branch, at in pairs:
        assert (await branch.step(at, "go")).next_state.observation == 1


async def test_no_room_part_way_through_a_batch() -> None:
    """A batch of which some cannot be made leaves none, says why, and the next one works."""
    async with host(Full) as env:
        await env.reset()
        await env.fork(2)
        before = snapshot()
        held = open_fds(env.pid)
        for number in (errno.EAGAIN, errno.ENOMEM):
            for made in (0, 1, 4, 9):
                await env.call("fail_after", made, number)
                with pytest.raises(BranchLimitError, match=os.strerror(number)):
                    await env.fork(10)
                await eventually(lambda: snapshot() == before)
                assert open_fds(env.pid) == held
                await env.call("recover")
        await still_works(await env.fork(10))


async def test_no_room_in_the_second_part_of_a_large_batch() -> None:
    """A batch that travels in several messages is all or nothing too."""
    async with host(Full) as env:
        await env.reset()
        before = snapshot()
        await env.call("fail_after", 260, errno.EAGAIN)  # a message takes 253
        with pytest.raises(BranchLimitError):
            await env.fork(300)
        await eventually(lambda: snapshot() == before)
        await env.call("recover")
        await still_works([await env.fork()])


async def test_no_room_under_the_users_limit_of_processes() -> None:
    """A real EAGAIN: the error names RLIMIT_NPROC with its value, and nothing is half made."""
    async with host(Unprivileged) as env:
        at, _ = await env.reset()
        before = snapshot()
        room = await env.call("limit", 5)
        with pytest.raises(BranchLimitError) as caught:
            await env.fork(10)
        assert caught.value.limit == "RLIMIT_NPROC"
        assert caught.value.value == room + 1
        assert caught.value.needed > 0
        assert "ulimit -u" in str(caught.value)
        await eventually(lambda: snapshot() == before)
        if room:
            pairs = await env.fork(room)
            await still_works(pairs)
        assert (await env.step(at, "go")).reward == 1.0


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in the test process
async def test_no_room_for_the_first_fork_of_a_live_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the agent itself cannot be forked, the error is the same, and no descriptor stays open."""

    def refuse() -> int:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    env = Counter()
    at, _ = env.reset()
    async with BranchManager.create(env) as mgr:
        before = snapshot()
        with monkeypatch.context() as patch:
            patch.setattr(forks, "offspring", refuse)
            with pytest.raises(BranchLimitError, match="temporarily unavailable"):
                await mgr.checkpoint("start", at)
        assert snapshot() == before
        assert mgr.checkpoints == ()
        await mgr.checkpoint("start", at)
        async with mgr.branch("start") as (branch, below):
            assert (await branch.step(below, "go")).reward == 1.0


AGENT = """
    import ctypes, os, resource, sys
    import anyio
    from ramet import BranchLimitError, BranchManager
    from tests.faults.envs import Counter, snapshot

    async def main():
        if os.getuid() == 0:
            os.setuid(54322)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # or /proc says that this process is root's
            mine = 1
        else:
            mine = sum(os.stat(f"/proc/{n}").st_uid == os.getuid() for n in os.listdir("/proc") if n.isdigit())
        resource.setrlimit(resource.RLIMIT_NPROC, (mine + 20, mine + 20))
        env = Counter()
        at, _ = env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 10) as pairs:
                for branch, below in pairs:
                    await branch.step(below, "go")
                before = snapshot()
                try:
                    await mgr.branches("start", 30)
                except BranchLimitError as error:
                    print(error.limit, error.value - mine, error.needed)
                assert snapshot() == before

    anyio.run(main)
"""


def test_processes_of_other_users_count_against_the_users_limit() -> None:
    """RLIMIT_NPROC bounds the processes of one user: those of others do not make a branch impossible."""
    done = run_script(AGENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["RLIMIT_NPROC", "20", "30"]
