"""Row 11: a cancel during create leaks the child; a second cancel during clean-up leaks more."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from ramet import BranchManager, EnvironmentSpec, host
from tests.faults.cancelling import MODES, cancel_everywhere
from tests.faults.envs import Counter, Snapshot, snapshot
from tests.helpers import eventually

pytestmark = [
    pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning"),  # NumPy's threads in the test process
    pytest.mark.timeout(120),
]


class Seeded(Counter):
    """Can be replayed."""

    spec = EnvironmentSpec("seeded", supports_seed=True, deterministic=True)


@pytest.fixture(autouse=True)
def without_the_collector() -> Iterator[None]:
    """What is left must not depend on the garbage collector to go."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["usual", pytest.param("other", marks=pytest.mark.slow)])
def mode(request: pytest.FixtureRequest, anyio_backend: Any) -> str:
    """Both ways to cancel on both of asyncio's loops, half of them among the slow tests; trio knows only scopes."""
    name, options = anyio_backend
    by_task = name == "asyncio" and options["use_uvloop"] == (request.param == "other")
    return MODES[by_task]


TWICE = 2


def costly(mode: str) -> int:
    """How often to cancel twice where each run costs much: a shield holds off the second cancel of a scope."""
    return TWICE if mode == "task" else 0


async def nothing_left(before: Snapshot) -> None:
    try:
        await eventually(lambda: snapshot() == before)
    except AssertionError:
        (pids, fds), (known, held) = snapshot(), before
        pytest.fail(f"left: {pids - known}, {fds.items() - held.items()}; gone: {known - pids}")


class Scene:
    """A host, a manager with a checkpoint, and what is there when nothing was left behind."""

    def __init__(self, env: Any, mgr: BranchManager, at: Any) -> None:
        self.env = env
        self.mgr = mgr
        self.at = at
        self.before: Snapshot = snapshot()

    async def check(self) -> None:
        await nothing_left(self.before)
        # And everything still works.
        async with self.mgr.branch("start") as (branch, below):
            assert (await branch.step(below, "go")).next_state.observation == 2


@asynccontextmanager
async def scene(strategy: Any = None) -> AsyncIterator[Scene]:
    async with host(Seeded) as env:
        at, _ = await env.reset(seed=1)
        at = (await env.step(at, "go")).next_state
        async with BranchManager.create(env, strategy=strategy) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branch("start"):
                pass
            yield Scene(env, mgr, at)


async def test_cancel_of_branch_leaks_the_child(mode: str) -> None:
    """A branch, or several, cancelled at any suspension of making, stepping and ending leave nothing."""
    async with scene() as it:

        async def one() -> None:
            async with it.mgr.branch("start") as (branch, below):
                await branch.step(below, "go")

        async def several() -> None:
            async with it.mgr.branches("start", 3) as pairs:
                await it.mgr.step_all(pairs, ["go"] * 3)

        for operation in (one, several):
            assert await cancel_everywhere(operation, it.check, mode=mode, twice=TWICE) >= 1


async def test_cancel_of_fork_leaks_the_child(mode: str) -> None:
    """The same for live forks, and forks of forks."""
    async with scene() as it:

        async def fork() -> None:
            async with AsyncExitStack() as stack:
                for copy, _ in await it.env.fork(3):
                    await stack.enter_async_context(copy)
                nested, below = await copy.fork()
                await nested.step(below, "go")

        assert await cancel_everywhere(fork, it.check, mode=mode, twice=TWICE) >= 1


async def test_cancel_of_checkpoint_leaks_the_child(mode: str) -> None:
    """The same for checkpoints: new ones, replaced ones and released ones."""
    async with scene() as it:

        async def checkpoint() -> None:
            try:
                await it.mgr.checkpoint("more", it.at)
            finally:
                if "more" in it.mgr.checkpoints:
                    await it.mgr.release("more")

        async def replace() -> None:
            await it.mgr.checkpoint("start", it.at)

        async def check() -> None:
            await eventually(lambda: tuple(map(len, snapshot())) == tuple(map(len, it.before)), what="nothing is left")
            async with it.mgr.branch("start") as (branch, below):
                assert (await branch.step(below, "go")).next_state.observation == 2

        assert await cancel_everywhere(checkpoint, it.check, mode=mode, twice=TWICE) >= 1
        assert await cancel_everywhere(replace, check, mode=mode, twice=TWICE) >= 1


