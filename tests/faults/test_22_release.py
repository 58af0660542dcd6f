"""Fault 22: the parent is released while children live."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from ramet import BranchClosed, BranchManager, CannotBranch, RametError, host
from tests.faults.probes import Cloneable, Counter, Pure, Replayable, SlowToReseed
from tests.helpers import Process, alive, descendants, eventually

ENVIRONMENTS = {
    "direct": Pure,
    "clone": Cloneable,
    "process_fork": Counter,
    "action_replay": Replayable,
}


@asynccontextmanager
async def manager(strategy: Any, where: str) -> AsyncIterator[tuple[BranchManager, Any]]:
    factory = ENVIRONMENTS[strategy]
    if where == "host":
        async with host(factory) as env, BranchManager.create(env, strategy=strategy) as mgr:
            yield mgr, (await env.reset())[0]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            async with BranchManager.create(factory(), strategy=strategy, env_factory=factory) as mgr:
                yield mgr, (await mgr.env.reset())[0]


KINDS = [(strategy, where) for strategy in ENVIRONMENTS for where in ("host", "live")]
KINDS.remove(("clone", "host"))  # a hosted environment is forked instead


@pytest.mark.parametrize("strategy,where", KINDS)
async def test_the_parent_is_released_while_children_live(strategy: Any, where: str) -> None:
    """Branches of a released checkpoint end with it, under every strategy; a checkpoint of one lives on."""
    async with manager(strategy, where) as (mgr, state):
        await mgr.checkpoint("old", state, [] if (strategy, where) == ("action_replay", "live") else None)
        env, at = await mgr.branch("old")
        result = await env.step(at, 5)
        try:
            await mgr.checkpoint("young", result.next_state, env=env)
        except CannotBranch:
            assert strategy == "action_replay"
            await mgr.checkpoint("young", result.next_state, [5], env=env)
        await mgr.release("old")
        assert mgr.checkpoints == ("young",)
        with pytest.raises(BranchClosed):
            await env.step(result.next_state, 1)
        if strategy in ("process_fork", "action_replay"):
            await eventually(lambda: not alive(env.pid))
        async with mgr.branch("young") as (young, at):
            assert at.observation == 5
            assert (await young.step(at, 2)).next_state.observation == 7


@pytest.mark.parametrize("end", ["release", "close"])
@pytest.mark.parametrize("born", [1, 8, 32])
async def test_a_checkpoint_is_released_while_branches_are_made(born: int, end: str) -> None:
    """Branches that were under way when their checkpoint ended are refused, and leave no process behind."""
    async with host(Counter) as env:
        mgr = BranchManager.create(env)
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        outcomes: list[Any] = []

        async def make() -> None:
            try:
                outcomes.append(await mgr.branches("start", 32))
            except RametError as error:
                outcomes.append(error)

        async with anyio.create_task_group() as tg:
            tg.start_soon(make)
            await eventually(lambda: outcomes or len(below()) >= 3 + born)
            await (mgr.release("start") if end == "release" else mgr.aclose())
        (outcome,) = outcomes
        if not isinstance(outcome, RametError):
            with pytest.raises(BranchClosed):
                await outcome[0][0].step(outcome[0][1], 1)
        await eventually(lambda: len(below()) == 2, what="only the warden and the host are left")
        await mgr.aclose()


@pytest.mark.parametrize("end", ["release", "close"])
async def test_a_checkpoint_is_released_before_its_branch_has_answered(end: str, tmp_path: Path) -> None:
    """A branch whose first answer comes after the release belongs to nobody: it is ended and refused."""
    gate = tmp_path / "gate"
    async with host(SlowToReseed, args=(str(gate),)) as env:
        mgr = BranchManager.create(env)
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        outcomes: list[Any] = []

        async def make() -> None:
            try:
                outcomes.append(await mgr.branch("start", seed=1))
            except RametError as error:
                outcomes.append(error)

        async with anyio.create_task_group() as tg:
            tg.start_soon(make)
            await eventually(lambda: len(below()) == 4)
            await (mgr.release("start") if end == "release" else mgr.aclose())
            gate.touch()
        assert isinstance(outcomes[0], BranchClosed), outcomes
        await eventually(lambda: len(below()) == 2, what="only the warden and the host are left")
        await mgr.aclose()


def below() -> list[Process]:
    return descendants(os.getpid())


async def test_a_live_checkpoint_is_replaced_while_a_branch_is_made(tmp_path: Path) -> None:
    """The fork of the agent that a replaced checkpoint was goes, even if a branch of it was under way."""
    gate = tmp_path / "gate"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        async with BranchManager.create(SlowToReseed(str(gate)), strategy="process_fork") as mgr:
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("start", state)

            async def make() -> None:
                with suppress(BranchClosed):
                    await mgr.branches("start", 2, seed=1)

            async with anyio.create_task_group() as tg:
                tg.start_soon(make)
                await eventually(lambda: len(below()) == 3)
                await mgr.checkpoint("start", state)
                tg.cancel_scope.cancel()
            await eventually(lambda: len(below()) == 1, what="only the new checkpoint is left")
