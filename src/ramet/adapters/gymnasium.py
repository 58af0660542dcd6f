"""Gymnasium environments, by id or as objects.

    async with host("ramet.adapters.gymnasium:make_environment", args=("LunarLander-v3",)) as env: ...

`make_environment` makes one from an id of the registry and `GymnasiumEnvironment` wraps one that is there;
both keep their state inside, so copies of them are forks. A `FuncEnv`, whose functions take the state as an
argument, becomes a `FunctionalEnvironment`, which is pure: its branches cost nothing.

What Gymnasium leaves open and this module decides:

* An action outside of the action space is a `ValueError`, unless `check_actions=False`. A text is looked up
  in `actions=` and otherwise read as JSON, or refused with what is allowed.
* Generators that Gymnasium would seed from the system at their first use are seeded at the reset, since two
  copies would seed them differently.
* `reset(seed=...)` of NetHack (`nle`) seeds the game too, which NLE's own does not, and the game's habit of
  reseeding itself is turned off; see `ramet.adapters._nethack`.

Render in a branch rather than in what branches are made of: rendering starts a thread of SDL's, and a process
with threads is slower to fork.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from ramet.errors import InvalidEnvironment
from ramet.types import EnvironmentSpec, State, StateMetadata, StepResult

try:
    import gymnasium
    import numpy as np
    from gymnasium.experimental.functional import FuncEnv

    from ramet.adapters._actions import ActionReader
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("gymnasium", "numpy"):
        raise
    raise ModuleNotFoundError('gymnasium is not installed: pip install "ramet[gymnasium]"', name=error.name) from None

if TYPE_CHECKING:
    from ramet.adapters._nethack import NetHack

__all__ = ["FunctionalEnvironment", "FunctionalState", "GymnasiumEnvironment", "make_environment"]


_LARGEST_SEED = 2**63


def make_environment(
    id: str | gymnasium.envs.registration.EnvSpec | type[FuncEnv[Any, Any, Any, Any, Any, Any, Any]] | Any,
    *,
    actions: Mapping[str, Any] | Any = None,
    check_actions: bool = True,
    pure_step: bool | None = None,
    **options: Any,
) -> GymnasiumEnvironment | FunctionalEnvironment:
    """Make an environment.

    Args:
        id: an id such as `"CartPole-v1"`, or `"module:id"` where importing the module registers it; or
            Gymnasium's own spec of one, a `FuncEnv` (the class or an instance), or an environment to wrap.
        actions: texts that stand for actions, such as `{"move left": 0}`; what is no mapping goes to
            `gymnasium.make`, since NetHack has an option of that name.
        check_actions: refuse actions outside of the action space.
        pure_step: true for a `FuncEnv`, which is what it is by itself.
        options: for `gymnasium.make`, such as `render_mode="rgb_array"`; for a `FuncEnv` its own options, and
            `max_steps` if its episodes have a limit.

    Raises:
        InvalidEnvironment: it cannot be an environment here; the message says why.
    """
    if actions is not None and not isinstance(actions, Mapping):
        options["actions"], actions = actions, None
    reading: dict[str, Any] = {"actions": actions, "check_actions": check_actions}
    if _is_functional(id):
        if pure_step is False:
            raise InvalidEnvironment("a FuncEnv is pure by itself: leave pure_step out")
        return _make_functional(id, reading, options)
    if pure_step:
        raise InvalidEnvironment(
            f"{getattr(id, 'id', id)} keeps its state inside itself, so its step() cannot be pure: leave"
            " pure_step out and have it forked, or write it as a gymnasium.experimental.functional.FuncEnv"
        )
    if isinstance(id, str | gymnasium.envs.registration.EnvSpec):
        _refuse_window(options.get("render_mode"))
        return GymnasiumEnvironment(gymnasium.make(id, **options), **reading)
    if options:
        raise InvalidEnvironment(f"{_options(options)} cannot apply to an environment that was made already")
    return GymnasiumEnvironment(id, **reading)


def _is_functional(target: Any) -> bool:
    return isinstance(target, FuncEnv) or (isinstance(target, type) and issubclass(target, FuncEnv))


def _make_functional(target: Any, reading: Mapping[str, Any], options: dict[str, Any]) -> FunctionalEnvironment:
    max_steps = options.pop("max_steps", None)
    if isinstance(target, type):
        target = target(options=options)
    elif options:
        raise InvalidEnvironment(f"{_options(options)} cannot apply to a FuncEnv that was made already")
    return FunctionalEnvironment(target, max_steps=max_steps, **reading)


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}=" for name in options)


# -- environments with their state inside --------------------------------------------------------


class GymnasiumEnvironment:
    """A `gymnasium.Env` as an environment of ramet.

    What is not defined here is looked up in the wrapped environment and its wrappers: `call("render")`,
    `call("action_masks")`, `call("get_wrapper_attr", name)`.

    Args:
        env: the environment.
        actions: texts that stand for actions.
        check_actions: refuse actions outside of the action space.

    Attributes:
        env: the environment.
        spec: what it says of itself.

    Raises:
        InvalidEnvironment: it is a vector environment, draws in a window, or is no `gymnasium.Env`.
    """

    def __init__(self, env: Any, *, actions: Mapping[str, Any] | None = None, check_actions: bool = True) -> None:
        _refuse(env)
        self.env: gymnasium.Env[Any, Any] = env
        self.spec = _spec_of(env)
        self._read = ActionReader(env.action_space, name=self.spec.name, texts=actions or {}, check=check_actions)
        self._episodes = 0
        self._steps = 0
        self._nethack: NetHack | None = None
        if is_nethack(env):
            from ramet.adapters._nethack import NetHack

            self._nethack = NetHack(env.unwrapped)

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        """Start an episode."""
        if self._nethack is not None:
            self._nethack.before_reset(seed)
        observation, info = self.env.reset(seed=seed, options=None if options is None else dict(options))
        if self._nethack is not None:
            self._nethack.after_reset()
            observation = self._nethack.own(observation)
        self._seed_lazy_generators()
        self._episodes += 1
        self._steps = 0
        return State(observation, metadata=self._metadata(is_terminal=False)), info

    def step(self, state: State, action: Any) -> StepResult:
        """Take one step.

        Args:
            state: where it stands; the environment itself knows better.
            action: what Gymnasium takes, a text, or an `Action` with a text or a payload.

        Raises:
            ValueError: the action is not understood, or not in the action space.
        """
        value = self._read(action)
        if self._nethack is not None:
            self._nethack.before_step()
        observation, reward, terminated, truncated, info = self.env.step(value)
        if self._nethack is not None:
            observation = self._nethack.own(observation)
        self._steps += 1
        metadata = self._metadata(is_terminal=bool(terminated or truncated))
        return StepResult(
            State(observation, metadata=metadata),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            info=info,
        )

    def reseed(self, seed: int) -> list[str]:
        """Reseed every generator that the environment, its wrappers and its spaces hold, and NetHack's own.

        Returns:
            The names of what was reseeded.
        """
        seed %= _LARGEST_SEED
        done: dict[int, str] = {}
        for path, holder in _layers(self.env):
            for name, value in _generators(holder):
                if id(value) not in done and _reseed(value, seed + len(done)):
                    done[id(value)] = f"{path}.{name}"
        named = list(done.values())
        if self._nethack is not None:
            self._nethack.reseed(seed)
            named.append("nethack")
        return named

    def close(self) -> None:
        """Close the environment."""
        self.env.close()  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        # Private names stay private: copying and pickling ask for some before there is an `env`. A `clone` of
        # the game's own would return the game without this wrapper.
        if name.startswith("_") or name in ("env", "clone"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.env.get_wrapper_attr(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> GymnasiumEnvironment:
        for _, layer in _layers(self.env):
            if _copies_to_new(layer):
                raise TypeError(
                    f"a deep copy of {type(layer).__name__} is a new one that was never reset"
                    " (it is an EzPickle, which copies its arguments)"
                )
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __repr__(self) -> str:
        return f"<GymnasiumEnvironment {self.spec.name}>"

    def _metadata(self, *, is_terminal: bool) -> StateMetadata:
        return StateMetadata(self._steps, str(self._episodes), is_terminal)

    def _seed_lazy_generators(self) -> None:
        _ = self.env.unwrapped.np_random
        for space in (self.env.action_space, self.env.observation_space):
            _ = space.np_random


def is_nethack(env: Any) -> bool:
    """Whether it is NLE's, whose generator is in C."""
    game = getattr(getattr(env, "unwrapped", None), "nethack", None)
    return callable(getattr(game, "set_current_seeds", None))