async def test_cancel_of_host_leaks_its_processes(mode: str) -> None:
    """A host cancelled at any suspension of its start, use and end leaves nothing."""
    async with host(Counter):  # the event loop's own descriptors are there
        before = snapshot()

        async def start_and_end() -> None:
            async with host(Counter) as env:
                await env.reset()

        async def check() -> None:
            await nothing_left(before)

        assert await cancel_everywhere(start_and_end, check, mode=mode, twice=costly(mode)) >= 1


async def test_cancel_of_close_leaks_its_processes(mode: str) -> None:
    """The ends alone: of a manager with branches and checkpoints, and of its host, cancelled at any suspension."""
    async with host(Counter):
        before = snapshot()
        made: list[Any] = []

        async def make() -> None:
            env = await host(Counter)
            at, _ = await env.reset()
            mgr = BranchManager.create(env)
            await mgr.checkpoint("start", at)
            await mgr.checkpoint("more", at)
            await mgr.branches("start", 2)
            await mgr.branch("more")
            await env.fork()
            made[:] = [mgr, env]

        async def end() -> None:
            try:
                await made[0].aclose()
            finally:
                await made[1].aclose()

        async def check() -> None:
            await nothing_left(before)
            await make()

        await make()
        assert await cancel_everywhere(end, check, mode=mode, twice=costly(mode)) >= 1
        await made[0].aclose()
        await made[1].aclose()


async def test_cancel_of_a_live_objects_checkpoint_leaks_the_child(mode: str) -> None:
    """A checkpoint that forks the agent, its branches and its end, cancelled at any suspension, leave nothing."""
    async with host(Counter):
        before = snapshot()
        env = Counter()
        at, _ = env.reset()

        async def work() -> None:
            async with BranchManager.create(env) as mgr:
                await mgr.checkpoint("start", at)
                branch, below = await mgr.branch("start")
                await branch.step(below, "go")
                await mgr.checkpoint("deeper", branch.newest_state(), env=branch)

        async def check() -> None:
            await nothing_left(before)

        assert await cancel_everywhere(work, check, mode=mode, twice=costly(mode)) >= 1


async def test_cancel_of_a_replay_leaks_the_child(mode: str) -> None:
    """`action_replay`, whose first branch starts a process that has loaded the factory, leaves nothing either."""
    async with scene("action_replay") as it:

        async def replay() -> None:
            async with it.mgr.branch("start") as (branch, below):
                await branch.step(below, "go")

        async def anew() -> None:
            async with BranchManager.create(it.env, strategy="action_replay") as mgr:
                await mgr.checkpoint("start", it.at)
                async with mgr.branch("start") as (branch, below):
                    await branch.step(below, "go")

        assert await cancel_everywhere(replay, it.check, mode=mode, twice=costly(mode)) >= 1
        if mode == "task":  # each run starts an interpreter
            assert await cancel_everywhere(anew, it.check, mode=mode) >= 1


async def test_cancel_of_map_leaks_the_children(mode: str) -> None:
    """`map` with several branches alive, cancelled at any suspension of its consumer, leaves nothing."""
    async with scene() as it:

        async def rollout(env: Any, at: Any) -> Any:
            return (await env.step(at, "go")).next_state.observation

        async def work() -> None:
            async with it.mgr.map(rollout, "start", 6, limit=3) as results:
                assert [result async for result in results] == [2] * 6

        assert await cancel_everywhere(work, it.check, mode=mode, twice=TWICE) >= 1


async def test_an_exception_in_the_reader_of_map_leaks_the_children(mode: str) -> None:
    """An exception between two results comes out alone, whatever the rollouts are at, and leaves nothing."""
    async with scene() as it:

        async def rollout(env: Any, at: Any) -> Any:
            return (await env.step(at, "go")).next_state.observation

        async def read_and_fail(taken: int) -> None:
            async with it.mgr.map(rollout, "start", 6, limit=3) as results:
                for _ in range(taken):
                    await anext(results)
                raise ValueError

        for taken in (0, 1, 4):
            with pytest.raises(ExceptionGroup) as caught:
                await read_and_fail(taken)
            assert [type(error) for error in caught.value.exceptions] == [ValueError]
            await it.check()
