"""Fault 34: file buffers written before the fork appear twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ramet import BranchManager, host
from ramet.blocking import BranchManager as BlockingManager
from tests.faults.probes import Writer
from tests.helpers import run_script

FILES = ["text", "binary", "both"]


async def test_file_buffers_written_before_the_fork_appear_twice(tmp_path: Path) -> None:
    """What the environment wrote before a fork is in its files once, however many copies flush them later."""
    async with host(Writer, args=(str(tmp_path),)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        for name in FILES:
            await env.call("open", name)
        await env.call("write", "before ")
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 3) as pairs:
            for branch, _ in pairs:
                await branch.call("flush")
        fork, _ = await env.fork()
        await fork.call("flush")
        await env.call("write", "after")
        await env.call("flush")
    for name in FILES:
        assert (tmp_path / name).read_text() == "before after", name


async def test_files_opened_between_the_forks(tmp_path: Path) -> None:
    """The same for files that were opened after the first fork, in the host, a branch, or a branch of that."""
    async with host(Writer, args=(str(tmp_path),)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await env.call("open", "text-1")
        await env.call("write", "1 ")
        await mgr.checkpoint("start", state)
        await env.call("open", "text-2")
        await env.call("write", "2 ")
        branch, _ = await env.fork()
        await branch.call("open", "binary-3")
        await branch.call("write", "3 ")  # in a file of before the fork too, whose object is frozen by now
        deeper, _ = await branch.fork()
        await deeper.call("open", "text-4")
        await deeper.call("write", "4 ")
        deepest, _ = await deeper.fork()
        for each in (deepest, deeper, branch):
            await each.call("flush")
    assert (tmp_path / "text-1").read_text() == "1 2 3 4 "
    assert (tmp_path / "text-2").read_text() == "2 3 4 "
    assert (tmp_path / "binary-3").read_text() == "3 4 "
    assert (tmp_path / "text-4").read_text() == "4 "


async def test_a_file_takes_the_number_of_another(tmp_path: Path) -> None:
    """A file that was closed and another that was opened in its place are told apart."""
    async with host(Writer, args=(str(tmp_path),)) as env:
        await env.reset()
        await env.call("open", "text-old")
        await env.fork()
        for new in ("text-new", "binary-new"):
            await env.call("swap", "text-old", new)
            await env.call("write", "once")
            fork, _ = await env.fork()
            await fork.call("flush")
            await env.call("flush")
            assert (tmp_path / new).read_text() == "once"
            await env.call("swap", new, "text-old")


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")
def test_the_files_of_a_live_object(tmp_path: Path) -> None:
    """The same for an object in the agent's process, whose copies are forks of the agent."""
    env = Writer(str(tmp_path))
    for name in FILES:
        env.open(name)
    env.write("before ")
    with BlockingManager.create(env, strategy="process_fork") as mgr:
        mgr.checkpoint("start", env.reset()[0])
        with mgr.branch("start") as (branch, _):
            branch.call("flush")
            branch.call("write", "branch ")
            deeper, _ = branch.fork()
            deeper.call("flush")
            branch.call("flush")
    for name in FILES:
        env.files[name].close()
        assert (tmp_path / name).read_text() == "before branch ", name


SCRIPT = """
import sys
from ramet.blocking import BranchManager, host
from tests.faults.probes import Counter

print("written before", end=" ")
print("error before", end=" ", file=sys.stderr)
env = Counter()
if sys.argv[1] == "live":
    import warnings
    with BranchManager.create(env, strategy="process_fork") as mgr:
        mgr.checkpoint("start", env.reset()[0])
        with mgr.branches("start", 3) as pairs:
            for branch, state in pairs:
                branch.step(state, 1)
else:
    with host(Counter) as env, BranchManager.create(env) as mgr:
        mgr.checkpoint("start", env.reset()[0])
        with mgr.branches("start", 3):
            pass
print("written after")
"""


@pytest.mark.parametrize("where", ["live", "host"])
def test_the_streams_of_the_agent(where: str) -> None:
    """What the agent had printed and not flushed appears once."""
    done = run_script(SCRIPT, args=[where])
    assert done.stdout == "written before written after\n"
    assert done.stderr == "error before "
    assert sys.stdout is not None
