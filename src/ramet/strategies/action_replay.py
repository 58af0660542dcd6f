"""`action_replay`: a branch is a fresh environment that is reset and stepped to the checkpoint again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ramet.errors import CannotBranch
from ramet.process.copies import Copy, Factory, Source
from ramet.process.launch import LaunchOptions
from ramet.process.link import Ended, Link, Plan, Talk
from ramet.process.plans import END_WITHIN, discard, end, fork, start_blank
from ramet.process.recipe import Recipe
from ramet.process.resident import observed
from ramet.protocol.codec import Codec
from ramet.strategies.copies import Checkpoint
from ramet.types import State

__all__ = ["ActionReplay"]

_codec = Codec()


class ActionReplay:
    """Needs a factory, and an environment that is deterministic under its seed.

    The fresh environments are built in forks of one process that has loaded the factory and built nothing, so
    that the agent's loop never waits for a replay and imports are paid once.

    Args:
        factory: what builds a fresh environment.
        options: how its processes are started.
        blocking: which kind of driver runs the plans.
    """

    name = "action_replay"

    def __init__(self, factory: Factory, options: LaunchOptions, *, blocking: bool) -> None:
        self._recipe = Recipe.pack(factory.make, factory.args, factory.kwargs)
        self._factory = factory
        self._options = options
        self._blocking = blocking
        self._blank: Link | None = None

    def checkpoint(
        self,
        name: str,
        source: Source,
        state: State,
        *,
        actions: Sequence[Any] | None,
        reset_options: Mapping[str, Any] | None,
    ) -> Plan[Checkpoint]:
        """Keep the way that leads to this instant, and what is seen there.

        Raises:
            CannotBranch: the way is not known.
            StaleState: the environment has moved past `state`.
            ForeignState: `state` belongs to another environment.
        """
        link = source.link
        if link is not None and actions is None:
            history = yield from _recorded(link, state)
        elif actions is None and state.metadata.step > 0:
            raise CannotBranch(
                self.name,
                f"the actions that led to step {state.metadata.step} are not known",
                instead="pass actions=(...) and reset_options={'seed': ...} to checkpoint(), or use host(), which records",
            )
        else:
            history = _packed(actions or (), reset_options)
        return Checkpoint(replace(source), state, (history, observed(state.observation)))

    def branch(
        self, checkpoint: Checkpoint, names: Sequence[str], seeds: Sequence[int | None]
    ) -> Plan[list[Copy]]:
        """Build, reset and replay once for each name.

        Raises:
            ReplayDiverged: the environment went another way.
        """
        assert checkpoint.recipe is not None
        history, expected = checkpoint.recipe
        blank = yield from self._ready()
        links = yield from fork(blank, names, seeds=[None] * len(names))
        try:
            copies = []
            for link, seed in zip(links, seeds, strict=True):
                copies.append((yield from self._replayed(link, history, expected, seed)))
        except BaseException:
            discard(links)
            raise
        return copies

    def _replayed(self, link: Link, history: bytes, expected: bytes | None, seed: int | None) -> Plan[Copy]:
        limit = self._options.start_timeout
        spec = yield Talk(link, link.peer.build(), limit)
        state = yield Talk(link, link.peer.replay(history, expected), limit)
        if seed is not None:
            yield Talk(link, link.peer.reseed_all(seed))
            if "state" in link.peer.reseeded:
                state, _ = yield Talk(link, link.peer.reseed(state, seed))
        source = Source(spec, link=link, factory=self._factory, options=self._options)
        return Copy(source, state, link.peer.reseeded)

    def _ready(self) -> Plan[Link]:
        if self._blank is None or not self._blank.open:
            self._blank = yield from start_blank(
                self._recipe, self._options, f"factory {self._recipe.name}", blocking=self._blocking
            )
            self._blank.shared = True
        return self._blank

    def release(self, checkpoint: Checkpoint) -> Plan[None]:
        """Nothing but bytes is held."""
        yield from ()

    def close(self) -> Plan[None]:
        """End the process that holds the factory."""
        if self._blank is not None:
            tree = self._blank.tree
            yield from end([self._blank])
            tree.finish()
            yield Ended(tree, END_WITHIN)


def _recorded(link: Link, state: State) -> Plan[bytes]:
    """The history that the process has kept, if it still stands at `state`."""
    if not link.peer.pure:
        yield Talk(link, link.peer.check(state))
    history: bytes = yield Talk(link, link.peer.history())
    return history


def _packed(actions: Sequence[Any], reset_options: Mapping[str, Any] | None) -> bytes:
    """Actions that the user has given, as a history without checksums."""
    given = dict(reset_options or {})
    seed = given.pop("seed", None)
    options = given.pop("options", None)
    if given:
        options = {**(options or {}), **given}
    steps = [[_codec.encode(action), 0] for action in actions]
    return _codec.encode([_codec.encode([seed, options]), 0, steps])
