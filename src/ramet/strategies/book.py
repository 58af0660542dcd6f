"""The bookkeeping of both managers, without I/O: names, checkpoints, their branches, who ends what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ramet.errors import BranchClosed, ForeignState, UnknownCheckpoint
from ramet.lineage import Node
from ramet.process.copies import Copy, Source
from ramet.process.link import Link, Plan
from ramet.process.plans import draw_seeds, end
from ramet.strategies.copies import Checkpoint, Strategy
from ramet.types import Seed, State

__all__ = ["Book", "Entry"]


@dataclass(eq=False, slots=True)
class Entry:
    """A named checkpoint and the live branches that were made from it."""

    name: str
    checkpoint: Checkpoint
    node: Node
    branches: set[Any] = field(default_factory=set)
    making: int = 0  # calls that are making branches of it
    released: bool = False


class Book:
    """What one manager holds.

    Args:
        strategy: how copies are made.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.closed = False
        self._entries: dict[str, Entry] = {}
        self._replaced: list[Entry] = []  # their branches run on until they or the manager end

    @property
    def names(self) -> tuple[str, ...]:
        """The checkpoints that there are."""
        return tuple(self._entries)

    def find(self, name: str) -> Entry:
        """The checkpoint of that name.

        Raises:
            UnknownCheckpoint: there is none.
            BranchClosed: the manager is closed.
        """
        self.check()
        try:
            return self._entries[name]
        except KeyError:
            raise UnknownCheckpoint(name, self._entries) from None

    def check(self) -> None:
        """Raise if the manager is closed."""
        if self.closed:
            raise BranchClosed("the manager", what="is closed")

    def checkpoint(
        self,
        name: str,
        source: Source,
        parent: Node,
        state: State,
        actions: Sequence[Any] | None,
        reset_options: Mapping[str, Any] | None,
    ) -> Plan[None]:
        """Make a checkpoint; one of the same name is replaced once the new one stands."""
        self.check()
        try:
            made = yield from self.strategy.checkpoint(
                name, source, state, actions=actions, reset_options=reset_options
            )
        except ForeignState as error:
            if state._ref is None:
                raise
            advice = f"to checkpoint {error.owner}, pass env= as well"
            raise ForeignState(error.branch, error.owner, advice=advice) from None
        if self.closed:
            yield from self.strategy.release(made)
            raise BranchClosed("the manager", what="was closed meanwhile")
        link = made.source.link
        pid = link.pid if link is not None and link is not source.link else 0
        node = parent.add("checkpoint", name, pid=pid, step=state.metadata.step)
        old = self._entries.get(name)
        self._entries[name] = Entry(name, made, node)
        if old is not None:
            self._replaced = [entry for entry in (*self._replaced, old) if entry.branches or entry.making]
            old.node.end("replaced")
            yield from self.strategy.release(old.checkpoint)

    def branch(self, entry: Entry, names: Sequence[str], seed: Seed) -> Plan[list[Copy]]:
        """Make copies of a checkpoint.

        Raises:
            BranchClosed: it was released meanwhile; the copies have ended.
        """
        entry.making += 1
        try:
            copies = yield from self.strategy.branch(entry.checkpoint, names, draw_seeds(seed, len(names)))
        finally:
            entry.making -= 1
        if entry.released:
            yield from end(c.source.link for c in copies if c.source.link is not None and not c.shared)
            if self.closed:
                yield from self.strategy.close()
            raise BranchClosed(f"checkpoint {entry.name!r}", what="was released while a branch was made")
        return copies

    def take(self, name: str) -> Entry:
        """Remove a checkpoint from the book, to be released.

        Raises:
            UnknownCheckpoint: there is none of that name.
        """
        entry = self.find(name)
        del self._entries[name]
        entry.released = True
        return entry

    def take_all(self) -> list[Entry]:
        """Close the book; everything in it is to be released."""
        entries = [*self._entries.values(), *self._replaced]
        self._entries.clear()
        self._replaced.clear()
        self.closed = True
        for entry in entries:
            entry.released = True
        return entries

    def release(self, entries: Iterable[Entry], links: Iterable[Link]) -> Plan[None]:
        """End branches (their connections are `links`) and checkpoints together."""
        yield from end(links)
        for entry in entries:
            if entry.node.ended is None:
                entry.node.end("released")
                yield from self.strategy.release(entry.checkpoint)

    def close(self) -> Plan[None]:
        """End what the checkpoints share."""
        yield from self.strategy.close()
