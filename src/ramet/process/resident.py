"""The environment that a process holds, with its newest state and the way that led to it."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from ramet.errors import (
    CannotBranch,
    CannotReseed,
    EncodeError,
    HostFailed,
    InvalidEnvironment,
    ReplayDiverged,
    text_of,
    type_name,
)
from ramet.process.async_env import LoopRunner
from ramet.protocol.codec import Codec, describe
from ramet.types import EnvironmentSpec, State, StateMetadata, StepResult

__all__ = ["Handles", "Resident", "check_environment", "spec_of", "unpack_recipe"]

_GYM_HINT = (
    "its step() takes an action only, as Gymnasium's does: wrap it, `from ramet.adapters.gymnasium import"
    " GymnasiumEnvironment; env = GymnasiumEnvironment(env)`"
)


class Handles:
    """The values that could not leave this process, by id."""

    def __init__(self) -> None:
        self.next_id = 1
        self._kept: dict[int, Any] = {}

    def export(self, value: object) -> tuple[int, str, str]:
        """Keep `value` and give its id, type name and text."""
        id = self.next_id
        self.next_id += 1
        self._kept[id] = value
        return (id, *describe(value))

    def resolve(self, id: int, type_name: str, text: str) -> object:
        """The value that `id` stands for.

        Raises:
            EncodeError: it was dropped, or never was.
        """
        try:
            return self._kept[id]
        except KeyError:
            raise EncodeError(f"<Handle of {type_name}: {text}>", "the branch has let this value go") from None

    def drop(self, ids: list[int]) -> None:
        """Let the values go that the agent holds no handle of any more."""
        for id in ids:
            self._kept.pop(id, None)


def spec_of(env: Any) -> EnvironmentSpec:
    """The environment's spec, or defaults from its class."""
    spec = getattr(env, "spec", None)
    if isinstance(spec, EnvironmentSpec):
        return spec
    return EnvironmentSpec(name=type(env).__name__)


def check_environment(env: Any) -> None:
    """Refuse what is no environment.

    Raises:
        InvalidEnvironment: with the wrapper to use, if there is one.
    """
    if isinstance(env, type):
        raise InvalidEnvironment(
            f"{env.__name__} is a class, not an environment: pass an instance, {env.__name__}(...),"
            f" or host the class, `host({env.__name__})`"
        )
    missing = [name for name in ("reset", "step") if not callable(getattr(env, name, None))]
    if missing:
        raise InvalidEnvironment(
            f"{type(env).__name__} is no environment: it has no {' and no '.join(f'{name}()' for name in missing)}"
        )
    name = type(env).__name__
    if not _accepts(env.step, None, None):
        why = _GYM_HINT if _accepts(env.step, None) else "its step() must take (state, action)"
        raise InvalidEnvironment(f"{name} is no ramet environment: {why}")
    if not _accepts(env.reset, seed=None, options=None):
        raise InvalidEnvironment(
            f"{name} is no ramet environment: its reset() must take the keywords seed and options,"
            " `def reset(self, *, seed=None, options=None)`"
        )


def _accepts(method: Callable[..., Any], *args: None, **kwargs: None) -> bool:
    """Whether a method can be called like that; what does not tell is given the benefit of the doubt."""
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:
        pass  # a built-in without a signature
    return True


def unpack_recipe(recipe: bytes) -> tuple[Callable[[], Any], Mapping[str, type]]:
    """The factory that `ramet.process.recipe.Recipe.pack` packed, and the classes that came along by value.

    Raises:
        HostFailed: the factory cannot be found or loaded here.
    """
    name = "its factory"
    try:
        name, payload = pickle.loads(recipe)
        factory, args, kwargs, classes = pickle.loads(payload)
        if isinstance(factory, str):
            module, _, attribute = factory.partition(":")
            factory = importlib.import_module(module)
            for part in attribute.split("."):
                factory = getattr(factory, part)
    except Exception as error:
        failure = HostFailed(name, f"{type(error).__name__}: {text_of(error)}")
        failure.add_note(traceback.format_exc())
        raise failure from None

    def build() -> Any:
        try:
            return factory(*args, **kwargs)
        except SystemExit:
            raise
        except BaseException as error:
            failure = HostFailed(name, f"the factory raised {type(error).__name__}: {text_of(error)}")
            failure.add_note(traceback.format_exc())
            raise failure from None

    return build, classes


