"""`process_fork`: a checkpoint is a frozen process, and a branch is a fork of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ramet.process.adopt import adopt
from ramet.process.copies import Copy, Source, fork_live, state_of
from ramet.process.launch import LaunchOptions
from ramet.process.link import Plan, Talk
from ramet.process.plans import end, fork
from ramet.strategies.copies import Checkpoint
from ramet.types import State

__all__ = ["ProcessFork"]


class ProcessFork:
    """Works for any environment whose state is in its process.

    Args:
        options: how an environment that lives in the agent's process is treated once it is forked.
        keep_fds: descriptors of the agent's process that belong to such an environment.
        blocking: which kind of driver runs the plans.
    """

    name = "process_fork"

    def __init__(self, options: LaunchOptions, *, keep_fds: Sequence[int], blocking: bool) -> None:
        self._options = options
        self._keep_fds = keep_fds
        self._blocking = blocking

    def checkpoint(
        self,
        name: str,
        source: Source,
        state: State,
        *,
        actions: Sequence[Any] | None,
        reset_options: Mapping[str, Any] | None,
    ) -> Plan[Checkpoint]:
        """Fork the environment's process and keep the child as it is.

        Raises:
            CannotBranch: the process cannot be forked.
            StaleState: the environment has moved past `state`.
            ForeignState: `state` belongs to another environment.
        """
        if source.link is None:
            link = adopt(
                source.env,
                state,
                name,
                options=self._options,
                keep_fds=self._keep_fds,
                blocking=self._blocking,
            )
            try:
                yield Talk(link, link.peer.build(), self._options.start_timeout)
            except BaseException:
                yield from end([link])
                raise
        else:
            peer = source.link.peer
            instant = None if peer.pure else peer.instant_of(state)
            (link,) = yield from fork(source.link, [name], seeds=[None], instant=instant, collect=True)
        link.shared = True  # branches are made by many tasks at once
        kept = state_of(link, state)
        return Checkpoint(replace(source, link=link, env=None), kept)

    def branch(self, checkpoint: Checkpoint, names: Sequence[str], seeds: Sequence[int | None]) -> Plan[list[Copy]]:
        """Fork the frozen process once for each name."""
        return (yield from fork_live(checkpoint.source, checkpoint.state, names, seeds))

    def release(self, checkpoint: Checkpoint) -> Plan[None]:
        """End the frozen process; one that was forked from the agent goes with its last descendant."""
        assert checkpoint.source.link is not None
        yield from end([checkpoint.source.link])

    def close(self) -> Plan[None]:
        """Checkpoints share nothing."""
        yield from ()
