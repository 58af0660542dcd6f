"""Hosted environments whose methods are coroutines: stepped on a loop of their own, whatever loop the agent runs."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

import anyio
import pytest

from ramet import BranchManager, EnvironmentFailed, State, StepResult, blocking, host
from tests.core.envs import AsyncPureTrail, AsyncTrail, Gate, Options
from tests.helpers import eventually


class Threaded(AsyncTrail):
    """Uses worker threads, a lock and a background task of its loop, as async clients do."""

    spec = replace(AsyncTrail.spec, name="threaded")

    def __init__(self) -> None:
        super().__init__()
        self.lock = asyncio.Lock()

    async def reset(self, *, seed: int | None = None, options: Options = None) -> Any:  # type: ignore[override]
        self.background = asyncio.get_running_loop().create_task(asyncio.sleep(0))
        return await super().reset(seed=seed, options=options)

    async def step(self, state: State, action: Any) -> StepResult:  # type: ignore[override]
        async with self.lock:
            pid = await asyncio.to_thread(os.getpid)
        result = await super().step(state, action)
        return replace(result, info={"pid": pid})

    async def close(self) -> None:
        await asyncio.sleep(0)


class Partly(AsyncTrail):
    """Only `step` is a coroutine."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> Any:
        self.way = [f"{seed}"]
        return self._state(), {}


@pytest.mark.parametrize("factory", [AsyncTrail, Threaded])
async def test_hosted(factory: Any) -> None:
    with anyio.fail_after(30):
        async with host(factory) as env, BranchManager.create(env) as mgr:
            assert mgr.strategy == "process_fork"
            state, _ = await env.reset(seed=1)
            state = (await env.step(state, "a")).next_state
            await mgr.checkpoint("here", state)
            async with mgr.branches("here", 3) as pairs:
                results = await mgr.step_all(pairs, list("xyz"))
                seen = [result.next_state.observation for result in results]  # type: ignore[union-attr]
                assert seen == ["1:None/a/x", "1:None/a/y", "1:None/a/z"]
                if factory is Threaded:
                    pids = [result.info["pid"] for result in results]  # type: ignore[union-attr]
                    assert pids == [branch.pid for branch, _ in pairs]
                fork, fork_state = await pairs[0][0].fork()
                assert (await fork.step(fork_state, "f")).next_state.observation == "1:None/a/x/f"
                assert await fork.call("length") == 4
            assert (await env.step(state, "on")).next_state.observation == "1:None/a/on"


async def test_hosted_and_pure() -> None:
    async with host(AsyncPureTrail) as env, BranchManager.create(env) as mgr:
        assert mgr.strategy == "direct"
        state, _ = await env.reset(seed=1)
        await mgr.checkpoint("here", state)
        async with mgr.branches("here", 2) as pairs:
            seen = [(await branch.step(at, i)).next_state.observation for i, (branch, at) in enumerate(pairs)]
        assert seen == ["1:None/0", "1:None/1"]


async def test_only_some_methods_are_coroutines() -> None:
    async with host(Partly) as env:
        state, _ = await env.reset(seed=1)
        assert (await env.step(state, "a")).next_state.observation == "1/a"


async def test_an_exception_in_a_coroutine() -> None:
    async with host(AsyncTrail) as env:
        state, _ = await env.reset(seed=1)
        with pytest.raises(EnvironmentFailed, match="ValueError: told to raise"):
            await env.step(state, "raise")
        assert (await env.step(state, "a")).next_state.observation == "1:None/a"


async def test_a_fork_while_a_sibling_is_in_a_coroutine(gate: Gate) -> None:
    async with host(Threaded) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset(seed=1)
        await mgr.checkpoint("here", state)
        (one, one_state), (two, two_state) = await mgr.branches("here", 2)
        async with anyio.create_task_group() as tg:
            tg.start_soon(one.step, one_state, gate.word)
            await eventually(gate.arrived)
            after = (await two.step(two_state, "b")).next_state
            fork, fork_state = await two.fork()
            assert fork_state.observation == after.observation
            assert (await fork.step(fork_state, "c")).next_state.observation == "1:None/b/c"
            gate.open()


async def test_replayed() -> None:
    async with host(AsyncTrail) as env, BranchManager.create(env, strategy="action_replay") as mgr:
        state, _ = await env.reset(seed=1)
        state = (await env.step(state, "a")).next_state
        await mgr.checkpoint("here", state)
        async with mgr.branch("here") as (branch, branch_state):
            assert (await branch.step(branch_state, "b")).next_state.observation == "1:None/a/b"


def test_hosted_blocking() -> None:
    with blocking.host(Threaded) as env, blocking.BranchManager.create(env) as mgr:
        state, _ = env.reset(seed=1)
        mgr.checkpoint("here", state)
        for i in range(2):
            with mgr.branch("here") as (branch, branch_state):
                assert branch.step(branch_state, i).next_state.observation == f"1:None/{i}"
