"""`direct`: the environment is pure, so every branch is the same object with another state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ramet.errors import CannotReseed
from ramet.process.copies import Copy, Source
from ramet.process.link import Plan, Talk
from ramet.strategies.copies import Checkpoint
from ramet.types import State

__all__ = ["Direct"]


class Direct:
    """Costs nothing: a branch is the state."""

    name = "direct"

    def checkpoint(
        self,
        name: str,
        source: Source,
        state: State,
        *,
        actions: Sequence[Any] | None,
        reset_options: Mapping[str, Any] | None,
    ) -> Plan[Checkpoint]:
        """Keep the state."""
        if source.link is not None:
            source.link.shared = True
        yield from ()
        return Checkpoint(source, state)

    def branch(self, checkpoint: Checkpoint, names: Sequence[str], seeds: Sequence[int | None]) -> Plan[list[Copy]]:
        """Give the state out again, reseeded by the environment's own `reseed(state, seed)` if asked for."""
        copies = []
        for seed in seeds:
            state = checkpoint.state
            reseeded: tuple[str, ...] = ()
            if seed is not None:
                state, reseeded = yield from _reseeded(checkpoint.source, state, seed)
            copies.append(Copy(checkpoint.source, state, reseeded, shared=True, seed=seed))
        return copies

    def release(self, checkpoint: Checkpoint) -> Plan[None]:
        """Nothing is held."""
        yield from ()

    def close(self) -> Plan[None]:
        """Nothing is held."""
        yield from ()


def _reseeded(source: Source, state: State, seed: int) -> Plan[tuple[State, tuple[str, ...]]]:
    if source.link is not None:
        state, named = yield Talk(source.link, source.link.peer.reseed(state, seed), source.link.tree.step_timeout)
        return state, tuple(named)
    if callable(own := getattr(source.env, "reseed", None)):
        return own(state, seed), ("state",)
    if source.spec.deterministic:
        return state, ()
    raise CannotReseed(
        "direct",
        "a seed was asked for, and the environment has no reseed(state, seed)",
        instead="add that method, or use strategy='process_fork', which reseeds the generators of a process",
    )
