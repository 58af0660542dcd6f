"""Faults 35 and 36: what a fork of the agent inherits of its event loop, its signals and its sockets."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

from ramet import BranchLost, BranchManager
from tests.faults.probes import Hoarder
from tests.helpers import alive, descendants, eventually, open_fds

pytestmark = pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")

PLENTY = 20.0


async def test_a_child_hangs_at_its_first_sigchld() -> None:
    """Subprocesses of the environment come and go in every copy, and the checkpoint reaps its own, on each loop."""
    with anyio.fail_after(PLENTY):
        process = await anyio.run_process(["true"])  # the loop has installed what it does about SIGCHLD
        assert process.returncode == 0
        async with BranchManager.create(Hoarder(), strategy="process_fork") as mgr:
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("start", state)
            for _ in range(3):
                async with mgr.branch("start") as (branch, at):
                    assert await branch.call("subprocesses") == [0, 7]
                    assert await branch.call("ignores_sigchld") is True
                    deeper, _ = await branch.fork()
                    assert await deeper.call("subprocesses") == [0, 7]
                    assert (await branch.step(at, 1)).next_state.observation == 1
        assert (await anyio.run_process(["true"])).returncode == 0


async def test_a_sigterm_to_a_child_runs_the_parents_handler(anyio_backend: Any) -> None:
    """A signal to a checkpoint or a branch ends it; no handler of the agent runs, there or in the agent."""
    heard: list[int] = []
    with anyio.fail_after(PLENTY):
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
            async with BranchManager.create(Hoarder(), strategy="process_fork") as mgr:
                state, _ = await mgr.env.reset()
                await mgr.checkpoint("start", state)
                (checkpoint,) = descendants(os.getpid())
                branch, at = await mgr.branch("start")
                other, _ = await mgr.branch("start")
                os.kill(branch.pid, signal.SIGUSR1)
                await eventually(lambda: not alive(branch.pid))
                with pytest.raises(BranchLost, match="SIGUSR1"):
                    await branch.step(at, 1)
                os.kill(checkpoint.pid, signal.SIGTERM)
                await eventually(lambda: not alive(checkpoint.pid) and not alive(other.pid))
                with pytest.raises(BranchLost):
                    await mgr.branch("start")
            os.kill(os.getpid(), signal.SIGUSR1)
            async for number in signals:
                heard.append(number)
                break
    assert heard == [signal.SIGUSR1]


async def test_a_destructor_closes_what_has_reused_the_number(tmp_path: Path) -> None:
    """A socket object of the agent that is collected in a copy closes nothing that the environment has opened."""
    env = Hoarder()
    env.inherited = list(socket.socketpair())
    with anyio.fail_after(PLENTY):
        async with BranchManager.create(env, strategy="process_fork") as mgr:
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("start", state)
            async with mgr.branch("start") as (branch, _):
                await branch.call("open_files", str(tmp_path), 6)
                await branch.call("drop_sockets")
                assert await branch.call("write_files") == "written"
            env.inherited[0].send(b"still connected")
            assert env.inherited[1].recv(100) == b"still connected"
    for end in env.inherited:
        end.close()


async def test_a_copy_holds_nothing_of_the_agents(tmp_path: Path) -> None:
    """A copy has no socket, epoll set or event descriptor but its own; files and what is kept by name it has."""
    env = Hoarder()
    kept, peer = socket.socketpair()
    with anyio.fail_after(PLENTY), kept, peer, (tmp_path / "file").open("w") as file:
        manager = BranchManager.create(env, strategy="process_fork", keep_fds=[kept.fileno()])
        async with manager as mgr:
            state, _ = await mgr.env.reset()
            await mgr.checkpoint("start", state)
            async with mgr.branch("start") as (branch, _):
                await branch.call("where")  # it says hello before it has put everything in its place
                found = open_fds(branch.pid)
                assert found[file.fileno()] == str(tmp_path / "file")
                assert found[kept.fileno()].startswith("socket:")
                assert not [target for target in found.values() if target.startswith("anon_inode")]
                sockets = [target for target in found.values() if target.startswith("socket")]
                assert len(sockets) == 2, found  # the kept one, and the connection
                deeper, _ = await branch.fork()
                await deeper.call("where")
                assert sorted(open_fds(deeper.pid)) == sorted(found)
