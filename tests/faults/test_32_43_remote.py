"""Faults 32 and 43: a connection or a keep-alive client is shared across a fork."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from ramet import BranchManager, CannotBranch, ForkSafetyWarning, host
from ramet.blocking import BranchManager as BlockingManager
from ramet.blocking import host as blocking_host
from tests.faults.probes import PerProcessClient, Remote, SharedClient


@pytest.fixture
def server() -> Iterator[tuple[int, set[bytes]]]:
    """A server that answers each line with the same line; its port, and one entry for each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    connections: set[bytes] = set()
    threads: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with closing(sock), sock.makefile("rwb") as lines:
            connections.add(repr(sock.getpeername()).encode())
            for line in lines:
                lines.write(line)
                lines.flush()

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=serve, args=(sock,)))
            threads[-1].start()

    acceptor = threading.Thread(target=accept)
    acceptor.start()
    yield listener.getsockname()[1], connections
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for thread in (acceptor, *threads):
        thread.join(10)


async def test_an_inherited_connection_is_shared() -> None:
    """An environment that says its state is remote is not forked, by a manager nor by itself; it is replayed."""
    async with host(Remote) as env:
        state, _ = await env.reset(seed=1)
        with pytest.raises(CannotBranch, match="action_replay") as caught:
            BranchManager.create(env, strategy="process_fork")
        assert caught.value.strategy == "process_fork"
        assert "address" in caught.value.reason
        with pytest.raises(CannotBranch, match="action_replay"):
            await env.fork()
        async with BranchManager.create(env) as mgr:
            assert mgr.strategy == "action_replay"
            await mgr.checkpoint("start", (await env.step(state, 4)).next_state)
            async with mgr.branches("start", 2) as pairs:
                sessions = {await branch.call("session") for branch, _ in pairs} | {await env.call("session")}
                assert len(sessions) == 3  # each replay has opened a session of its own
                assert {at.observation for _, at in pairs} == {4}
                with pytest.raises(CannotBranch, match="action_replay"):
                    await pairs[0][0].fork()
    with pytest.raises(CannotBranch, match="action_replay"):
        BranchManager.create(Remote(), strategy="process_fork", env_factory=Remote)


def test_a_blocking_agent_does_not_share_it_either() -> None:
    """The same without an event loop."""
    with blocking_host(Remote) as env:
        env.reset(seed=1)
        with pytest.raises(CannotBranch, match="action_replay"):
            BlockingManager.create(env, strategy="process_fork")
        with pytest.raises(CannotBranch, match="action_replay"):
            env.fork()


async def test_an_open_connection_is_named(server: tuple[int, set[bytes]]) -> None:
    """A connection that an environment holds all the same is named in one warning at its first fork."""
    port, _ = server
    async with host(SharedClient, args=(port,)) as env:
        state, _ = await env.reset()
        await env.step(state, 1)
        with pytest.warns(ForkSafetyWarning, match=f"127.0.0.1:{port}"):
            branch, _ = await env.fork()
        await env.fork()
        await branch.fork()


async def test_a_keep_alive_client_is_shared_across_a_fork(server: tuple[int, set[bytes]]) -> None:
    """The pattern of the documentation, one client for each process, gives each copy the answers to its own calls."""
    port, connections = server
    async with host(PerProcessClient, args=(port,)) as env, BranchManager.create(env) as mgr:
        state, _ = await env.reset()
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 3) as pairs:
            actions = [10, 20, 30]
            for _ in range(20):
                results: Any = await mgr.step_all(pairs, actions)
                assert [result.info["answer"] for result in results] == actions
                pairs = [(env, result.next_state) for (env, _), result in zip(pairs, results, strict=True)]
        assert len(connections) == 3
