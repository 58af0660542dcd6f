"""Environments in processes of their own; the twin of `ramet.branch` and `ramet.hosting`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from ramet.blocking.drive import run, talk
from ramet.errors import (
    BranchClosed,
    BranchLost,
    EncodeError,
    EnvironmentFailed,
    RametError,
)
from ramet.lineage import Node
from ramet.naming import branch_names, note_fork, refuse_remote, warn_of_handle
from ramet.process.copies import Copy, Factory, Source, fork_live
from ramet.process.launch import LaunchOptions
from ramet.process.link import Link, Plan, Talk
from ramet.process.plans import close_tree, draw_seeds, end, start
from ramet.process.recipe import Recipe
from ramet.protocol.flows import Flow
from ramet.protocol.handles import Handle
from ramet.types import EnvironmentSpec, Seed, State, StepResult

__all__ = ["BranchEnvironment", "host"]

T = TypeVar("T")


class BranchEnvironment:
    """An environment in a process of its own; the blocking twin of `ramet.BranchEnvironment`.

    Attributes:
        spec: what the environment says of itself.
        name: its name for people.
        node: its place in the lineage.
        source: what copies of it are made of.
    """

    def __init__(
        self,
        source: Source,
        *,
        node: Node,
        state: State | None = None,
        reseeded: tuple[str, ...] = (),
        shared: bool = False,
        end: Callable[[Link], Plan[None]] | None = None,
        leave: Callable[[BranchEnvironment], None] | None = None,
    ) -> None:
        assert source.link is not None
        self.spec: EnvironmentSpec = source.spec
        self.name = source.link.name
        self.node = node
        self.source = source
        self._link = source.link
        self._peer = source.link.peer
        self._timeout = source.link.tree.step_timeout
        self._state = state
        self._certain = True
        self._shared = shared
        self._reseeded = reseeded
        self._closed = False
        self._end = end
        self._leave = leave
        self._forks: set[BranchEnvironment] = set()
        self._told = False

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._link.pid

    @property
    def reseeded(self) -> tuple[str, ...]:
        """What was reseeded when this branch was made; empty for an exact copy."""
        return self._reseeded

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[State, Mapping[str, Any]]:
        """Reset the environment; raises as `ramet.BranchEnvironment.reset` does."""
        state, info = self._talk(self._peer.reset(seed, options))
        self._note(state)
        return state, info

    def step(self, state: State, action: Any) -> StepResult:
        """Take one step; raises as `ramet.BranchEnvironment.step` does."""
        try:
            result = self._talk(self._peer.step(state, action))
        except (EnvironmentFailed, EncodeError):
            if not self._peer.pure:  # perhaps only its result could not cross, and the environment has moved on
                self._certain = False
            raise
        self._note(result.next_state)
        return result

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another public method of the environment, or read a public attribute."""
        return self._talk(self._peer.method(name, args, kwargs))

    def hidden(self, state: State) -> Any:
        """The hidden part of `state`."""
        return self._talk(self._peer.hidden(state))

    def current(self) -> State:
        """The newest state, for instance after a step that was interrupted while it waited for its answer."""
        self._state = self._talk(self._peer.current())
        self._certain = True
        return self._state

    @overload
    def fork(self, n: None = None, *, seed: Seed = None) -> tuple[BranchEnvironment, State]: ...

    @overload
    def fork(self, n: int, *, seed: Seed = None) -> list[tuple[BranchEnvironment, State]]: ...

    def fork(
        self, n: int | None = None, *, seed: Seed = None
    ) -> tuple[BranchEnvironment, State] | list[tuple[BranchEnvironment, State]]:
        """Copy this live environment where it stands; raises as `ramet.BranchEnvironment.fork` does."""
        began = time.perf_counter()
        copies = run(self._fork(1 if n is None else n, seed))
        each = (time.perf_counter() - began) / max(1, len(copies))
        pairs = [(self._own(copy, each), copy.state) for copy in copies]
        return pairs[0] if n is None else pairs

    def close(self) -> None:
        """End this environment and its forks, and wait (within bounds) until their processes are gone."""
        links = self.take_links()
        if self._end is not None:
            run(self._end(self._link))
        elif links:
            run(end(links))

    def __enter__(self) -> BranchEnvironment:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    if not TYPE_CHECKING:  # or a type checker would take every misspelt name

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"{name!r}: {self.name} lives in a process of its own; `env.call({name!r})` reaches what"
                " the environment has"
                if not name.startswith("_")
                else f"{type(self).__name__!r} object has no attribute {name!r}"
            )

    def __repr__(self) -> str:
        return f"<{self.name}: {self.spec.name} in process {self.pid}>"

    def take_links(self) -> list[Link]:
        """The connections of this environment and its forks, which it lets go of; for who ends them."""
        links: list[Link] = []
        waiting = [self]
        while waiting:  # no recursion: a chain of forks may be deep
            env = waiting.pop()
            env._closed = True
            if not env._shared:
                links.append(env._link)
            waiting += env._forks
            env._forks.clear()
            env.node.end()
            if env._leave is not None:
                env._leave(env)
        return links

    def _talk(self, flow: Flow[T]) -> T:
        if self._closed:
            raise BranchClosed(self.name)
        try:
            return talk(self._link, flow, timeout=self._timeout)
        except BranchLost as error:
            self.node.end(error.reason)
            raise
        except RametError:
            raise
        except BaseException:
            self._certain = False
            raise

    def _note(self, state: State) -> None:
        self._state = state
        if type(state.observation) is Handle:
            self._told = warn_of_handle(self.name, state.observation, told=self._told)

    def _fork(self, count: int, seed: Seed) -> Plan[list[Copy]]:
        refuse_remote(self.spec)
        if not self._certain:
            self._state = yield Talk(self._link, self._peer.current())
            self._certain = True
        state = State() if self._state is None else self._state
        return (yield from fork_live(self.source, state, branch_names("fork", count), draw_seeds(seed, count)))

    def _own(self, copy: Copy, fork_time: float) -> BranchEnvironment:
        node = note_fork(self.node, "fork", copy, fork_time)
        env = BranchEnvironment(
            copy.source, node=node, state=copy.state, reseeded=copy.reseeded, leave=self._forks.discard
        )
        self._forks.add(env)
        return env


def host(
    factory: str | Callable[..., Any],
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    output: Literal["inherit", "discard"] | Path | str = "inherit",
    allow_pickle: bool = False,
    allow_threads: bool = False,
    step_timeout: float | None = None,
    start_timeout: float = 300.0,
    grace: float = 5.0,
) -> BranchEnvironment:
    """Build an environment in a process of its own; takes and raises what `ramet.host` does.

    Use it as `with host(...) as env`, or call `env.close()` at the end.
    """
    options = LaunchOptions(
        cwd=cwd,
        environ=environ,
        output=output,
        allow_pickle=allow_pickle,
        allow_threads=allow_threads,
        step_timeout=step_timeout,
        start_timeout=start_timeout,
        grace=grace,
    )
    link = run(start(Recipe.pack(factory, args, kwargs), options, branch_names("host", 1)[0], blocking=True))
    assert link.peer.spec is not None
    source = Source(link.peer.spec, link=link, factory=Factory(factory, args, kwargs or {}), options=options)
    node = Node(0, "host", link.name, link.pid)
    return BranchEnvironment(source, node=node, end=partial(close_tree, grace=grace))