class Resident:
    """An environment, the state that it stands at, and how it got there."""

    def __init__(self, env: Any, codec: Codec) -> None:
        check_environment(env)
        self.env = env
        self.spec = spec_of(env)
        self.pure = self.spec.pure_step
        self.codec = codec
        self.state: State | None = None
        self.instant = 0
        self.runner = LoopRunner()
        # The arguments of the last reset, then one entry for each step: the encoded action and a
        # checksum of what the agent saw of its result.
        self.reset_with: bytes = b""
        self.steps: list[tuple[bytes, int]] = []
        self.steps_before = 0  # the steps of this episode that were taken before we held the environment
        self.reset_sum = 0
        # The record keeps no value that has no form; it notes where the first was left out.
        self._record = codec.exporting(self._leave_out)
        self._place = ""
        self._left_out = ""

    def close(self) -> None:
        """Run the environment's own `close`, if it has one."""
        if callable(close := getattr(self.env, "close", None)):
            self.runner.finish(close())

    def reset(self, seed: int | None, options: Mapping[str, Any] | None) -> tuple[State, Any]:
        """Reset the environment and forget the way that led here."""
        answer = self.runner.finish(self.env.reset(seed=seed, options=options))
        if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[0], State)):
            raise InvalidEnvironment(f"reset() must return (State, info), got {_kind(answer)}")
        self.state = answer[0]
        self.instant += 1
        if not self.pure:
            self._left_out = ""
            self.reset_with = self._recorded([seed, options], "the options of its reset")
            self.reset_sum = self._sum(answer[0].observation)
            self.steps = []
            self.steps_before = 0
        return answer

    def step(self, state: State, action: Any, encoded: bytes | None = None) -> StepResult:
        """Take one step from `state`; `encoded` is the action as it came, for the record."""
        result = self.env.step(state, action)
        if type(result) is not StepResult:
            result = self.runner.finish(result)
            if not isinstance(result, StepResult):
                raise InvalidEnvironment(f"step() must return a StepResult, got {_kind(result)}")
        _check_result(result)
        if not self.pure:
            # Both before the branch moves on: they raise if the result is malformed, or has no form.
            checksum = self._sum_result(result)
            if encoded is None:
                encoded = self._recorded(action, f"the action of step {len(self.steps) + 1}")
            self.state = result.next_state
            self.steps.append((encoded, checksum))
        self.instant += 1
        return result

    def current(self) -> State:
        """The newest state.

        Raises:
            InvalidEnvironment: there was no reset yet.
        """
        if self.state is None:
            raise InvalidEnvironment("the environment was not reset yet: call reset() first")
        return self.state

    def reseed(self, state: State, seed: int) -> tuple[State, list[str]]:
        """The state of a pure environment with other random numbers ahead.

        Raises:
            CannotReseed: the environment has no `reseed(state, seed)`.
        """
        if callable(own := getattr(self.env, "reseed", None)):
            return self.runner.finish(own(state, seed)), ["state"]
        if self.spec.deterministic:
            return state, []
        raise CannotReseed(
            "direct",
            "a seed was asked for, and the environment has no reseed(state, seed)",
            instead="add that method, or use strategy='process_fork'",
        )

    # -- the way that led here -------------------------------------------------------------------

    def history(self) -> bytes:
        """The reset and the steps that led to the newest state, encoded."""
        if self.pure:
            raise CannotBranch(
                "action_replay",
                "a pure environment keeps no record, since any of its states can be stepped at any time",
                instead="use strategy='direct', or pass actions=(...) to checkpoint()",
            )
        if not self.reset_with:
            raise CannotBranch("action_replay", "the environment was not reset here, so there is nothing to replay")
        if self._left_out:
            raise CannotBranch(
                "action_replay",
                f"{self._left_out} holds a value that no other process has",
                instead="use strategy='process_fork', or pass actions that can be encoded",
            )
        return self.codec.encode([self.reset_with, self.reset_sum, [list(step) for step in self.steps]])

    def replay(self, history: bytes, expected: bytes | None) -> State:
        """Reset and step as recorded; a checksum of `None` or 0 is not compared.

        Raises:
            ReplayDiverged: the environment went another way.
        """
        reset_with, reset_sum, steps = self.codec.decode(history)
        seed, options = self.codec.decode(reset_with)
        state, _ = self.reset(seed, options)
        self._compare(0, reset_sum, self._sum(state.observation), state)
        for number, (encoded, checksum) in enumerate(steps, 1):
            result = self.step(state, self.codec.decode(encoded), encoded)
            state = result.next_state
            self._compare(number, checksum, self._sum_result(result), state)
        if expected is not None and self._observed(state.observation) != expected:
            wanted = describe(self.codec.decode(expected))[1]
            raise ReplayDiverged(len(steps), wanted, describe(state.observation)[1])
        self.state = state
        return state

    def _recorded(self, value: Any, where: str) -> bytes:
        self._place = where
        return self._record.encode(value)

    def _leave_out(self, value: object) -> tuple[int, str, str]:
        self._left_out = self._left_out or self._place
        return (0, *describe(value))

    def _compare(self, step: int, expected: int, got: int, state: State) -> None:
        if expected and expected != got:
            seen = describe(state.observation)[1]
            raise ReplayDiverged(step, f"checksum {expected:08x}", f"{got:08x} (observation {seen})")

    def _sum(self, *seen: Any) -> int:
        return zlib.crc32(self._observed(seen[0] if len(seen) == 1 else list(seen)))

    def _sum_result(self, result: StepResult) -> int:
        return self._sum(result.next_state.observation, result.reward, result.terminated, result.truncated)

    def _observed(self, value: Any) -> bytes:
        return observed(value)

    # -- states on the wire ----------------------------------------------------------------------

    def wire_state(self, state: State) -> list[Any]:
        """`state` as it crosses, at the newest instant."""
        meta = state.metadata
        hidden = self._wire_hidden(state.hidden) if self.pure else None
        return [
            self.instant,
            state.observation,
            meta.step,
            meta.episode_id,
            meta.is_terminal,
            meta.info,
            hidden,
        ]

    def state_from(self, wire: list[Any]) -> State:
        """The state of a pure environment that the agent sent whole."""
        observation, step, episode_id, is_terminal, info, hidden = wire
        if isinstance(hidden, bytes):
            hidden = self.codec.decode(hidden)
        return State(observation, hidden, StateMetadata(step, episode_id, is_terminal, info))

    def _wire_hidden(self, hidden: Any) -> Any:
        if hidden is None:
            return _NIL
        try:
            return observed(hidden, strict=True)
        except EncodeError:
            return hidden  # the codec makes it one handle, instead of a value with holes


