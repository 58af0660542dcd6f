"""The environments that the core's tests step. Hosts import this module too, so it stays light.

The observation of each is the way that led to it, as text: two transcripts are equal where the episodes are.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ramet.types import Action, EnvironmentSpec, State, StateMetadata, StepResult

Options = Mapping[str, Any] | None


def text_of(action: Any) -> str:
    return action.text if isinstance(action, Action) else str(action)


def obey(word: str) -> None:
    """Does what some words ask for, before the step counts."""
    if word == "raise":
        raise ValueError("told to raise")
    if word == "exit":
        os._exit(7)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        signal.pause()
    if word.startswith("gate "):
        pass_gate(word.removeprefix("gate "))


class Gate:
    """Holds a step up, in whatever process it runs, until the test lets it go: two named pipes."""

    def __init__(self, folder: Path) -> None:
        self.word = f"gate {folder}"
        self._waiting = 0
        self._fds = []
        for name in ("arrived", "opened"):
            os.mkfifo(folder / name)
            self._fds.append(os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))

    def arrived(self, count: int = 1) -> bool:
        """Whether `count` steps wait at the gate."""
        try:
            self._waiting += len(os.read(self._fds[0], 4096))
        except BlockingIOError:
            pass
        return self._waiting >= count

    def open(self, count: int = 1) -> None:
        """Lets `count` steps go on."""
        self._waiting -= count
        os.write(self._fds[1], b"o" * count)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


def pass_gate(folder: str) -> None:
    with open(f"{folder}/arrived", "wb", buffering=0) as arrived:
        arrived.write(b"a")
    with open(f"{folder}/opened", "rb", buffering=0) as opened:
        opened.read(1)


class Trail:
    """A mutable environment: it ignores the state that it is handed and goes on from its own."""

    spec = EnvironmentSpec("trail", deterministic=True, supports_seed=True, supports_task_index=True)

    def __init__(self, start: str = "") -> None:
        self.start = start
        self.way: list[str] = []

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[State, dict[str, Any]]:
        task = (options or {}).get("task_index")
        self.way = [f"{self.start}{seed}:{task}"]
        return self._state(), {"pid": os.getpid()}

    def step(self, state: State, action: Any) -> StepResult:
        word = text_of(action)
        obey(word)
        self.way.append(word)
        steps = len(self.way) - 1
        return StepResult(
            self._state(), float(steps), {"length": float(steps)}, terminated=word == "end", info={"word": word}
        )

    def length(self) -> int:
        """A method of its own, for `call`."""
        return len(self.way)

    def pid(self) -> int:
        """Where it runs."""
        return os.getpid()

    def _state(self) -> State:
        steps = len(self.way) - 1
        metadata = StateMetadata(steps, episode_id=self.way[0], is_terminal=self.way[-1] == "end")
        return State("/".join(self.way), {"secret": steps}, metadata)


class CloneTrail(Trail):
    """It copies itself."""

    spec = replace(Trail.spec, name="clone trail", supports_clone=True)

    def clone(self) -> CloneTrail:
        copy = type(self)(self.start)
        copy.way = list(self.way)
        return copy


class RemoteTrail(Trail):
    """It says that its state is elsewhere, so that only a replay serves."""

    spec = replace(Trail.spec, name="remote trail", state_location="remote")


class PureTrail:
    """Everything is in the state."""

    spec = EnvironmentSpec(
        "pure trail", pure_step=True, deterministic=True, supports_seed=True, supports_task_index=True
    )

    def __init__(self, start: str = "") -> None:
        self.start = start

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[State, dict[str, Any]]:
        first = f"{self.start}{seed}:{(options or {}).get('task_index')}"
        return _pure_state((first,)), {"pid": os.getpid()}

    def step(self, state: State, action: Any) -> StepResult:
        word = text_of(action)
        obey(word)
        after = _pure_state((*state.hidden, word))
        steps = after.metadata.step
        return StepResult(after, float(steps), {"length": float(steps)}, terminated=word == "end", info={"word": word})

    def pid(self) -> int:
        """Where it runs."""
        return os.getpid()


def _pure_state(way: tuple[str, ...]) -> State:
    metadata = StateMetadata(len(way) - 1, episode_id=way[0], is_terminal=way[-1] == "end")
    return State("/".join(way), way, metadata)


class PureDice(PureTrail):
    """Pure, and its random numbers come from a seed in the state."""

    spec = EnvironmentSpec("pure dice", pure_step=True)

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[State, dict[str, Any]]:
        return State("start", seed or 0), {}

    def step(self, state: State, action: Any) -> StepResult:
        rng = random.Random(state.hidden)
        seen = f"{state.observation}/{rng.randrange(10**9)}"
        return StepResult(State(seen, rng.randrange(10**9), replace(state.metadata, step=state.metadata.step + 1)))

    def reseed(self, state: State, seed: int) -> State:
        return replace(state, hidden=seed)


class AsyncTrail(Trail):
    """The same with `async def` methods; each really waits for its event loop."""

    spec = replace(Trail.spec, name="async trail")

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Options = None
    ) -> tuple[State, dict[str, Any]]:
        await self.breathe()
        return super().reset(seed=seed, options=options)

    async def step(self, state: State, action: Any) -> StepResult:  # type: ignore[override]
        await self.breathe()
        return super().step(state, action)

    async def length(self) -> int:  # type: ignore[override]
        await self.breathe()
        return super().length()

    async def breathe(self) -> None:
        import asyncio

        await asyncio.sleep(0)


class AsyncPureTrail(PureTrail):
    """Pure, with `async def` methods of asyncio."""

    spec = replace(PureTrail.spec, name="async pure trail")

    async def reset(  # type: ignore[override]
        self, *, seed: int | None = None, options: Options = None
    ) -> tuple[State, dict[str, Any]]:
        await self.breathe()
        return super().reset(seed=seed, options=options)

    async def step(self, state: State, action: Any) -> StepResult:  # type: ignore[override]
        await self.breathe()
        return super().step(state, action)

    async def breathe(self) -> None:
        import asyncio

        await asyncio.sleep(0)


class AnyLoopTrail(AsyncPureTrail):
    """Runs on whatever loop there is."""

    spec = replace(AsyncPureTrail.spec, name="any loop trail", any_loop=True)

    async def breathe(self) -> None:
        import anyio.lowlevel

        await anyio.lowlevel.checkpoint()


class Dice:
    """Draws from a generator of its own and from the global one."""

    spec = EnvironmentSpec("dice")

    def __init__(self) -> None:
        self.rng = random.Random()
        self.rolls: list[int] = []

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[State, dict[str, Any]]:
        self.rng.seed(seed)
        random.seed(seed)
        self.rolls = []
        return State(()), {}

    def step(self, state: State, action: Any) -> StepResult:
        self.rolls += [self.rng.randrange(10**9), random.randrange(10**9)]
        return StepResult(State(tuple(self.rolls), None, StateMetadata(len(self.rolls) // 2)))


class Closing(Trail):
    """Leaves a note where it is closed."""

    def __init__(self, note: str) -> None:
        super().__init__()
        self.note = note

    def close(self) -> None:
        with open(self.note, "a", encoding="utf-8") as file:
            file.write(f"closed after {len(self.way)}\n")


class GymLike:
    """Gymnasium's interface."""

    def reset(self, *, seed: int | None = None, options: Options = None) -> tuple[int, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        return 0, 0.0, False, False, {}


def modules() -> list[str]:
    return sorted(sys.modules)
