"""Row 3: a fork inside a running event loop: shared epoll, callbacks run twice, data sent twice."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream

from ramet import BranchManager, StaleState
from tests.faults.envs import Counter
from tests.helpers import eventually, open_fds, start_script

pytestmark = pytest.mark.filterwarnings("ignore::ramet.ForkSafetyWarning")  # NumPy's threads in this process

# Two connections: on the first the test says when to go on and is told what happened on the second.
SERVER = """
    import hashlib, socket

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    control, _ = listener.accept()
    lines = control.makefile("rwb", buffering=0)

    def tell(text):
        lines.write(text.encode() + b"\\n")

    def wait(word):
        assert lines.readline().strip() == word

    requests = 0
    http, _ = listener.accept()
    wait(b"read")
    stream = http.makefile("rb")
    digest = hashlib.sha256()
    while line := stream.readline():
        length = 0
        while line.strip():
            name, _, value = line.decode().partition(": ")
            length = int(value) if name == "Content-Length" else length
            line = stream.readline()
        digest.update(stream.read(length))
        requests += 1
        tell(f"request {requests}")
        wait(b"answer")
        http.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 12\\r\\n\\r\\nhello ")
        tell("half answered")
        wait(b"answer")
        http.sendall(b"world!")
    tell(f"end of stream after {requests} request, body {digest.hexdigest()}")
    listener.settimeout(0)
    try:
        listener.accept()
        tell("connected again")
    except BlockingIOError:
        tell("no other connection")
"""

BODY = os.urandom(1 << 15) * 256  # 8 MiB: more than the sockets hold, so a part waits in the agent


class Model:
    """A server that answers one request, when it is told to."""

    def __init__(self, port: int, control: Any) -> None:
        self.port = port
        self._control = control
        self._lines = BufferedByteReceiveStream(control)

    async def tell(self, word: str) -> None:
        await self._control.send(word.encode() + b"\n")

    async def hear(self) -> str:
        return (await self._lines.receive_until(b"\n", 1000)).decode()


@contextlib.asynccontextmanager
async def model() -> AsyncIterator[Model]:
    with start_script(SERVER) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        async with await anyio.connect_tcp("127.0.0.1", port) as control:
            yield Model(port, control)


async def ask(port: int, answers: list[bytes], closed: anyio.Event) -> None:
    """One request to the model, as an HTTP client does it."""
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        head = f"POST /v1/chat HTTP/1.1\r\nHost: x\r\nContent-Length: {len(BODY)}\r\n\r\n"
        await stream.send(head.encode() + BODY)
        answer = b""
        while not answer.endswith(b"world!"):
            answer += await stream.receive()
        answers.append(answer)
    closed.set()


async def play(env: Any, state: Any, steps: int = 3) -> None:
    for number in range(1, steps + 1):
        result = await env.step(state, "go")
        state = result.next_state
        assert state.observation == number


@pytest.mark.parametrize("moment", ["half sent", "sent", "half answered"])
async def test_a_fork_inside_a_running_event_loop(moment: str) -> None:
    """A request in flight while the agent is forked completes exactly once, in the parent."""
    answers: list[bytes] = []
    closed = anyio.Event()
    env = Counter()
    state, _ = env.reset()
    with anyio.fail_after(30):
        async with model() as server, anyio.create_task_group() as group:
            group.start_soon(ask, server.port, answers, closed)
            await anyio.wait_all_tasks_blocked()
            if moment != "half sent":
                await server.tell("read")
                assert await server.hear() == "request 1"
            if moment == "half answered":
                await server.tell("answer")
                assert await server.hear() == "half answered"
            async with BranchManager.create(env) as mgr:
                await mgr.checkpoint("in flight", state)
                async with mgr.branches("in flight", 3) as pairs:
                    for pair in pairs:
                        await play(*pair)
                    if moment == "half sent":
                        await server.tell("read")
                        assert await server.hear() == "request 1"
                    if moment != "half answered":
                        await server.tell("answer")
                        assert await server.hear() == "half answered"
                    await server.tell("answer")
                    await closed.wait()
                    # The copies are alive, and none of them keeps the connection open.
                    expected = f"end of stream after 1 request, body {hashlib.sha256(BODY).hexdigest()}"
                    assert await server.hear() == expected
                    assert await server.hear() == "no other connection"
                    for branch, at in pairs:
                        with pytest.raises(StaleState):
                            await branch.step(at, "go")  # usable, and as far as it was
    assert answers == [b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\nhello world!"]


async def test_callbacks_of_a_forked_event_loop_run_twice(tmp_path: Path) -> None:
    """Tasks and timers of the agent run in the agent alone, before and after the fork."""
    log = tmp_path / "ticks"
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    env = Counter()
    state, _ = env.reset()

    async def tick() -> None:
        while True:
            os.write(fd, b"%d\n" % os.getpid())
            await anyio.sleep(0.001)

    async def later(delay: float) -> None:
        await anyio.sleep(delay)
        os.write(fd, b"%d later\n" % os.getpid())

    try:
        with anyio.fail_after(30):
            async with BranchManager.create(env) as mgr, anyio.create_task_group() as group:
                group.start_soon(tick)
                for delay in (0.0, 0.01, 0.1):
                    group.start_soon(later, delay)
                await mgr.checkpoint("start", state)
                async with mgr.branches("start", 5) as pairs:
                    for pair in pairs:
                        await play(*pair)
                    await eventually(lambda: log.read_text().count("later") == 3)
                    group.cancel_scope.cancel()
    finally:
        os.close(fd)
    lines = log.read_text().splitlines()
    assert {line.split()[0] for line in lines} == {str(os.getpid())}
    assert sum("later" in line for line in lines) == 3


async def test_a_forked_process_shares_the_epoll_set_of_its_parent() -> None:
    """No copy of the agent holds its epoll set, its wake-up sockets or any other socket of its loop."""
    env = Counter()
    state, _ = env.reset()
    async with BranchManager.create(env) as mgr:
        await mgr.checkpoint("start", state)
        async with mgr.branches("start", 2) as pairs:
            nested, _ = await pairs[0][0].fork()
            for branch in (pairs[0][0], pairs[1][0], nested):
                await branch.call("pid")  # it has let go by now of what is not its own
                held = list(open_fds(branch.pid).values())
                assert sum(target.startswith("socket:") for target in held) == 1, held  # its own
                assert not [target for target in held if target.startswith("anon_inode:")], held
