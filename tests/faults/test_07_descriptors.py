"""Row 7: an inherited sibling socket keeps EOF from ever coming."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ramet import BranchManager, host
from tests.faults.envs import Counter
from tests.helpers import eventually, open_fds, state


class Librarian(Counter):
    """Keeps a file open, and starts processes in two ways."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.file = open(path)  # noqa: SIM115 - it is open as long as the environment lives

    def act(self, action: Any) -> Any:
        if action == "exec":
            return subprocess.check_output(["ls", "-l", "/proc/self/fd"], text=True, close_fds=False)
        if action == "fork":
            receive, send = os.pipe()
            if os.fork() == 0:
                os.write(send, repr(open_fds()).encode())
                os._exit(0)
            os.close(send)
            with open(receive) as stream:
                text = stream.read()
            os.wait()
            return text
        return self.count


def split(pid: int) -> tuple[list[str], list[str]]:
    """The sockets that a process holds, and what else it holds open."""
    targets = sorted(open_fds(pid).values())
    return (
        [target for target in targets if target.startswith("socket:")],
        [target for target in targets if not target.startswith("socket:")],
    )


async def test_an_inherited_sibling_socket_keeps_eof_from_coming(tmp_path: Path) -> None:
    """Every process holds its own socket and the environment's descriptors, and no other."""
    book = tmp_path / "book"
    book.touch()
    async with host(Librarian, args=(str(book),), output="discard") as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 5) as pairs:
                branches = [branch for branch, _ in pairs]
                nested = [branch for branch, _ in await pairs[0][0].fork(3)]
                live = [branch for branch, _ in await env.fork(2)]
                checkpoint = next(node for node in mgr.tree().nodes() if node.kind == "checkpoint")
                pids = [env.pid, checkpoint.pid, *(branch.pid for branch in branches + nested + live)]
                # A child says hello first and lets go of the rest meanwhile.
                await eventually(lambda: all(len(split(pid)[0]) == 1 for pid in pids))
                expected = ["/dev/null", "/dev/null", "/dev/null", str(book)]
                assert [split(pid)[1] for pid in pids] == [expected] * len(pids)
                assert len({split(pid)[0][0] for pid in pids}) == len(pids)
                for copy in live:
                    await copy.aclose()


async def test_eof_does_not_come_while_later_siblings_live(tmp_path: Path) -> None:
    """A branch ends when the agent closes its connection, though siblings were made after it."""
    book = tmp_path / "book"
    book.touch()
    async with host(Librarian, args=(str(book),)) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branches("start", 3) as pairs:
                later = await mgr.branch("start")
                child, _ = await pairs[1][0].fork()
                for branch, _ in pairs:
                    assert branch.source.link is not None
                    branch.source.link.shut()  # no kill: nothing but the end of the stream
                    await eventually(lambda pid=branch.pid: state(pid) is None, what="EOF comes")  # type: ignore[misc]
                assert (await later[0].step(later[1], "go")).reward == 1.0
                assert (await child.step(child.newest_state(), "go")).reward == 1.0


async def test_processes_that_an_environment_starts_inherit_the_connection(tmp_path: Path) -> None:
    """What an environment executes has no socket of ours; what it forks by itself has the null device there."""
    book = tmp_path / "book"
    book.touch()
    async with host(Librarian, args=(str(book),)) as env:
        at, _ = await env.reset()
        async with BranchManager.create(env) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branch("start") as (branch, below):
                for one, its in ((env, at), (branch, below)):
                    listed = (await one.step(its, "exec")).next_state
                    assert "socket:" not in listed.observation
                    forked = (await one.step(listed, "fork")).next_state
                    assert "socket:" not in forked.observation
                    assert "/dev/null" in forked.observation


@pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in the test process
async def test_a_forked_agent_keeps_the_connections_of_other_trees(tmp_path: Path) -> None:
    """A copy of the agent holds no end of another host's connections: the other host still ends at EOF."""
    book = tmp_path / "book"
    book.touch()
    live = Counter()
    at, _ = live.reset()
    async with host(Librarian, args=(str(book),)) as env:
        await env.reset()
        link = env.source.link
        assert link is not None
        async with BranchManager.create(live) as mgr:
            await mgr.checkpoint("start", at)
            async with mgr.branch("start") as (branch, below):
                link.tree.finish()  # no kill and no request: nothing but the end of the streams
                await eventually(lambda: state(env.pid) is None, what="EOF comes")
                assert (await branch.step(below, "go")).reward == 1.0
