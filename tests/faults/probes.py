"""The environments of the fault tests. They import little, so that their hosts start fast."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from ramet.types import EnvironmentSpec, State, StateMetadata, StepResult


class Counter:
    """Adds up the actions that are numbers; `observe` turns the sum into an observation."""

    def __init__(self) -> None:
        self.total = 0
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        self.total = self.steps = 0
        return self.state(), {}

    def step(self, state: State, action: Any) -> StepResult:
        reward = self.act(action)
        self.steps += 1
        return StepResult(self.state(), reward)

    def act(self, action: Any) -> float:
        if isinstance(action, int):
            self.total += action
        return float(self.total)

    def observe(self) -> Any:
        return self.total

    def state(self) -> State:
        return State(self.observe(), metadata=StateMetadata(step=self.steps))

    def where(self) -> int:
        return os.getpid()

    def descriptors(self) -> dict[int, str]:
        found = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
            except OSError:  # the descriptor of the listing itself
                continue
        return found

    def frozen(self) -> int:
        return gc.get_freeze_count()


class Pure(Counter):
    """The state is all there is."""

    spec = EnvironmentSpec("pure", pure_step=True)

    def step(self, state: State, action: Any) -> StepResult:
        after = state.observation + action
        return StepResult(State(after, metadata=StateMetadata(step=state.metadata.step + 1)), float(after))


class Cloneable(Counter):
    """Can copy itself."""

    spec = EnvironmentSpec("cloneable", supports_clone=True)

    def clone(self) -> Cloneable:
        twin = Cloneable()
        twin.total, twin.steps = self.total, self.steps
        return twin


class Replayable(Counter):
    """Says that its episodes can be played again."""

    spec = EnvironmentSpec("replayable", deterministic=True, supports_seed=True)


class Endless(Counter):
    """A negative action never comes to an end."""

    def act(self, action: Any) -> float:
        while isinstance(action, int) and action < 0:
            time.sleep(0.01)
        return super().act(action)


class Threaded(Counter):
    """Has a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.stop.wait, name="prefetcher", daemon=True)
        self.thread.start()


class Employer(Counter):
    """Has a helper process that it talks to through a pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE)

    def helper_pid(self) -> int:
        return self.helper.pid


def protocol_sockets() -> list[int]:
    """The sockets of this process: in an environment's process that is the connection to the agent."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            continue
    return found


class Compromised(Counter):
    """Writes whatever it is told to the connection of its own process."""

    def act(self, action: Any) -> float:
        if isinstance(action, bytes):
            for fd in protocol_sockets():
                os.write(fd, action)
        if action == "flood":
            (fd,) = protocol_sockets()
            while True:
                os.write(fd, b"\x00\x00\x00\x03\x92\x07\x00" * 1000)
        if action == "shut":
            for fd in protocol_sockets():
                os.close(fd)
        return super().act(action)


class Talkative(Counter):
    """Prints as many bytes as it is told, in every way there is."""

    def act(self, action: Any) -> float:
        line = "x" * 99
        for _ in range(action // 100):
            print(line)  # noqa: T201  # what this class is for
        os.write(1, b"raw\n")
        os.write(2, b"raw error\n")
        print("to stderr", file=sys.stderr)  # noqa: T201
        subprocess.run(["echo", "from a subprocess"], check=True)
        return super().act(action)


class SlowToReseed(Counter):
    """Reseeding takes until a file exists."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def reseed(self, seed: int) -> None:
        while not os.path.exists(self.gate):
            time.sleep(0.005)


class SmallCap(Counter):
    """Its process sends nothing over a megabyte."""

    def __init__(self) -> None:
        super().__init__()
        from ramet.protocol import wire

        wire.MAX_FRAME = 1 << 20

    def huge(self, size: int) -> bytes:
        return bytes(size)


class Unprintable(Exception):
    """Neither its text nor its repr can be had, and it cannot be pickled."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self) -> str:
        raise TypeError("no pickle")


class NotText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]  # noqa: PLE0307


class Recursive(Exception):
    def __str__(self) -> str:
        return str(self)


class Surrogate(Exception):
    def __str__(self) -> str:
        return "\ud800 and more"


class Outcome(BaseException):
    """Like the exceptions that test frameworks and event loops raise."""


def picky(needed: object, *, name: str) -> Exception:
    class Picky(Exception):
        """A local class whose constructor takes what no unpickler would give it."""

        def __init__(self, needed: object, *, name: str) -> None:
            super().__init__()

    return Picky(needed, name=name)


def raise_unprintable() -> None:
    raise Unprintable


