"""Where copies come from, what a copy is, and the plan that makes one of a live process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ramet.process.launch import LaunchOptions
from ramet.process.link import Link, Plan, Talk
from ramet.process.plans import discard, fork
from ramet.types import EnvironmentSpec, State

__all__ = ["Copy", "Factory", "Source", "fork_live", "state_of"]


@dataclass(frozen=True, slots=True)
class Factory:
    """What builds a fresh environment: a callable or a `"module:attr"` string, with its arguments."""

    make: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """An environment that can be copied: in a process of its own, or an object in the agent's process.

    Attributes:
        spec: what the environment says of itself.
        link: the connection to its process.
        env: the object.
        factory: what it was built by, if that is known.
        options: how its process was started.
    """

    spec: EnvironmentSpec
    link: Link | None = None
    env: Any = None
    factory: Factory | None = None
    options: LaunchOptions = field(default_factory=LaunchOptions)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy, as a strategy makes it; the managers wrap it for their users.

    Attributes:
        source: the copy itself.
        state: the state that it stands at.
        reseeded: what was reseeded.
        shared: the copy is the original, which its user must not end.
        seed: what it was reseeded with.
    """

    source: Source
    state: State
    reseeded: tuple[str, ...] = ()
    shared: bool = False
    seed: int | None = None


def state_of(link: Link, state: State) -> State:
    """`state`, as the newest one of the process behind `link`."""
    return link.peer.at(link.peer.instant, state)


def fork_live(source: Source, state: State, names: Sequence[str], seeds: Sequence[int | None]) -> Plan[list[Copy]]:
    """Fork a process where it stands.

    Args:
        source: the process.
        state: the state that it stands at, and that the copies start from.
        names: a name for each copy.
        seeds: what each copy reseeds with.

    Raises:
        BranchLimitError: there is no room; no copy was made.
        CannotBranch: the process cannot be forked.
        StaleState: it has moved past `state`.
    """
    link = source.link
    assert link is not None
    instant = None if link.peer.pure or state._ref is None else link.peer.instant_of(state)
    children = yield from fork(link, names, seeds=seeds, instant=instant)
    try:
        copies = []
        for child, seed in zip(children, seeds, strict=True):
            copies.append((yield from _copy(source, child, state_of(child, state), seed)))
    except BaseException:
        yield from discard(children)
        raise
    return copies


def _copy(source: Source, child: Link, state: State, seed: int | None) -> Plan[Copy]:
    reseeded = child.peer.reseeded
    if seed is not None and "state" in reseeded:
        state, _ = yield Talk(child, child.peer.reseed(state, seed), child.tree.step_timeout)
    return Copy(replace(source, link=child), state, reseeded, seed=seed)