def observed(value: Any, *, strict: bool = False) -> bytes:
    """`value` as bytes that are equal in two processes where it is; what has no form counts by its type."""
    return (_STRICT if strict else _LOOSE).encode(value)


_STRICT = Codec()
_LOOSE = Codec(export=lambda value: (0, describe(value)[0], ""))
_NIL = _STRICT.encode(None)


def _check_result(result: StepResult) -> None:
    try:
        if not isinstance(result.next_state, State):
            raise TypeError(f"its next_state is a {type(result.next_state).__name__}")
        float(result.reward), bool(result.terminated), bool(result.truncated)
    except Exception as error:
        raise InvalidEnvironment(
            f"step() must return a StepResult of a State, a number and two bools: {text_of(error)}"
        ) from None


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        if len(value) == 5:
            return f"a tuple of 5; {_GYM_HINT}"
        if len(value) == 2 and not isinstance(value[0], State):
            return f"a {type(value[0]).__name__} in the place of the State: return State(observation), info"
        return f"a tuple of {len(value)}"
    return f"{type(value).__name__}"


def environment_failure(method: str) -> list[Any]:
    """The exception in flight as strings: method, type, text, traceback."""
    kind, error, tb = sys.exc_info()
    assert error is not None
    try:
        trace = "".join(traceback.format_exception(kind, error, tb))
    except Exception:
        trace = "".join(traceback.format_tb(tb))
    return [method, type_name(error), text_of(error), trace]
