"""Give a forked copy random numbers of its own."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator
from typing import Any

from ramet.errors import CannotReseed

__all__ = ["reseed", "reseed_held", "takes_state"]

_INNER = ("env", "_env", "unwrapped")


def reseed(env: Any, seed: int, *, deterministic: bool) -> list[str]:
    """Reseed what this process draws random numbers from.

    The environment's own `reseed(seed)` serves if it has one; otherwise the generators that it and the
    environments inside it hold as attributes are reseeded in place. The global generators of `random` and NumPy
    always are.

    Returns:
        The names of what was reseeded.

    Raises:
        CannotReseed: nothing was found, and the environment does not say that it is deterministic.
    """
    own = getattr(env, "reseed", None)
    if callable(own) and takes_state(own):
        held = ["state"]  # the caller reseeds the state, with the environment's own method
    elif callable(own):
        named = own(seed)
        held = list(named) if isinstance(named, (list, tuple)) else ["env.reseed"]
    else:
        held = list(reseed_held(env, seed))
    if not held and not deterministic and not _draws_from_globals(env):
        raise CannotReseed(
            "process_fork",
            "a seed was asked for, and the environment holds no generator that could take it",
            instead="give the environment a reseed(seed) method, or say spec.deterministic if it draws nothing",
        )
    return [*held, *_reseed_globals(seed)]


def _draws_from_globals(env: Any) -> bool:
    """Whether the code of the environment's classes, or of their modules, mentions `random` at all."""
    for _, holder in _holders(env):
        for cls in type(holder).__mro__[:-1]:
            module = vars(sys.modules.get(cls.__module__, cls))
            if random in module.values() or any(_mentions_random(f) for f in (*vars(cls).values(), *module.values())):
                return True
    return False


def _mentions_random(thing: Any) -> bool:
    code = getattr(getattr(thing, "__wrapped__", thing), "__code__", None)
    return code is not None and "random" in getattr(code, "co_names", ())


def takes_state(method: Any) -> bool:
    """Whether it is the pure form, `reseed(state, seed)`."""
    try:
        return len(inspect.signature(method).parameters) >= 2
    except (TypeError, ValueError):
        return False


def _reseed_globals(seed: int) -> Iterator[str]:
    random.seed(seed)
    yield "random"
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed(seed % 2**32)
        yield "numpy.random"


def reseed_held(env: Any, seed: int) -> Iterator[str]:
    """Reseed the generators that the environment, or one inside it, holds as attributes; gives their names."""
    done: set[int] = set()
    for path, holder in _holders(env):
        for name, value in list(getattr(holder, "__dict__", {}).items()):
            if id(value) not in done and _reseed_generator(value, seed + len(done)):
                done.add(id(value))
                yield f"{path}.{name}"


def _holders(env: Any) -> Iterator[tuple[str, Any]]:
    """The environment and those that it wraps."""
    seen: set[int] = set()
    waiting = [("env", env)]
    while waiting:
        path, holder = waiting.pop(0)
        if id(holder) in seen or holder is None:
            continue
        seen.add(id(holder))
        yield path, holder
        waiting += [(f"{path}.{name}", inner) for name in _INNER if (inner := _attribute(holder, name)) is not None]


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name, None)
    except Exception:  # a property of the environment; whatever it raises is not our business
        return None


def _reseed_generator(value: Any, seed: int) -> bool:
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        value.seed(seed)
        return True
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    if isinstance(value, numpy_random.RandomState):
        value.seed(seed % 2**32)
        return True
    if isinstance(value, numpy_random.Generator):
        bits = value.bit_generator
        bits.state = type(bits)(seed).state  # in place: others may hold the same generator
        return True
    return False
