"""Four ways of making copies, and which one serves an environment."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from typing import get_args

from ramet.errors import CannotBranch
from ramet.process.copies import Factory, Source
from ramet.process.launch import LaunchOptions
from ramet.strategies.copies import Strategy
from ramet.types import StrategyName

__all__ = ["make_strategy", "resolve"]

_NAMES: tuple[StrategyName, ...] = get_args(StrategyName)


def resolve(source: Source, *, strategy: str | None, factory: Factory | None) -> StrategyName:
    """The strategy to use: the one that was asked for, or the first of the ranking that can serve.

    Raises:
        CannotBranch: it cannot serve, or none can.
        ValueError: there is no such strategy.
    """
    if strategy is not None:
        if strategy not in _NAMES:
            raise ValueError(f"strategy must be one of {', '.join(_NAMES)} or None, got {strategy!r}")
        name: StrategyName = strategy
        name = _instead_of_clone(source, name)
        if reason := _refusal(source, name, factory):
            raise CannotBranch(name, reason, instead=_instead(source, name, factory))
        return name
    for name in _candidates(source):
        if not _refusal(source, name, factory):
            return name
    unseeded = "it does not say that reset(seed=...) fixes an episode (spec.supports_seed)"
    reasons = "; ".join(f"{name}: {_refusal(source, name, factory) or unseeded}" for name in _NAMES)
    raise CannotBranch(None, reasons)


def make_strategy(
    name: StrategyName,
    *,
    factory: Factory | None,
    options: LaunchOptions,
    keep_fds: Sequence[int],
    blocking: bool,
    by_itself: bool,
) -> Strategy:
    """The strategy of that name; each is imported when it is used.

    Args:
        name: the strategy.
        factory: what builds a fresh environment, for `action_replay`.
        options: how processes are started.
        keep_fds: descriptors of the agent that belong to the environment.
        blocking: which kind of driver runs its plans.
        by_itself: it was chosen without being asked for, so it has to be safe.
    """
    if name == "direct":
        from ramet.strategies.direct import Direct

        return Direct()
    if name == "clone":
        from ramet.strategies.clone import Clone

        return Clone()
    if name == "process_fork":
        from ramet.strategies.process_fork import ProcessFork

        return ProcessFork(options, keep_fds=keep_fds, blocking=blocking)
    from ramet.strategies.action_replay import ActionReplay

    assert factory is not None
    return ActionReplay(factory, options, blocking=blocking, by_itself=by_itself)


def _instead_of_clone(source: Source, name: StrategyName) -> StrategyName:
    """An environment in a process of its own is forked instead: the agent holds no object to copy."""
    return "process_fork" if name == "clone" and source.link is not None else name


def _candidates(source: Source) -> Iterator[StrategyName]:
    """What may be chosen without being asked for, best first."""
    spec = source.spec
    if spec.pure_step:
        yield "direct"
    if spec.supports_clone and source.link is None:
        yield "clone"
    yield "process_fork"
    if spec.supports_seed:
        yield "action_replay"


def _refusal(source: Source, name: StrategyName, factory: Factory | None) -> str:
    """Why a strategy cannot serve; empty if it can."""
    spec = source.spec
    if name == "direct" and not spec.pure_step:
        return "its step() is not pure (spec.pure_step is False), so its branches would disturb each other"
    if name == "clone" and source.link is not None:
        return "it lives in a process of its own, where a fork is the copy"
    if name == "process_fork":
        if not hasattr(os, "fork"):
            return "this system has no fork"
        if spec.state_location == "remote":
            return f"the state of {spec.name} lives behind an address, and its copies would share it"
    if name == "action_replay":
        if not hasattr(os, "fork"):
            return "this system has no fork to host the fresh environments in"
        if factory is None:
            return "there is no env_factory to build a fresh environment with"
    return ""


def _instead(source: Source, name: StrategyName, factory: Factory | None) -> str:
    others = [other for other in _candidates(source) if other != name and not _refusal(source, other, factory)]
    if others:
        return f"use strategy={others[0]!r}"
    if name == "action_replay" or factory is None:
        return "pass env_factory=..., or host the environment with host(factory)"
    return ""


def is_async(env: object) -> bool:
    """Whether an environment's methods are coroutine functions."""
    return inspect.iscoroutinefunction(getattr(env, "step", None))
