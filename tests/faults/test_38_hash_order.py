"""Fault 38: set and dict-of-str order differs between processes, so a replay diverges."""

from __future__ import annotations

from typing import Any

import pytest

from ramet import BranchManager, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import Unordered


@pytest.mark.parametrize("round_", range(2))
async def test_set_order_differs_between_processes(round_: int) -> None:
    """The order of a set is the same in a host, its branches, its replays, and what is made of those."""
    async with host(Unordered) as env:
        state, _ = await env.reset(seed=1)
        state = (await env.step(state, 3)).next_state
        async with BranchManager.create(env) as forks, BranchManager.create(env, strategy="action_replay") as replays:
            for mgr in (forks, replays):
                await mgr.checkpoint("start", state)
                for _ in range(2):
                    async with mgr.branch("start") as (branch, at):
                        assert at.observation == state.observation
                        after = (await branch.step(at, 5)).next_state
                        async with BranchManager.create(branch, strategy=mgr.strategy) as nested:  # type: ignore[arg-type]
                            await nested.checkpoint("deeper", after)
                            async with nested.branch("deeper") as (_, deeper):
                                assert deeper.observation == after.observation


def test_without_an_event_loop() -> None:
    """The same for a blocking agent."""
    with blocking_host(Unordered) as env, BlockingManager.create(env, strategy="action_replay") as mgr:
        state, _ = env.reset(seed=1)
        mgr.checkpoint("start", env.step(state, 3).next_state)
        with mgr.branches("start", 2):
            pass


async def test_the_seed_of_the_agent_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that has set PYTHONHASHSEED, or passes an environment that does, decides."""
    monkeypatch.setenv("PYTHONHASHSEED", "17")
    async with host(Unordered) as env:
        assert await env.call("hash_seed") == "17"
    async with host(Unordered, environ={"PYTHONHASHSEED": "18"}) as env:
        assert await env.call("hash_seed") == "18"


async def test_two_hosts_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed is drawn for each host, so that nothing comes to rely on one order."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seeds: set[Any] = set()
    for _ in range(2):
        async with host(Unordered) as env:
            seeds.add(await env.call("hash_seed"))
    assert len(seeds) == 2
    assert None not in seeds
