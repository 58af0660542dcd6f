"""Fault 21: a fork gets slower with each generation.

What ramet itself keeps of an ancestor is nothing that a fork has to look at. The kernel does keep something:
as long as an ancestor lives, each of its descendants' forks visits the chain of anonymous mappings that leads
there (a bare `os.fork` 200 deep takes five times as long as the first, if all the parents stay). So the figure
is promised for a chain whose parents go.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ramet import BranchManager, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import Counter

DEEP = 200


def chain_that_stays(depth: int, env: Any, state: Any) -> list[Any]:
    """Each environment forks the next one and stays; all of them."""
    envs = []
    for _ in range(depth):
        env, state = env.fork()
        envs.append(env)
        state = env.step(state, 1).next_state
    return envs


async def chain_that_goes(depth: int) -> list[float]:
    """Each branch is checkpointed, branched from, and ended; how long the branches took."""
    times = []
    async with host(Counter) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        old: Any = env
        for _ in range(depth):
            await mgr.checkpoint("here", state, env=old)
            began = time.perf_counter()
            new, state = await mgr.branch("here")
            times.append(time.perf_counter() - began)
            if old is not env:
                await old.aclose()
            state = (await new.step(state, 1)).next_state
            old = new
        assert state.observation == depth
    return times


@contextmanager
def recursion_limited_to(more: int) -> Iterator[None]:
    """Lets the code in the block go at most `more` calls deeper."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + more)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def test_fork_slower_with_each_generation() -> None:
    """The last of 200 generations holds what the first holds: the same descriptors and a frozen heap."""
    with blocking_host(Counter) as env, BlockingManager.create(env) as mgr:
        state, _ = env.reset()
        envs = chain_that_stays(DEEP, env, state)
        first, last = envs[0], envs[-1]
        assert set(last.call("descriptors")) == set(first.call("descriptors"))
        assert last.call("frozen") > 0
        assert (last.call("total"), first.call("total")) == (DEEP, 1)
        with recursion_limited_to(100):  # drawing and ending a chain takes no recursion: it may be of any depth
            drawn = str(mgr.tree())
            links = first.take_links()
        assert drawn.count("fork-") == DEEP
        assert len(links) == DEEP
        for link in links:
            link.shut()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})])
async def test_a_chain_deeper_than_the_recursion_limit_ends(anyio_backend: Any) -> None:
    """The same for the environments of an async agent."""
    async with host(Counter) as env:
        await env.reset()
        branch: Any = env
        for _ in range(80):
            branch, _ = await branch.fork()
        with recursion_limited_to(60):
            links = env.take_links()
        assert len(links) == 81


async def test_a_chain_that_stands_still_gathers_nothing() -> None:
    """Forks without a step in between: the newest state is good in each, and the first in the host."""
    async with host(Counter) as env:
        oldest, _ = await env.reset()
        state = oldest
        branch: Any = env
        for _ in range(20):
            branch, state = await branch.fork()
        assert (await branch.step(state, 1)).next_state.observation == 1
        assert (await env.step(oldest, 2)).next_state.observation == 2


@pytest.mark.slow
async def test_the_last_of_200_forks_takes_no_longer_than_the_first() -> None:
    """Fork time at the end of a chain 200 deep is within 1.5 times that of its beginning."""
    ratios = []
    for _ in range(3):  # the best of three, and the least of many: the machine is shared
        times = await chain_that_goes(DEEP)
        ratios.append(min(times[-40:]) / min(times[:40]))
    assert min(ratios) < 1.5, ratios
