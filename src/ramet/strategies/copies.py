"""What a strategy is, and what it keeps of an instant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ramet.process.copies import Copy, Source
from ramet.process.link import Plan
from ramet.types import State

__all__ = ["Checkpoint", "Strategy"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A named instant.

    Attributes:
        source: where it was taken from, or the frozen process that stands for it.
        state: the state at that instant.
        recipe: what a replay needs: the encoded history and the expected observation.
    """

    source: Source
    state: State
    recipe: tuple[bytes, bytes | None] | None = None


class Strategy(Protocol):
    """One way of making copies."""

    name: str

    def checkpoint(
        self,
        name: str,
        source: Source,
        state: State,
        *,
        actions: Sequence[Any] | None,
        reset_options: Mapping[str, Any] | None,
    ) -> Plan[Checkpoint]:
        """Keep an instant."""
        ...

    def branch(self, checkpoint: Checkpoint, names: Sequence[str], seeds: Sequence[int | None]) -> Plan[list[Copy]]:
        """Make one copy for each name; all of them or none."""
        ...

    def release(self, checkpoint: Checkpoint) -> Plan[None]:
        """Let go of an instant (its copies are ended by the caller)."""
        ...

    def close(self) -> Plan[None]:
        """Let go of what all checkpoints share."""
        ...
