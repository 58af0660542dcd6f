"""The tree of hosts, checkpoints and branches, and how it is shown."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

__all__ = ["Kind", "Lineage", "Node"]

Kind = Literal["environment", "host", "checkpoint", "branch", "fork"]

_KEEP_ENDED = 200
"""The children that a parent keeps by name after they and all below them have ended. Older ones are only counted, so
that a long run does not grow."""


@dataclass(eq=False, slots=True)
class Node:
    """One host, checkpoint or branch.

    Attributes:
        id: its number in this lineage.
        kind: what it is.
        name: its name.
        pid: its process id, 0 if it has no process of its own.
        step: the environment's step at its beginning.
        seed: what it was reseeded with, if it was.
        fate: `"live"`, `"ended"`, or how it was lost.
        began: when it began, in seconds since the epoch.
        ended: when it ended, in seconds since the epoch, or `None`.
        fork_time: how long it took until it answered, in seconds, if it was forked.
        children: what was made from it.
        forgotten: how many children are only counted, since they and all below them have ended.
    """

    id: int
    kind: Kind
    name: str
    pid: int = 0
    step: int = 0
    seed: int | None = None
    fate: str = "live"
    began: float = field(default_factory=time.time)
    ended: float | None = None
    fork_time: float | None = None
    children: list[Node] = field(default_factory=list, repr=False)
    forgotten: int = 0
    _forget_at: int = field(default=2 * _KEEP_ENDED, repr=False)
    _going: int = field(default=0, repr=False)  # the children that have not ended, or have something below that has not
    _parent: Node | None = field(default=None, repr=False)
    _numbers: Iterator[int] = field(default_factory=partial(itertools.count, 1), repr=False)

    def add(
        self,
        kind: Kind,
        name: str,
        *,
        pid: int = 0,
        step: int = 0,
        seed: int | None = None,
        fork_time: float | None = None,
    ) -> Node:
        """Add what was made from this node."""
        if len(self.children) > self._forget_at:
            self._forget()
        node = Node(next(self._numbers), kind, name, pid, step, seed, fork_time=fork_time)
        node._parent = self
        node._numbers = self._numbers
        self._go_on()
        self.children.append(node)
        return node

    def end(self, fate: str = "ended") -> None:
        """Note that it has ended; the first fate stands."""
        if self.ended is None:
            self.fate = fate
            self.ended = time.time()
            self._tell_over()

    @property
    def over(self) -> bool:
        """Whether it and all below it have ended."""
        return self.ended is not None and not self._going

    # Neither of these two recurs, and each goes up only as far as something changes: constant on average.

    def _go_on(self) -> None:
        node: Node | None = self
        while node is not None:
            was_over = node.over
            node._going += 1
            node = node._parent if was_over else None

    def _tell_over(self) -> None:
        node = self
        while node.over and node._parent is not None:
            node = node._parent
            node._going -= 1

    def _forget(self) -> None:
        done = [node for node in self.children if node.over]
        drop = set(map(id, done[:-_KEEP_ENDED]))
        self.forgotten += len(drop)
        self.children = [node for node in self.children if id(node) not in drop]
        self._forget_at = 2 * len(self.children)  # looked through again when it has doubled: constant on average


@dataclass(frozen=True, slots=True)
class Lineage:
    """What `mgr.tree()` returns: the lineage as it stands; `str()` draws it."""

    root: Node

    def nodes(self) -> Iterator[Node]:
        """Every node, parents first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)

    @property
    def live(self) -> int:
        """The number of live nodes."""
        return sum(node.ended is None for node in self.nodes())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        # No recursion: a chain of forks may be deep. What waits is a line, and the node below it with its indent.
        waiting: list[tuple[str, Node | None, str]] = [(_label(self.root), self.root, "")]
        while waiting:
            line, node, indent = waiting.pop()
            yield line
            if node is not None:
                waiting += reversed(list(_below(node, indent)))


def _below(node: Node, indent: str) -> Iterator[tuple[str, Node | None, str]]:
    children = _grouped(node)
    for number, (child, count) in enumerate(children):
        last = number == len(children) - 1 and not node.forgotten
        more = f" (and {count - 1} like it)" if count > 1 else ""
        line = f"{indent}{'└─ ' if last else '├─ '}{_label(child)}{more}"
        yield line, child, indent + ("   " if last else "│  ")
    if node.forgotten:
        yield f"{indent}└─ … {node.forgotten} more have ended", None, ""


def _label(node: Node) -> str:
    parts = [f"{node.kind} {node.name}", f"step {node.step}"]
    if node.pid:
        parts.append(f"pid {node.pid}")
    if node.seed is not None:
        parts.append(f"seed {node.seed}")
    if node.fork_time is not None:
        parts.append(f"forked in {node.fork_time * 1e3:.2f} ms")
    parts.append(node.fate)
    return " · ".join(parts)


def _grouped(node: Node) -> list[tuple[Node, int]]:
    """The children, where a run of ended leaves with one fate counts as one."""
    groups: list[tuple[Node, int]] = []
    for child in node.children:
        last = groups[-1][0] if groups else None
        if last is not None and _alike(last, child):
            groups[-1] = (last, groups[-1][1] + 1)
        else:
            groups.append((child, 1))
    return groups


def _alike(a: Node, b: Node) -> bool:
    return not a.children and not b.children and (a.kind, a.step, a.fate) == (b.kind, b.step, b.fate)
