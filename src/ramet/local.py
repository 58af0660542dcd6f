"""The async proxy of an environment that lives in the agent's own process."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, overload

import anyio
import anyio.lowlevel

from ramet.errors import (
    BranchBusy,
    BranchClosed,
    CannotBranch,
    EnvironmentFailed,
    ForeignState,
    InvalidEnvironment,
    RametError,
    StaleState,
    text_of,
    type_name,
)
from ramet.lineage import Node
from ramet.process.copies import Source
from ramet.process.link import Link
from ramet.protocol.flows import Ref
from ramet.types import EnvironmentSpec, Hidden, Seed, State, StepResult, check_state

__all__ = ["LocalEnvironment"]

_YIELD_EVERY = 0.005
_numbers = itertools.count(1)


class LocalEnvironment:
    """An environment in this process, behind the same async methods as one in a process of its own.

    A synchronous step runs on the event loop's thread and blocks it; use `host()` where that matters. Every call is
    a cancellation checkpoint before it begins; a synchronous one is never interrupted in the middle.

    Attributes:
        spec: what the environment says of itself.
        name: its name for people.
        reseeded: what was reseeded when it was made.
        source: what copies of it are made of.
        node: its place in the lineage.
    """

    def __init__(
        self,
        source: Source,
        *,
        name: str,
        node: Node,
        reseeded: tuple[str, ...] = (),
        state: State | None = None,
        owned: bool = False,
        leave: Callable[[LocalEnvironment], None] | None = None,
    ) -> None:
        self.spec: EnvironmentSpec = source.spec
        self.name = name
        self.reseeded = reseeded
        self.node = node
        self.source = source
        self._env = source.env
        self._pure = source.spec.pure_step
        self._owned = owned  # a copy; states that did not pass through it are refused
        self._leave = leave
        self._token = -next(_numbers)
        self._instant = 0
        self._steps = 0 if state is None else state.metadata.step
        self._origin: Ref | None = state._ref if state is not None else None
        self._state = state if state is None or self._pure else self._ours(state)
        self._yielded = 0.0
        self._closed = False
        self._out = 0  # calls under way

    @property
    def unwrapped(self) -> Any:
        """The very object."""
        return self._env

    @property
    def pid(self) -> int:
        """0: it has no process of its own."""
        return 0

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        """Reset the environment.

        Raises:
            EnvironmentFailed: its `reset` raised.
        """
        answer = await self._run("reset", self._env.reset, (), {"seed": seed, "options": options})
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], State)):
            raise InvalidEnvironment(f"reset() must return (State, info), got {type(answer).__name__}")
        self._instant += 1
        self._steps = 0
        self._state = self._ours(answer[0])
        return self._state, answer[1]

    async def step(self, state: State, action: Any) -> StepResult:
        """Take one step; see `Environment.step`.

        Raises:
            EnvironmentFailed: its `step` raised; the environment stays usable.
            BranchBusy: it is not pure, and another call is under way.
            StaleState: it is not pure, and has moved past `state`.
            ForeignState: `state` belongs to another branch.
        """
        self.check(state)
        result = await self._run("step", self._env.step, (state, action), {})
        if not isinstance(result, StepResult):
            raise InvalidEnvironment(f"step() must return a StepResult, got {type(result).__name__}")
        self._instant += 1
        self._steps += 1
        if self._pure:
            self._state = result.next_state
            return result
        self._state = self._ours(result.next_state)
        return StepResult(self._state, result.reward, result.rewards, result.terminated, result.truncated, result.info)

    async def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another public method of the environment, or read a public attribute.

        Raises:
            EnvironmentFailed: it raised, or there is no such method.
        """
        if name.startswith("_"):
            raise InvalidEnvironment(f"{name!r} is private: only public methods can be called from outside")
        return await self._run(name, _member, (self._env, name, args, kwargs), {})

    async def hidden(self, state: State) -> Any:
        """The hidden part of `state`, which is here already.

        Raises:
            ForeignState: it stayed in another environment's process.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if state.hidden is Hidden.IN_BRANCH:
            raise ForeignState(self.name, state._ref.owner if state._ref is not None else "another branch")
        return state.hidden

    async def current(self) -> State:
        """The newest state that was seen.

        Raises:
            InvalidEnvironment: the environment was not reset here yet.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._state is None:
            raise InvalidEnvironment("the environment was not reset yet: call reset() first")
        return self._state

    @overload
    async def fork(self, n: None = None, *, seed: Seed = None) -> tuple[LocalEnvironment, State]: ...

    @overload
    async def fork(self, n: int, *, seed: Seed = None) -> list[tuple[LocalEnvironment, State]]: ...

    async def fork(
        self, n: int | None = None, *, seed: Seed = None
    ) -> tuple[LocalEnvironment, State] | list[tuple[LocalEnvironment, State]]:
        """Live copies: of a pure environment itself with its newest state.

        Raises:
            CannotBranch: the environment is not pure (use a manager), or was not reset here.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        if not self._pure:
            raise CannotBranch(
                "direct",
                "an object in the agent's own process cannot be forked alone",
                instead="use mgr.checkpoint() and mgr.branch(), or host(factory)",
            )
        if self._state is None:
            raise CannotBranch("direct", "no state was seen yet", instead="call reset() first")
        if seed is not None:
            raise CannotBranch("direct", "fork() cannot reseed here", instead="use mgr.branch(name, seed=...)")
        if n is None:
            return self, self._state
        return [(self, self._state) for _ in range(n)]

    async def aclose(self) -> None:
        """Let go of the copy. The object that was passed to a manager is not closed."""
        self.take_links()
        await anyio.lowlevel.checkpoint_if_cancelled()

    def take_links(self) -> list[Link]:
        """Let go of the copy; it has no connections."""
        if self._owned:
            self._closed = True
            self.node.end()
        if self._leave is not None:
            self._leave(self)
        return []

    def newest_state(self) -> State:
        """The newest state that was seen."""
        return State() if self._state is None else self._state

    async def __aenter__(self) -> LocalEnvironment:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"<{self.name}: {self.spec.name} in this process>"

    async def _run(self, method: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._closed:
            raise BranchClosed(self.name)
        self._check_free()
        self._out += 1
        try:
            return await self._call(method, function, args, kwargs)
        finally:
            self._out -= 1

    async def _call(self, method: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        now = time.monotonic()
        if now - self._yielded > _YIELD_EVERY:  # let the others run now and then, and a cancellation come through
            self._yielded = now
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            value = function(*args, **kwargs)
            return await value if inspect.isawaitable(value) else value
        except RametError:
            raise
        except Exception as error:
            raise EnvironmentFailed(self.name, method, type_name=type_name(error), text=text_of(error)) from error

    def check(self, state: State, *, advice: str = "") -> None:
        """Whether the environment stands at `state`; a pure one stands anywhere.

        Raises:
            BranchBusy: a call is under way in it, so it stands nowhere.
            ForeignState: `state` belongs to another branch.
            StaleState: the environment has moved past it.
        """
        if self._pure:
            return
        self._check_free()
        check_state(state)
        ref = state._ref
        if ref is None:
            if self._owned:
                raise ForeignState(self.name, "no branch", advice=f"use the state that came with {self.name}")
        elif ref == self._origin and self._instant == 0:
            return
        elif ref.token != self._token:
            raise ForeignState(self.name, ref.owner, advice=advice.format(owner=ref.owner))
        elif ref.instant != self._instant:
            raise StaleState(self.name, at=self._steps, state=self._steps - (self._instant - ref.instant))

    def _check_free(self) -> None:
        if self._out and not self._pure:
            raise BranchBusy(self.name)

    def _ours(self, state: State) -> State:
        ref = Ref(self._token, self._instant, self.name)
        return State(state.observation, state.hidden, state.metadata, ref)


def _member(env: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    member = getattr(env, name)
    return member(*args, **kwargs) if callable(member) else member