class Thrower(Counter):
    """Raises what the action names."""

    def act(self, action: Any) -> float:
        errors: dict[str, Any] = {
            "unprintable": Unprintable,
            "not text": NotText,
            "recursive": Recursive,
            "surrogate": Surrogate,
            "local class": picky(object(), name="x"),
            "cause": ValueError("caused"),
            "group": ExceptionGroup("several", [Unprintable(), ValueError("one")]),
            "base exception": Outcome,
            "keyboard interrupt": KeyboardInterrupt,
            "generator exit": GeneratorExit,
            "huge text": ValueError("x" * 1_000_000),
            "unpicklable arguments": ValueError(threading.Lock(), lambda: None),
        }
        if action == "cause":
            raise errors[action] from Unprintable()
        if action in errors:
            raise errors[action]
        return super().act(action)


class Unbuildable(Counter):
    """Its constructor raises what cannot be printed."""

    def __init__(self) -> None:
        raise Unprintable


class Patient(Counter):
    """The action 5 takes until a file exists."""

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def act(self, action: Any) -> float:
        while action == 5 and not os.path.exists(self.gate):
            time.sleep(0.005)
        return super().act(action)


class AsyncCounter(Counter):
    """The same with coroutines."""

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        return super().reset(seed=seed, options=options)

    async def step(self, state: State, action: Any) -> StepResult:  # type: ignore[override]
        reward = await self.work(action)
        self.steps += 1
        return StepResult(self.state(), reward)

    async def work(self, action: Any) -> float:
        return self.act(action)


class AsyncPatient(AsyncCounter):
    """The action 5 takes until it is let go."""

    waiting = opened = False

    async def work(self, action: Any) -> float:
        import asyncio

        while action == 5 and not self.opened:
            self.waiting = True
            await asyncio.sleep(0.005)
        return self.act(action)


class Tenant(Counter):
    """Holds temporary things that vanish with their last reference, and has a `close()` that destroys."""

    def __init__(self, log: str = "") -> None:
        super().__init__()
        import tempfile

        class Folder(tempfile.TemporaryDirectory[str]):
            """Of a class of its own."""

        self.log = log
        self.folder: Any = tempfile.TemporaryDirectory(prefix="ramet-tenant-")
        self.own_folder: Any = Folder(prefix="ramet-tenant-")
        self.file: Any = tempfile.NamedTemporaryFile(prefix="ramet-tenant-")  # noqa: SIM115
        self.young: Any = None

    def paths(self) -> list[str]:
        return [self.folder.name, self.own_folder.name, self.file.name]

    def drop(self) -> None:
        self.folder = self.own_folder = self.file = None
        gc.collect()

    def reseed(self, seed: int) -> None:
        self.drop()

    def rent(self) -> str:
        """A directory of the copy's own."""
        import tempfile

        self.young = tempfile.TemporaryDirectory(prefix="ramet-tenant-")
        return str(self.young.name)

    def leave(self) -> None:
        self.young = None
        gc.collect()

    def close(self) -> None:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")


class Keeper:
    """Notes the process in which it is collected."""

    def __init__(self, log: str) -> None:
        self.log = log

    def __del__(self) -> None:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()}\n")


class Guarded(Counter):
    """Holds an object with a destructor."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.keeper = Keeper(log)


class Tools(AsyncCounter):
    """Its tools run in worker threads, as blocking clients in async environments do."""

    def __init__(self) -> None:
        super().__init__()
        self.task: Any = None
        self.release: Any = None

    async def work(self, action: Any) -> float:
        import asyncio

        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0.001) for _ in range(4)))
        async with asyncio.timeout(10):
            return await asyncio.to_thread(self.act, action)

    async def tool(self, value: int) -> int:
        import asyncio

        return await asyncio.to_thread(lambda: value * 2)

    async def run_process(self) -> str:
        import asyncio

        process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        return out.decode()

    async def in_background(self) -> None:
        import asyncio

        self.task = asyncio.create_task(asyncio.sleep(3600), name="poller")

    async def stop_background(self) -> None:
        self.task.cancel()

    async def busy_thread(self) -> None:
        import asyncio

        self.release = threading.Event()
        self.task = asyncio.create_task(asyncio.to_thread(self.release.wait))
        await asyncio.sleep(0)

    async def idle_thread(self) -> None:
        self.release.set()
        await self.task


class Remote(Counter):
    """Its state lives behind an address."""

    spec = EnvironmentSpec("remote shop", supports_seed=True, deterministic=True, state_location="remote")

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        self.id = f"{os.getpid()}-{time.monotonic_ns()}"
        return super().reset(seed=seed, options=options)

    def session(self) -> str:
        return self.id


class SharedClient(Counter):
    """Keeps one connection open, and shares it with its copies."""

    def __init__(self, port: int) -> None:
        super().__init__()
        import socket

        self.connection = socket.create_connection(("127.0.0.1", port))


class PerProcessClient(Counter):
    """Builds its client where it is used first in a process, so that no copy inherits a connection."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port
        self._client: tuple[int, Any] = (0, None)

    def client(self) -> Any:
        import socket

        if self._client[0] != os.getpid():
            self._client = (os.getpid(), socket.create_connection(("127.0.0.1", self.port)).makefile("rwb"))
        return self._client[1]

    def step(self, state: State, action: Any) -> StepResult:
        client = self.client()
        client.write(b"%d\n" % action)
        client.flush()
        return StepResult(self.state(), info={"answer": int(client.readline())})


