"""Fault 29: two tasks step one branch at once."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest

from ramet import BranchBusy, BranchManager, StaleState, StepResult, host
from ramet.blocking import host as blocking_host
from tests.faults.probes import AsyncPatient, Cloneable, Counter, Patient, Pure
from tests.helpers import eventually, wait_until


async def test_two_tasks_step_one_branch(tmp_path: Any) -> None:
    """The second call is refused while the first is out, whatever it is; the first goes on unharmed."""
    gate = tmp_path / "gate"
    async with host(Patient, args=(str(gate),)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, at), anyio.create_task_group() as tg:
            results: list[StepResult] = []

            async def step() -> None:
                results.append(await branch.step(at, 5))

            tg.start_soon(step)
            await eventually(lambda: branch._link.busy)  # type: ignore[union-attr]
            for call in (
                lambda: branch.step(at, 1),
                lambda: branch.reset(),
                lambda: branch.call("where"),
                lambda: branch.hidden(at),
                lambda: branch.fork(),
                lambda: mgr.checkpoint("middle", at, env=branch),
            ):
                with pytest.raises(BranchBusy) as caught:
                    await call()
                assert caught.value.branch == branch.name
            (outcome,) = await mgr.step_all([(branch, at)], [1])
            assert isinstance(outcome, BranchBusy)
            gate.touch()
            await eventually(lambda: results)
            assert results[0].next_state.observation == 5
            assert (await branch.step(results[0].next_state, 1)).next_state.observation == 6


def test_two_threads_step_one_branch(tmp_path: Any) -> None:
    """The same for threads that share a blocking environment."""
    gate = tmp_path / "gate"
    with blocking_host(Patient, args=(str(gate),)) as env:
        state, _ = env.reset()
        results: list[StepResult] = []
        thread = threading.Thread(target=lambda: results.append(env.step(state, 5)))
        thread.start()
        wait_until(lambda: env._link.busy)
        with pytest.raises(BranchBusy):
            env.step(state, 1)
        gate.touch()
        thread.join(10)
        assert results[0].next_state.observation == 5


@pytest.mark.parametrize("strategy", ["clone", "process_fork"])
async def test_two_tasks_step_one_live_object(strategy: Any) -> None:
    """A task that yields between its check and its step cannot be overtaken: the second one is refused."""
    env = Cloneable() if strategy == "clone" else Counter()
    async with BranchManager.create(env, strategy=strategy) as mgr:
        state, _ = await mgr.env.reset()
        outcomes: list[Any] = []

        async def step() -> None:
            try:
                outcomes.append(await mgr.env.step(state, 1))
            except (BranchBusy, StaleState) as error:
                outcomes.append(error)

        for _ in range(20):
            outcomes.clear()
            state, _ = await mgr.env.reset()
            async with anyio.create_task_group() as tg:
                for _ in range(4):
                    tg.start_soon(step)
            assert [type(outcome) for outcome in outcomes].count(StepResult) == 1
            assert env.total == 1


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
@pytest.mark.parametrize("anyio_backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True})])
async def test_a_live_async_object_is_stepped_twice_or_forked_in_a_step(anyio_backend: Any) -> None:
    """While a step of a live async environment is out, it is neither stepped nor checkpointed."""
    env = AsyncPatient()
    async with BranchManager.create(env, strategy="process_fork") as mgr, anyio.create_task_group() as tg:
        state, _ = await mgr.env.reset()
        results: list[StepResult] = []

        async def step() -> None:
            results.append(await mgr.env.step(state, 5))

        tg.start_soon(step)
        await eventually(lambda: env.waiting)
        with pytest.raises(BranchBusy):
            await mgr.env.step(state, 1)
        with pytest.raises(BranchBusy):
            await mgr.checkpoint("middle", state)
        env.opened = True
        await eventually(lambda: results)
        assert results[0].next_state.observation == 5
        await mgr.checkpoint("after", results[0].next_state)


async def test_branches_of_a_pure_environment_share_it(tmp_path: Any) -> None:
    """Under `direct` nobody is refused: calls queue in order in a host."""
    async with host(Pure) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        seen: list[int] = []

        async def roll(number: int) -> None:
            async with mgr.branch("start") as (branch, at):
                seen.append((await branch.step(at, number)).next_state.observation)

        async with anyio.create_task_group() as tg:
            for number in range(20):
                tg.start_soon(roll, number)
        assert sorted(seen) == list(range(20))
