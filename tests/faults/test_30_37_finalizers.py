"""Faults 30 and 37: `close()` or a finalizer of a copy destroys what the original still uses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ramet import BranchManager, host
from ramet.blocking import BranchManager as BlockingManager
from tests.faults.probes import Guarded, Tenant


def exist(paths: list[str]) -> list[bool]:
    return [os.path.exists(path) for path in paths]


async def test_close_of_a_copy_destroys_what_the_original_uses(tmp_path: Path) -> None:
    """Only the host runs `env.close()`, once and at its end; branches, forks and checkpoints do not."""
    log = tmp_path / "closed"
    async with host(Tenant, args=(str(log),)) as env:
        state, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", state)
            async with mgr.branch("start") as (branch, at), BranchManager.create(branch) as nested:
                await nested.checkpoint("deeper", at)
                async with nested.branch("deeper"):
                    pass
            fork, _ = await env.fork()
            await fork.aclose()
        assert not log.exists()
        paths = await env.call("paths")
        assert exist(paths) == [True] * 3
        await env.call("drop")  # the host itself lets go of them in order
        assert exist(paths) == [False] * 3
        pid = env.pid
    assert log.read_text() == f"{pid}\n"


async def test_destructors_do_not_run_at_the_end_of_a_copy(tmp_path: Path) -> None:
    """A copy ends without running any destructor of what it shares with the original."""
    log = tmp_path / "collected"
    async with host(Guarded, args=(str(log),)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 3) as pairs:
            for branch, at in pairs:
                await branch.step(at, 1)
        assert not log.exists()
    assert not log.exists()  # the host ends by a signal as well, after its close()


@pytest.mark.parametrize("seed", [None, 7])
async def test_a_child_drops_its_last_reference_to_a_temporary_directory(tmp_path: Path, seed: Any) -> None:
    """The directories and files of the original stay, whatever a copy does with its references."""
    async with host(Tenant, args=(str(tmp_path / "closed"),)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        paths = await env.call("paths")
        await mgr.checkpoint("start", state)
        for made in (await mgr.branch("start", seed=seed), await env.fork(seed=seed)):
            branch = made[0]
            await branch.call("drop")
            assert exist(paths) == [True] * 3
            deeper, _ = await branch.fork()
            await deeper.call("drop")
            assert exist(paths) == [True] * 3
        await env.call("drop")
        assert exist(paths) == [False] * 3


async def test_a_directory_of_the_childs_own(tmp_path: Path) -> None:
    """A directory that a copy makes by itself vanishes with its last reference, as always."""
    async with host(Tenant, args=(str(tmp_path / "closed"),)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branch("start") as (branch, _):
            path = await branch.call("rent")
            assert exist([path]) == [True]
            deeper, _ = await branch.fork()
            await deeper.call("leave")
            assert exist([path]) == [True]
            await branch.call("leave")
            assert exist([path]) == [False]
        await env.call("drop")


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning", "ignore:Implicitly cleaning up:ResourceWarning")
def test_a_live_object_and_its_temporary_directory(tmp_path: Path) -> None:
    """The same for copies of an object in the agent's own process."""
    env = Tenant(str(tmp_path / "closed"))
    paths = env.paths()
    with BlockingManager.create(env, strategy="process_fork") as mgr:
        mgr.checkpoint("start", env.reset()[0])
        for _ in range(2):
            with mgr.branch("start") as (branch, _):
                branch.call("drop")
        assert exist(paths) == [True] * 3
    assert exist(paths) == [True] * 3
    assert not (tmp_path / "closed").exists()
    env.drop()
    assert exist(paths) == [False] * 3
