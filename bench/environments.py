"""The environments of the benchmarks, and the floors that are measured inside them."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from typing import Any

from ramet.types import EnvironmentSpec, State, StateMetadata, StepResult


class Counter:
    """Counts its steps, over a heap of `mib` MiB that was written to."""

    def __init__(self, mib: int = 0) -> None:
        self.spec = EnvironmentSpec(name="counter", deterministic=True)
        self.count = 0
        self.heap = bytearray(mib << 20)
        for at in range(0, len(self.heap), 4096):
            self.heap[at] = 1

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        self.count = 0
        return State(observation=0), {}

    def step(self, state: State, action: Any) -> StepResult:
        self.count += 1
        after = State(observation=self.count, metadata=StateMetadata(step=self.count))
        return StepResult(next_state=after, reward=1.0)

    def read_back(self) -> int:
        """Read the whole heap, a byte of each page."""
        return sum(self.heap[::4096])

    def bare_forks(self, count: int, alive: bool = False) -> list[float]:
        """The floor: fork with a socketpair of its own, until the child's first byte; in seconds."""
        times, ends = [], []
        for _ in range(count):
            began = time.perf_counter()
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                _say_and_wait(theirs, b"x")
            theirs.close()
            ours.recv(1)
            times.append(time.perf_counter() - began)
            ends.append((pid, ours))
            if not alive:
                _end(ends)
        _end(ends)
        return times

    def bare_fork_times_at(self, counts: list[int], rounds: int) -> list[float]:
        """The median time of a bare fork, in seconds, while that many children are alive already."""
        medians = []
        ends: list[tuple[int, socket.socket]] = []
        for count in counts:
            while len(ends) < count:
                ends.append(_bare_child())
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                child = _bare_child()
                times.append(time.perf_counter() - began)
                _end([child])
            medians.append(sorted(times)[len(times) // 2])
        _end(ends)
        return medians

    def bare_fan_out(self, count: int, serial: bool) -> float:
        """The floor of a fan-out: `count` bare forks, each child reads the heap back and all stay alive; in seconds.

        Args:
            count: how many children.
            serial: wait for each child's answer before the next fork, or for all of them at the end.
        """
        began = time.perf_counter()
        ends = []
        for _ in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                _say_and_wait(theirs, self.read_back().to_bytes(8))
            theirs.close()
            ends.append((pid, ours))
            if serial:
                ours.recv(8)
        for _, end in () if serial else ends:
            end.recv(8)
        took = time.perf_counter() - began
        _end(ends)
        return took

    def bare_child_memory(self) -> int:
        """The private dirty memory, in bytes, of a bare child of this process that has echoed a few times."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            while data := theirs.recv(65536):
                theirs.send(data)
            os._exit(0)
        theirs.close()
        for _ in range(3):
            ours.send(b"x" * 40)
            ours.recv(65536)
        memory = private_dirty(pid)
        _end([(pid, ours)])
        return memory


def CartPole() -> Any:
    """Gymnasium's CartPole, with the floor for the memory of a child."""
    from ramet.adapters.gymnasium import make_environment

    env: Any = make_environment("CartPole-v1")
    env.bare_child_memory = Counter.bare_child_memory.__get__(env)
    return env


def private_dirty(pid: int) -> int:
    """The private dirty memory of a process, in bytes."""
    with open(f"/proc/{pid}/smaps_rollup") as table:
        return sum(int(line.split()[1]) for line in table if line.startswith("Private_Dirty")) * 1024


def _bare_child() -> tuple[int, socket.socket]:
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _say_and_wait(theirs, b"x")
    theirs.close()
    ours.recv(1)
    return pid, ours


def _say_and_wait(end: socket.socket, word: bytes) -> None:
    try:
        end.send(word)
        end.recv(1)
    finally:
        os._exit(0)


def _end(children: list[tuple[int, socket.socket]]) -> None:
    while children:
        pid, end = children.pop()
        end.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
