"""What the tests know about other processes: who is there, and how to wait for them.

A wait for another process always polls with a limit; nothing here sleeps for a fixed time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).resolve().parent.parent

T = TypeVar("T")


class Process(NamedTuple):
    """One line of the process table. `pid` and `start` together name a process for ever."""

    pid: int
    start: int
    ppid: int
    state: str
    name: str

    def __str__(self) -> str:
        words = _read(f"/proc/{self.pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        return f"pid {self.pid} ({self.name}, state {self.state}, parent {self.ppid}): {words[:200]}"


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:  # it has ended, or it is not ours to read
        return b""


def _process(pid: int) -> Process | None:
    stat = _read(f"/proc/{pid}/stat").decode(errors="replace")
    if not stat:
        return None
    name, _, rest = stat.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(pid=pid, start=int(fields[19]), ppid=int(fields[1]), state=fields[0], name=name)


def processes() -> dict[int, Process]:
    """Every process of this machine by its pid, zombies included."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: process for pid in pids if (process := _process(pid)) is not None}


def state(pid: int) -> str | None:
    """The one-letter state of the process (`"S"`, `"R"`, `"Z"` …), or `None` if there is none."""
    process = _process(pid)
    return process.state if process else None


def alive(pid: int) -> bool:
    """Whether the process runs: it exists and is no zombie."""
    return state(pid) not in (None, "Z", "X")


def descendants(pid: int, *, table: Mapping[int, Process] | None = None) -> list[Process]:
    """Every process below `pid`, zombies included, parents before children."""
    table = processes() if table is None else table
    found: list[Process] = []
    parents = {pid}
    while parents:
        children = [process for process in table.values() if process.ppid in parents]
        found += children
        parents = {process.pid for process in children}
    return found


def marked(mark: str, *, table: Mapping[int, Process] | None = None) -> list[Process]:
    """Every process whose environment (if it was exec'd) or memory map (if it was forked) holds `mark`."""
    table = processes() if table is None else table
    needle = mark.encode()
    return [
        process
        for process in table.values()
        if needle in _read(f"/proc/{process.pid}/environ") or needle in _read(f"/proc/{process.pid}/maps")
    ]


def open_fds(pid: int | str = "self") -> dict[int, str]:
    """What each open descriptor of the process leads to."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the directory
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def wait_until(predicate: Callable[[], T], *, timeout: float = 5.0, what: str = "") -> T:
    """Polls until `predicate` says something true, and returns that. Blocks: see `eventually`.

    Raises:
        AssertionError: it was not true within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        time.sleep(0.005)
    return value


async def eventually(predicate: Callable[[], T], *, timeout: float = 5.0, what: str = "") -> T:
    """`wait_until` for async tests: the event loop goes on meanwhile."""
    import anyio

    deadline = time.monotonic() + timeout
    while not (value := predicate()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or predicate}")
        await anyio.sleep(0.005)
    return value


class Finished(NamedTuple):
    """How a script ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def start_script(
    source: str,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
    name: str = "script.py",
) -> Iterator[subprocess.Popen[str]]:
    """A Python script in a process and a session of its own; both pipes are text. Killed when the block ends.

    The script is the file `name` in `cwd` (by default a directory that is made for it) and finds `tests`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = cwd or Path(scratch)
        (directory / name).write_text(textwrap.dedent(source), encoding="utf-8")
        with subprocess.Popen(
            [sys.executable, *flags, name, *args],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)


def run_script(
    source: str,
    *,
    timeout: float = 30.0,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    args: Sequence[str] = (),
    flags: Sequence[str] = (),
    name: str = "script.py",
) -> Finished:
    """Runs a Python script to its end; see `start_script`. Whatever it leaves running cannot hold this up.

    Raises:
        AssertionError: it did not end within `timeout` seconds; the message holds what it printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        directory = cwd or Path(scratch)
        (directory / name).write_text(textwrap.dedent(source), encoding="utf-8")
        # Files, not pipes: a pipe's end comes only when the last process that holds it has gone.
        with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
            process = subprocess.Popen(
                [sys.executable, *flags, name, *args],
                cwd=directory,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            try:
                returncode: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            stdout.seek(0)
            stderr.seek(0)
            printed = stdout.read(), stderr.read()
    if returncode is None:
        raise AssertionError(f"the script did not end within {timeout} s\n{printed[0]}\n{printed[1]}")
    return Finished(returncode, *printed)