def _refuse(env: Any) -> None:
    if isinstance(env, gymnasium.vector.VectorEnv):
        raise InvalidEnvironment(
            "a vector environment steps many games as one, and a branch is one game: make a single one, fork"
            " it, and step the branches together with mgr.step_all(pairs, actions)"
        )
    if _is_functional(env):
        raise InvalidEnvironment("this is a FuncEnv: use make_environment(...) or FunctionalEnvironment(...)")
    if not isinstance(env, gymnasium.Env):
        hint = ": use make_environment(id) for an id" if isinstance(env, str) else ""
        raise InvalidEnvironment(f"this adapter wraps a gymnasium.Env, got {type(env).__name__}{hint}")
    if not is_nethack(env):  # its "human" is text, and its default
        _refuse_window(env.render_mode)


def _refuse_window(render_mode: Any) -> None:
    if render_mode == "human":
        raise InvalidEnvironment(
            "render_mode='human' draws in a window, and the copies of a process cannot share one: use"
            " render_mode='rgb_array' and call('render'), which gives the picture as an array"
        )


def _spec_of(env: gymnasium.Env[Any, Any]) -> EnvironmentSpec:
    theirs = env.spec
    max_steps = theirs.max_episode_steps if theirs is not None else None
    if max_steps is None and is_nethack(env):
        max_steps = getattr(env.unwrapped, "_max_episode_steps", None)
    return EnvironmentSpec(
        name=theirs.id if theirs is not None else type(env.unwrapped).__name__,
        adapter="gymnasium",
        deterministic=theirs is not None and not theirs.nondeterministic,
        supports_seed=True,
        max_steps=max_steps,
        metadata={
            "action_space": repr(env.action_space),
            "observation_space": repr(env.observation_space),
            "render_mode": env.render_mode,
            "reward_threshold": theirs.reward_threshold if theirs is not None else None,
        },
    )


