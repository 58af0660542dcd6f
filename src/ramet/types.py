"""The data that travels between an agent and an environment, and the environment's own protocol.

Everything here is plain data without behaviour, imports the standard library only, pickles, and is
re-exported from `ramet`. Adapters and environments need nothing but this module and `ramet.errors`.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

__all__ = [
    "Action",
    "AsyncEnvironment",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentSpec",
    "Hidden",
    "Seed",
    "State",
    "StateMetadata",
    "StepResult",
    "StrategyName",
    "ToolCall",
]

StrategyName = Literal["direct", "clone", "process_fork", "action_replay"]
"""How copies are made, best first; see `docs/copies.md`."""

Seed = int | Literal["fresh"] | None
"""What a new branch does to its random generators: `None` keeps the exact copy, `"fresh"` reseeds
from the operating system's entropy, an integer reseeds reproducibly."""

_STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)


class Hidden(enum.Enum):
    """Stands in `State.hidden` where the hidden part stayed behind in the branch."""

    IN_BRANCH = "in the branch: await env.hidden(state)"

    def __repr__(self) -> str:
        return f"<{self.value}>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by a model.

    Attributes:
        name: the tool's name.
        arguments: the parsed arguments.
        id: the provider's id of this call, if it has one.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """What an agent does: text, tool calls, or any other value as `payload`.

    Environments decide which part they read. A plain value (`2`, `"left"`, an array) may be passed to
    `step` as it is; this class is for agents that produce text and tool calls.
    """

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    payload: Any = None

    @classmethod
    def from_text(cls, text: str) -> Action:
        """An action that is a text, such as a chat model's answer."""
        return cls(text=text)

    @classmethod
    def from_tool_call(cls, name: str, arguments: Mapping[str, Any] | None = None, *, id: str | None = None) -> Action:
        """An action that calls one tool."""
        return cls(tool_calls=(ToolCall(name, dict(arguments or {}), id),))

    @classmethod
    def from_tool_calls(cls, calls: Iterable[ToolCall], *, text: str = "") -> Action:
        """An action that calls several tools in one turn, with the text that came along."""
        return cls(text=text, tool_calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Where in an episode a state stands.

    Attributes:
        step: the number of steps since the reset.
        episode_id: a name of the episode, chosen by the environment.
        is_terminal: whether the episode is over.
        info: whatever else the environment tells about the state.
    """

    step: int = 0
    episode_id: str = ""
    is_terminal: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class State:
    """One instant of an episode, as the agent sees it.

    A state that came from a branch carries a reference to the instant that it stands for; pickling,
    copying or building one by hand keeps the observation and the metadata and loses the reference.

    Attributes:
        observation: what the agent sees.
        hidden: what the environment needs to go on and the agent does not see. A state from a branch
            holds `Hidden.IN_BRANCH` here; ask with `await env.hidden(state)`.
        metadata: step, episode and whether it is over.
    """

    observation: Any = None
    hidden: Any = None
    metadata: StateMetadata = field(default_factory=StateMetadata)
    _ref: Any = field(default=None, repr=False, compare=False)

    def __reduce__(self) -> tuple[type[State], tuple[Any, Any, StateMetadata]]:
        return State, (self.observation, self.hidden, self.metadata)


def check_state(state: object) -> None:
    """Refuse what is commonly passed in place of a state.

    Raises:
        TypeError: it is no state; the message says what to pass.
    """
    if not isinstance(state, State):
        hint = {
            "tuple": "reset() returns (state, info): unpack it",
            "StepResult": "pass result.next_state",
        }.get(type(state).__name__, "pass the state that reset, step or branch returned")
        raise TypeError(f"a State is needed, got {type(state).__name__}: {hint}")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave.

    Attributes:
        next_state: the state after the step.
        reward: the scalar reward of this step.
        rewards: the named parts of the reward, if the environment has several.
        terminated: the episode ended by the environment's own rules.
        truncated: the episode was cut off, for instance by a step limit.
        info: whatever else the environment tells about the step.
    """

    next_state: State
    reward: float = 0.0
    rewards: Mapping[str, float] = field(default_factory=dict)
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the episode is over, for either reason."""
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """What an environment says of itself; the choice of a strategy rests on it.

    Attributes:
        name: a name for people.
        adapter: the adapter that wraps it, if one does.
        pure_step: `step(state, action)` depends on nothing but its arguments and changes nothing else.
        deterministic: the same reset and the same actions give the same episode.
        supports_seed: `reset(seed=...)` fixes the episode.
        supports_task_index: `reset(options={"task_index": ...})` selects the task.
        supports_clone: the environment has a `clone()` whose copy is exact.
        state_location: `"process"` if forking the process copies the state, `"remote"` if the state
            lives behind an address.
        any_loop: an async environment that runs on asyncio and on trio.
        max_steps: the longest episode, if there is a limit.
        metadata: anything else.
    """

    name: str
    adapter: str = ""
    pure_step: bool = False
    deterministic: bool = False
    supports_seed: bool = False
    supports_task_index: bool = False
    supports_clone: bool = False
    state_location: Literal["process", "remote"] = "process"
    any_loop: bool = False
    max_steps: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """What a (synchronous) environment implements.

    Optional members, used where they exist: `spec` (an `EnvironmentSpec`), `close()`, `clone()`, and
    `reseed(seed)`, or `reseed(state, seed) -> State` if `spec.pure_step`.
    """

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        """Start an episode and return its first state and an info mapping."""
        ...

    def step(self, state: State, action: Any, /) -> StepResult:
        """Take one action in `state`."""
        ...


@runtime_checkable
class AsyncEnvironment(Protocol):
    """`Environment` with `async def` methods."""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> Awaitable[tuple[State, Mapping[str, Any]]]:
        """Start an episode and return its first state and an info mapping."""
        ...

    def step(self, state: State, action: Any, /) -> Awaitable[StepResult]:
        """Take one action in `state`."""
        ...


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """The configuration of one environment.

    Attributes:
        name: the name that a configuration file knows it by.
        adapter: the name of its adapter.
        branching_strategy: the strategy to use, or `None` to choose the best one.
        options: keyword arguments of the adapter's `make_environment`.
        reset: keyword arguments of `reset`.
        limits: keyword options of the host and the manager, such as `step_timeout`.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: the strategy is not one of the four.
    """

    name: str
    adapter: str = ""
    branching_strategy: StrategyName | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    reset: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in ("name", "adapter"):
            if not isinstance(getattr(self, text), str):
                raise TypeError(f"{text} must be a string, got {getattr(self, text)!r}")
        for mapping in ("options", "reset", "limits"):
            if not isinstance(getattr(self, mapping), Mapping):
                raise TypeError(f"{mapping} must be a mapping, got {getattr(self, mapping)!r}")
        if self.branching_strategy is not None and self.branching_strategy not in _STRATEGIES:
            raise ValueError(
                f"branching_strategy must be one of {', '.join(_STRATEGIES)} or None, got {self.branching_strategy!r}"
            )
