"""Row 8: too many open files at about 1,000 workers."""

from __future__ import annotations

import textwrap

import pytest

from tests.helpers import run_script

PRELUDE = """
    import os, resource, sys
    import anyio
    from ramet import BranchLimitError, BranchManager, host
    from tests.faults.envs import Counter, snapshot
    from tests.helpers import eventually

    LOOPS = {
        "asyncio": {},
        "uvloop": {"backend_options": {"use_uvloop": True}},
        "trio": {"backend": "trio"},
    }

    async def still_works(pairs):
        for branch, at in pairs:
            assert (await branch.step(at, "go")).next_state.observation == 1

    def run(main):
        anyio.run(main, **LOOPS[sys.argv[1]])
        print("done")
"""


def finish(agent: str, loop: str) -> None:
    """Runs the agent's script; it prints `done` if all went as it should."""
    done = run_script(textwrap.dedent(PRELUDE) + textwrap.dedent(agent), args=[loop], timeout=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
    assert done.stderr == ""


LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop", "trio"])


@LOOPS
def test_too_many_open_files_under_the_soft_limit(loop: str) -> None:
    """The soft limit of open files is raised to the hard one, so more branches fit than it says."""
    agent = """
        async def main():
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, 2000))
            async with host(Counter) as env:
                at, _ = await env.reset()
                async with BranchManager.create(env) as mgr:
                    await mgr.checkpoint("start", at)
                    async with mgr.branches("start", 150) as pairs:
                        await still_works(pairs)

        run(main)
    """
    finish(agent, loop)


@LOOPS
def test_too_many_open_files_in_a_batch(loop: str) -> None:
    """A batch that does not fit raises a typed error with the numbers, and nothing is half made.

    A branch takes two descriptors while it is made: 60 of them would fit only afterwards.
    """
    agent = """
        async def main():
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
            async with host(Counter) as env:
                at, _ = await env.reset()
                async with BranchManager.create(env) as mgr:
                    await mgr.checkpoint("start", at)
                    async with mgr.branches("start", 10) as pairs:
                        before = snapshot()
                        for count in (60, 60, 100, 1000):
                            try:
                                more = await mgr.branches("start", count)
                            except BranchLimitError as error:
                                assert error.limit == "RLIMIT_NOFILE", error
                                assert error.value == 128
                                assert error.used == len(before[1])
                                assert error.needed > count
                                assert "128" in str(error) and "ulimit -n" in str(error)
                            else:
                                raise AssertionError(f"{len(more)} fit")
                            await eventually(lambda: snapshot() == before)
                        await still_works(pairs)

        run(main)
    """
    finish(agent, loop)


@LOOPS
def test_too_many_open_files_one_by_one(loop: str) -> None:
    """Branches made one by one, or by many tasks at once, reach the limit with a typed error and stay usable."""
    agent = """
        async def grow(mgr, pairs):
            try:
                while True:
                    pairs.append(await mgr.branch("start"))
            except BranchLimitError as error:
                assert error.limit == "RLIMIT_NOFILE", error

        async def main():
            resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
            async with host(Counter) as env:
                at, _ = await env.reset()
                async with BranchManager.create(env) as mgr:
                    await mgr.checkpoint("start", at)
                    pairs = []
                    await grow(mgr, pairs)
                    assert len(pairs) > 60, len(pairs)
                    await still_works(pairs)
                    for branch, _ in pairs:
                        await branch.aclose()
                    pairs = []
                    async with anyio.create_task_group() as group:
                        for _ in range(8):
                            group.start_soon(grow, mgr, pairs)
                    assert len(pairs) > 60, len(pairs)
                    await still_works(pairs)

        run(main)
    """
    finish(agent, loop)


@LOOPS
def test_too_many_open_files_at_the_start(loop: str) -> None:
    """Hosts and checkpoints that find no descriptor left raise a typed error, and leave none open."""
    agent = """
        async def attempt(what):
            try:
                await what()
            except BranchLimitError as error:
                assert error.limit == "RLIMIT_NOFILE", error
                return False
            return True

        async def main():
            live = Counter()
            at, _ = live.reset()

            async def hosted():
                async with host(Counter) as env:
                    await env.reset()

            async def adopted():
                async with BranchManager.create(live) as mgr:
                    await mgr.checkpoint("start", at)
                    async with mgr.branch("start") as (branch, below):
                        await branch.step(below, "go")

            async with host(Counter) as running:  # imports are done, and the loop's own descriptors are there
                await adopted()
                resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
                for what in (hosted, adopted):
                    outcomes = []
                    taken = []
                    try:
                        while True:
                            taken.append(os.open("/dev/null", os.O_RDONLY))
                    except OSError:
                        pass

                    def look():  # it needs a descriptor itself
                        os.close(taken.pop())
                        seen = snapshot()
                        taken.append(os.open("/dev/null", os.O_RDONLY))
                        return seen

                    for _ in range(11):
                        before = look()
                        outcomes.append(await attempt(what))
                        await eventually(lambda: look() == before)
                        for _ in range(3):
                            os.close(taken.pop())
                    assert outcomes == sorted(outcomes), outcomes  # refused, refused, ... until there is room
                    assert not outcomes[0] and outcomes[-1], outcomes
                    for fd in taken:
                        os.close(fd)

        run(main)
    """
    finish(agent, loop)


@LOOPS
def test_too_many_open_files_in_the_host(loop: str) -> None:
    """A host that has no descriptor left for its children's connections says so, and nothing is half made."""
    agent = """
        class Hoarder(Counter):
            def act(self, action):
                if action == "hoard":
                    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
                    self.taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
                if action == "release":
                    for fd in self.taken:
                        os.close(fd)
                return len(os.listdir("/proc/self/fd"))

        async def main():
            async with host(Hoarder) as env:
                at, _ = await env.reset()
                at = (await env.step(at, "hoard")).next_state
                before = snapshot()
                for _ in range(3):
                    try:
                        await env.fork(20)
                    except BranchLimitError as error:
                        assert "RLIMIT_NOFILE" in str(error), error
                    else:
                        raise AssertionError("it cannot fit")
                    await eventually(lambda: snapshot() == before)
                    used = at.observation
                    at = (await env.step(at, "count")).next_state
                    assert at.observation == used
                at = (await env.step(at, "release")).next_state
                assert len(await env.fork(20)) == 20

        run(main)
    """
    finish(agent, loop)