def _layers(env: Any) -> Iterator[tuple[str, Any]]:
    """The environment with its wrappers, outermost first."""
    path = "env"
    while isinstance(env, gymnasium.Wrapper):
        yield path, env
        path, env = f"{path}.env", env.env
    yield "env.unwrapped", env


def _generators(holder: Any) -> Iterator[tuple[str, Any]]:
    for name, value in list(vars(holder).items()):
        yield name.removeprefix("_") if name == "_np_random" else name, value
    for name in ("action_space", "observation_space"):
        yield name, getattr(holder, name, None)


def _reseed(value: Any, seed: int) -> bool:
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        bits.state = type(bits)(seed).state  # in place: others may hold the same generator
        return True
    if isinstance(value, np.random.RandomState):
        seed %= 2**32
    elif isinstance(value, random.SystemRandom) or not isinstance(value, random.Random | gymnasium.Space):
        return False
    value.seed(seed)
    return True


def _copies_to_new(layer: Any) -> bool:
    """Whether copying it makes a new one from its constructor's arguments."""
    theirs = gymnasium.utils.EzPickle
    return (
        isinstance(layer, theirs)
        and type(layer).__setstate__ is theirs.__setstate__
        and not hasattr(layer, "__deepcopy__")
    )


# -- environments with their state outside -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionalState:
    """The hidden part of a `FunctionalEnvironment`'s state.

    Attributes:
        state: the `FuncEnv`'s own state.
        rng: the state of the NumPy generator that its functions draw from.
    """

    state: Any
    rng: Mapping[str, Any]


class FunctionalEnvironment:
    """A `FuncEnv` as a pure environment: any state can be stepped at any time, and branches cost nothing.

    Its functions get a `numpy.random.Generator` as `rng`, and must not change the state that they are given.

    Args:
        env: the `FuncEnv`.
        max_steps: the step at which an episode is truncated.
        actions: texts that stand for actions.
        check_actions: refuse actions outside of the action space.

    Attributes:
        env: the `FuncEnv`.
        spec: what it says of itself.
    """

    def __init__(
        self,
        env: FuncEnv[Any, Any, Any, Any, Any, Any, Any],
        *,
        max_steps: int | None = None,
        actions: Mapping[str, Any] | None = None,
        check_actions: bool = True,
    ) -> None:
        self.env = env
        self.spec = EnvironmentSpec(
            name=type(env).__name__,
            adapter="gymnasium",
            pure_step=True,
            deterministic=True,
            supports_seed=True,
            max_steps=max_steps,
            metadata={
                "action_space": repr(env.action_space),
                "observation_space": repr(env.observation_space),
            },
        )
        self._read = ActionReader(env.action_space, name=self.spec.name, texts=actions or {}, check=check_actions)
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        """Draw a first state."""
        rng = np.random.default_rng(seed)
        state = self.env.initial(rng)
        observation = self.env.observation(state, rng)
        hidden = FunctionalState(state, rng.bit_generator.state)
        return State(observation, hidden), self.env.state_info(state)

    def step(self, state: State, action: Any) -> StepResult:
        """Take one step from any state.

        Raises:
            ValueError: the action is not understood, or not in the action space.
        """
        value = self._read(action)
        hidden = cast(FunctionalState, state.hidden)
        rng = self._rng  # one object for all, set before each use: making one takes longer than most steps
        rng.bit_generator.state = hidden.rng
        env = self.env
        after = env.transition(hidden.state, value, rng)
        observation = env.observation(after, rng)
        reward = float(env.reward(hidden.state, value, after, rng))
        terminated = bool(env.terminal(after, rng))
        step = state.metadata.step + 1
        truncated = self.spec.max_steps is not None and step >= self.spec.max_steps
        return StepResult(
            State(
                observation,
                FunctionalState(after, rng.bit_generator.state),
                replace(state.metadata, step=step, is_terminal=terminated or truncated),
            ),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            info=env.transition_info(hidden.state, value, after),
        )

    def reseed(self, state: State, seed: int) -> State:
        """The same state with other random numbers ahead."""
        hidden = cast(FunctionalState, state.hidden)
        return replace(state, hidden=replace(hidden, rng=np.random.default_rng(seed).bit_generator.state))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("env", "clone"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)

    def __repr__(self) -> str:
        return f"<FunctionalEnvironment {self.spec.name}>"
