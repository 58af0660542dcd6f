"""Environments that the fault tests share, and what they look at."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ramet import State, StateMetadata, StepResult
from ramet.process.warden import children
from tests.helpers import open_fds


def state_at(step: int, observation: Any = None) -> State:
    """A state that knows its step."""
    return State(observation, metadata=StateMetadata(step=step))


class Counter:
    """Counts its steps; the observation is the count."""

    def __init__(self) -> None:
        self.count = 0

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        self.count = 0
        return state_at(0, 0), {}

    def step(self, state: State, action: Any) -> StepResult:
        self.count += 1
        return StepResult(state_at(self.count, self.act(action)), reward=1.0)

    def act(self, action: Any) -> Any:
        """What a step observes; tests override it."""
        return self.count

    def pid(self) -> int:
        return os.getpid()


def wait_for_file(path: str) -> None:
    """Returns when there is a file `path`; what it waits for happens in the test."""
    deadline = time.monotonic() + 20
    while not os.path.exists(path):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.001)


Snapshot = tuple[frozenset[int], dict[int, str]]


def snapshot() -> Snapshot:
    """Every process below this one, zombies too, and every open descriptor of this one.

    It is taken often, and does not look at the processes of others.
    """
    below: list[int] = []
    waiting = [os.getpid()]
    while waiting:
        below += waiting
        waiting = [child for pid in waiting for child in children(pid)]
    return frozenset(below[1:]), open_fds()