class Echo:
    """Shows every action in all the places that a result has."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        return State("reset"), {"seed": seed, "options": options}

    def step(self, state: State, action: Any) -> StepResult:
        after = State(action, {"hidden": action}, StateMetadata(info={"action": action}))
        return StepResult(after, info={"action": action})

    def echo(self, value: Any, *, other: Any) -> list[Any]:
        return [value, other]


class Cyclic(Echo):
    """Its observations contain themselves."""

    def step(self, state: State, action: Any) -> StepResult:
        board: dict[str, Any] = {"board": []}
        board["board"].append(board)
        return StepResult(State(board))


class Writer(Counter):
    """Writes to files that it holds open, and flushes nothing by itself."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.files: dict[str, Any] = {}

    def open(self, name: str) -> None:
        path = os.path.join(self.folder, name)
        kind = name.partition("-")[0]
        if kind == "text":
            self.files[name] = open(path, "w")  # noqa: SIM115
        elif kind == "binary":
            self.files[name] = open(path, "wb")  # noqa: SIM115
        elif kind == "both":
            self.files[name] = open(path, "w+b")  # noqa: SIM115
        else:
            import gzip

            self.files[name] = gzip.open(path, "wb")  # noqa: SIM115

    def write(self, text: str) -> None:
        for name, file in self.files.items():
            file.write(text if name.startswith("text") else text.encode())

    def flush(self) -> None:
        for file in self.files.values():
            file.flush()

    def swap(self, old: str, new: str) -> None:
        self.files.pop(old).close()
        self.open(new)


class Hoarder(Counter):
    """Lives in the agent's process and touches what a copy of that has inherited."""

    def __init__(self) -> None:
        super().__init__()
        self.inherited: list[Any] = []
        self.files: list[Any] = []

    def subprocesses(self) -> list[int]:
        return [subprocess.run(["sh", "-c", f"exit {code}"], check=False).returncode for code in (0, 7)]

    def ignores_sigchld(self) -> bool:
        import signal

        return signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL

    def open_files(self, folder: str, count: int) -> None:
        self.files = [open(os.path.join(folder, str(number)), "w") for number in range(count)]  # noqa: SIM115

    def drop_sockets(self) -> None:
        self.inherited.clear()
        gc.collect()

    def write_files(self) -> str:
        for file in self.files:
            file.write("written")
            file.close()
        return "written"


class Unordered(Counter):
    """Shows the order of a set of texts, which hangs on the hash seed of the process."""

    spec = EnvironmentSpec("unordered", deterministic=True, supports_seed=True)

    def observe(self) -> Any:
        return list({f"item {number}" for number in range(20 + self.total)})

    def hash_seed(self) -> str | None:
        return os.environ.get("PYTHONHASHSEED")


class Slow(Counter):
    """Answers a float action after as many seconds, with a megabyte."""

    def act(self, action: Any) -> float:
        if isinstance(action, float):
            time.sleep(action)
        return super().act(action)

    def bulky(self) -> bytes:
        return bytes(1_000_000)


class Parental(Counter):
    """Starts a helper, and one that leaves the session."""

    def start(self, *, daemon: bool) -> int:
        return subprocess.Popen(["sleep", "600"], start_new_session=daemon).pid

    def wait(self) -> None:
        time.sleep(600)


class OnGraphicsCard(Counter):
    """To its process it looks as if a file of its own were a graphics card."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        from ramet.process import safety

        self.device = tempfile.TemporaryFile()  # noqa: SIM115
        device, inner = self.device.fileno(), safety._target
        safety._target = lambda fd: "/dev/nvidia0" if fd == device else inner(fd)

    def leave(self) -> None:
        self.device.close()


class Mixed(Counter):
    """Holds state of every kind that memory can hold."""

    def __init__(self) -> None:
        super().__init__()
        import contextvars
        import random
        from collections import deque

        self.random = random.Random(7)
        self.queue = deque([1, 2, 3])
        self.made = (number for number in range(100))
        self.lock = threading.Lock()
        self.variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
        self.shape: Any = lambda: self.queue[0]

    def act(self, action: Any) -> float:
        with self.lock:
            self.queue.rotate(action)
            self.total += next(self.made) + self.shape()
        os.environ["MIXED"] = str(self.total)
        self.variable.set(self.total)
        return float(self.total)

    def observe(self) -> Any:
        drawn = self.random.random()
        return [self.total, list(self.queue), drawn, os.environ.get("MIXED"), self.variable.get()]
