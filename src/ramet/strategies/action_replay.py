"""`action_replay`: a branch is a fresh environment that is reset and stepped to the checkpoint again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ramet.errors import BranchLost, CannotBranch, HostFailed, RametError
from ramet.process.copies import Copy, Factory, Source
from ramet.process.launch import LaunchOptions, launch
from ramet.process.link import Ended, Link, Plan, Talk
from ramet.process.plans import END_WITHIN, discard, end, fork
from ramet.process.recipe import Recipe
from ramet.process.resident import observed
from ramet.process.tree import Tree
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
        by_itself: it was chosen without being asked for, so a task index must be one that the spec supports.
    """

    name = "action_replay"

    def __init__(self, factory: Factory, options: LaunchOptions, *, blocking: bool, by_itself: bool = False) -> None:
        self._recipe = Recipe.pack(factory.make, factory.args, factory.kwargs)
        self._factory = factory
        self._options = options
        self._blocking = blocking
        self._by_itself = by_itself
        self._tree: Tree | None = None
        self._blank: Link | None = None
        self._asked = False

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
        elif actions is None:
            # Even at step 0: not every environment counts its steps, and a replay of none would be silently wrong.
            raise CannotBranch(
                self.name,
                f"the actions that led to step {state.metadata.step} are not known",
                instead="pass actions=(...), () right after a reset, and reset_options={'seed': ...} to checkpoint(),"
                " or host the environment, which records them",
            )
        else:
            history = _packed(actions, reset_options)
        if self._by_itself and not source.spec.supports_task_index and _has_task_index(history):
            raise CannotBranch(
                self.name,
                "it was reset with a task index, and the spec does not say that this fixes the task"
                " (spec.supports_task_index)",
                instead="ask for strategy='action_replay' if it does",
            )
        return Checkpoint(replace(source), state, (history, observed(state.observation)))

    def branch(self, checkpoint: Checkpoint, names: Sequence[str], seeds: Sequence[int | None]) -> Plan[list[Copy]]:
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
            yield from discard(links)
            raise
        return copies

    def _replayed(self, link: Link, history: bytes, expected: bytes | None, seed: int | None) -> Plan[Copy]:
        limit = self._options.start_timeout
        spec = yield Talk(link, link.peer.build(), limit)
        link.fresh = True
        state = yield Talk(link, link.peer.replay(history, expected), limit)
        if seed is not None:
            yield Talk(link, link.peer.reseed_all(seed), link.tree.step_timeout)
            if "state" in link.peer.reseeded:
                state, _ = yield Talk(link, link.peer.reseed(state, seed), link.tree.step_timeout)
        source = Source(spec, link=link, factory=self._factory, options=self._options)
        return Copy(source, state, link.peer.reseeded, seed=seed)

    def _ready(self) -> Plan[Link]:
        """The process that has loaded the factory. Several tasks may come at once: the later queue behind the first."""
        blank = self._blank
        if blank is None or not blank.open:
            if self._tree is None or self._tree.ended:
                self._tree = launch(self._options, blocking=self._blocking)
            blank = self._blank = self._tree.spawn(f"factory {self._recipe.name}")
            blank.shared = True
            self._asked = False
        if not self._asked:
            self._asked = True
            try:
                pid = yield Talk(blank, blank.peer.prepare(self._recipe.data), self._options.start_timeout)
                blank.tree.register(blank, pid)
            except RametError as error:
                blank.shut(error)
                yield from end([blank])
                if isinstance(error, BranchLost):
                    raise HostFailed(self._recipe.name, f"its process ended: {error.reason}") from error
                raise
            except BaseException:
                self._asked = False  # cancelled: asking again does no harm
                raise
        return blank

    def release(self, checkpoint: Checkpoint) -> Plan[None]:
        """Nothing but bytes is held."""
        yield from ()

    def close(self) -> Plan[None]:
        """End the process that holds the factory."""
        if self._tree is not None:
            self._tree.finish()
            yield Ended(self._tree, END_WITHIN)


def _recorded(link: Link, state: State) -> Plan[bytes]:
    """The history that the process has kept, if it still stands at `state`."""
    if not link.peer.pure:
        yield Talk(link, link.peer.check(state), link.tree.step_timeout)
    history: bytes = yield Talk(link, link.peer.history(), link.tree.step_timeout)
    return history


def _has_task_index(history: bytes) -> bool:
    try:
        _, options = _codec.decode(_codec.decode(history)[0])
    except RametError:
        return False  # options that only the environment's process understands
    return isinstance(options, dict) and "task_index" in options


def _packed(actions: Sequence[Any], reset_options: Mapping[str, Any] | None) -> bytes:
    """Actions that the user has given, as a history without checksums."""
    given = dict(reset_options or {})
    seed = given.pop("seed", None)
    options = given.pop("options", None)
    if given:
        options = {**(options or {}), **given}
    steps = [[_codec.encode(action), 0] for action in actions]
    return _codec.encode([_codec.encode([seed, options]), 0, steps])
