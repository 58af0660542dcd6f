"""What both surfaces, async and blocking, say of the copies that they hand out."""

from __future__ import annotations

import itertools

from ramet.errors import CannotBranch, HandleWarning, warn_user
from ramet.lineage import Kind, Node
from ramet.process.copies import Copy, Source
from ramet.protocol.handles import Handle
from ramet.types import EnvironmentSpec

__all__ = ["branch_names", "note_fork", "refuse_remote", "warn_of_handle"]

_numbers = itertools.count(1)


def branch_names(kind: str, count: int) -> list[str]:
    """Names for new branches, numbered through the process."""
    if count < 0:
        raise ValueError(f"a number of branches is not negative, got {count}")
    return [f"{kind}-{next(_numbers)}" for _ in range(count)]


def note_fork(parent: Node, kind: Kind, copy: Copy, fork_time: float | None) -> Node:
    """Enter a copy into the lineage."""
    link = copy.source.link
    name = link.name if link is not None else branch_names(kind, 1)[0]
    pid = link.pid if link is not None and not copy.shared else 0
    step = copy.state.metadata.step
    return parent.add(kind, name, pid=pid, step=step, seed=copy.seed, fork_time=fork_time if pid else None)


def refuse_remote(spec: EnvironmentSpec) -> None:
    """Refuse to fork the client of an environment whose state is elsewhere.

    Raises:
        CannotBranch: with the strategy that serves.
    """
    if spec.state_location == "remote":
        raise CannotBranch(
            "process_fork",
            f"the state of {spec.name} lives behind an address, and its copies would share it",
            instead="use strategy='action_replay' if reset(seed=...) fixes the episode, or hold the server in process",
        )


def refuse_other_surface(env: object, *, blocking: bool) -> None:
    """Refuse an environment of the async surface in a blocking manager, and the other way round.

    Raises:
        TypeError: with the module to use.
    """
    source = getattr(env, "source", None)
    if isinstance(source, Source):
        mine, other = ("ramet.blocking", "ramet") if blocking else ("ramet", "ramet.blocking")
        raise TypeError(f"this environment comes from {other}: use {other}.BranchManager, or {mine}.host")


def warn_of_handle(name: str, observation: Handle, *, told: bool) -> bool:
    """Warn, once for each environment, that an observation stayed behind."""
    if not told:
        warn_user(
            f"an observation of {name} cannot be encoded ({observation!r}): it stays in the branch", HandleWarning
        )
    return True
