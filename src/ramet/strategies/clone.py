"""`clone`: the environment copies itself, in the agent's own process."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ramet.errors import CannotBranch, CannotReseed, text_of
from ramet.process.copies import Copy, Source
from ramet.process.link import Plan
from ramet.process.reseed import reseed_held
from ramet.strategies.copies import Checkpoint
from ramet.types import State

__all__ = ["Clone"]


class Clone:
    """A checkpoint is one copy that nobody steps; a branch is a copy of that."""

    name = "clone"

    def checkpoint(
        self,
        name: str,
        source: Source,
        state: State,
        *,
        actions: Sequence[Any] | None,
        reset_options: Mapping[str, Any] | None,
    ) -> Plan[Checkpoint]:
        """Copy the environment once, so that the original may go on.

        Raises:
            CannotBranch: the copy failed.
        """
        yield from ()
        env, state = _copied(source.env, state)
        return Checkpoint(replace(source, env=env), state)

    def branch(self, checkpoint: Checkpoint, names: Sequence[str], seeds: Sequence[int | None]) -> Plan[list[Copy]]:
        """Copy the kept copy once for each name."""
        yield from ()
        copies = []
        for seed in seeds:
            env, state = _copied(checkpoint.source.env, checkpoint.state)
            reseeded: tuple[str, ...] = ()
            if seed is not None:
                state, reseeded = _reseeded(env, state, seed, deterministic=checkpoint.source.spec.deterministic)
            copies.append(Copy(replace(checkpoint.source, env=env), state, reseeded, seed=seed))
        return copies

    def release(self, checkpoint: Checkpoint) -> Plan[None]:
        """The collector takes it."""
        yield from ()

    def close(self) -> Plan[None]:
        """Nothing is held."""
        yield from ()


def _copied(env: Any, state: State) -> tuple[Any, State]:
    try:
        if callable(clone := getattr(env, "clone", None)):
            return clone(), state
        # One memo, so that what the state and the environment share they share in the copy too.
        return copy.deepcopy((env, state))
    except Exception as error:
        raise CannotBranch(
            "clone",
            f"the environment cannot be copied ({type(error).__name__}: {text_of(error)})",
            instead="use strategy='process_fork', which copies any process",
        ) from error


def _reseeded(env: Any, state: State, seed: int, *, deterministic: bool) -> tuple[State, tuple[str, ...]]:
    own = getattr(env, "reseed", None)
    if callable(own):
        if len(inspect.signature(own).parameters) >= 2:
            return own(state, seed), ("state",)
        own(seed)
        return state, ("env.reseed",)
    held = tuple(reseed_held(env, seed))
    if not held and not deterministic:
        raise CannotReseed(
            "clone",
            "a seed was asked for, and the copy holds no generator of its own",
            instead="add reseed(seed) to the environment, or use strategy='process_fork', for global ones",
        )
    return state, held
