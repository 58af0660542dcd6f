"""Named checkpoints and branches; the twin of `ramet.manager`."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ramet.blocking.branch import BranchEnvironment
from ramet.blocking.drive import run
from ramet.errors import (
    CannotBranch,
    ForeignState,
)
from ramet.lineage import Lineage, Node
from ramet.naming import branch_names, note_fork, refuse_other_surface
from ramet.process.copies import Copy, Factory, Source
from ramet.process.launch import LaunchOptions
from ramet.process.plans import end
from ramet.process.resident import check_environment, spec_of
from ramet.strategies import is_async, make_strategy, resolve
from ramet.strategies.book import Book, Entry
from ramet.types import EnvironmentConfig, Seed, State, StrategyName

__all__ = ["BranchManager", "Pair", "Pairs"]


class Pair(tuple[Any, State]):
    """A branch: `env, state = mgr.branch(name)`, or `with mgr.branch(name) as (env, state)`, which also ends it."""

    __slots__ = ()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if isinstance(self[0], BranchEnvironment):
            self[0].close()


class Pairs(list[Pair]):
    """Several branches; as a context manager it ends them together."""

    def __enter__(self) -> Pairs:
        return self

    def __exit__(self, *exc_info: object) -> None:
        links = [link for env, _ in self if isinstance(env, BranchEnvironment) for link in env.take_links()]
        run(end(links))


class BranchManager:
    """Checkpoints an environment and makes branches of it; the blocking twin of `ramet.BranchManager`.

    Attributes:
        env: the environment that was passed.
        strategy: the name of the strategy in use.
    """

    def __init__(self, env: Any, source: Source, book: Book, node: Node) -> None:
        self.env = env
        self.strategy = book.strategy.name
        self._source = source
        self._book = book
        self._node = node

    @classmethod
    def create(
        cls,
        env: Any,
        *,
        strategy: StrategyName | None = None,
        env_factory: str | Callable[..., Any] | None = None,
        config: EnvironmentConfig | None = None,
        allow_threads: bool = False,
        allow_pickle: bool = False,
        step_timeout: float | None = None,
        keep_fds: Sequence[int] = (),
    ) -> BranchManager:
        """A manager for `env`; takes and raises what `ramet.BranchManager.create` does."""
        options = LaunchOptions(allow_pickle=allow_pickle, allow_threads=allow_threads, step_timeout=step_timeout)
        source, node = _source(env, options)
        factory = source.factory if env_factory is None else Factory(env_factory)
        wanted = strategy if strategy is not None or config is None else config.branching_strategy
        name = resolve(source, strategy=wanted, factory=factory)
        if name in ("direct", "clone") and source.link is None and is_async(env):
            raise CannotBranch(
                name,
                "it is an async environment, and there is no event loop here",
                instead="host it: `with host(factory) as env`",
            )
        made = make_strategy(
            name,
            factory=factory,
            options=source.options,
            keep_fds=keep_fds,
            blocking=True,
            by_itself=wanted is None,
        )
        return cls(env, source, Book(made), node)

    def checkpoint(
        self,
        name: str,
        state: State,
        actions: Sequence[Any] | None = None,
        reset_options: Mapping[str, Any] | None = None,
        *,
        env: Any = None,
    ) -> None:
        """Keep the instant of `state` under a name; raises as `ramet.BranchManager.checkpoint` does."""
        source, node = (self._source, self._node) if env is None else _source(env, self._source.options)
        if source.link is None and not source.spec.pure_step and state._ref is not None:
            owner = state._ref.owner  # an object's own states have no reference
            raise ForeignState(source.spec.name, owner, advice=f"to checkpoint {owner}, pass env= as well")
        run(self._book.checkpoint(name, source, node, state, actions, reset_options))

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The names of the checkpoints that there are."""
        return self._book.names

    def branch(self, name: str, *, seed: Seed = None) -> Pair:
        """One branch, which ends with its block, or with the manager at the latest."""
        return self.branches(name, 1, seed=seed)[0]

    def branches(self, name: str, n: int, *, seed: Seed = None) -> Pairs:
        """`n` branches in one round trip, all or none; an integer seed gives each a seed of its own."""
        entry = self._book.find(name)
        began = time.perf_counter()
        copies = run(self._book.branch(entry, branch_names("branch", n), seed))
        each = (time.perf_counter() - began) / max(1, n)
        return Pairs(self._wrap(entry, copy, each) for copy in copies)

    def release(self, name: str) -> None:
        """End a checkpoint and the branches that were made from it; checkpoints made from those live on."""
        self._release([self._book.take(name)])

    def tree(self) -> Lineage:
        """The lineage as it stands; `print(mgr.tree())` draws it."""
        return Lineage(self._node)

    def close(self) -> None:
        """End every branch and checkpoint of this manager."""
        try:
            self._release(self._book.take_all())
        finally:
            run(self._book.close())

    def __enter__(self) -> BranchManager:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<BranchManager of {self._source.spec.name}: {self.strategy}, {len(self._book.names)} checkpoints>"

    def __del__(self) -> None:
        book = getattr(self, "_book", None)
        if book is not None and not book.closed and book.names:
            warnings.warn(f"{self!r} was dropped without being closed", ResourceWarning, 2, source=self)

    def _wrap(self, entry: Entry, copy: Copy, fork_time: float) -> Pair:
        node = note_fork(entry.node, "branch", copy, fork_time)
        if copy.source.link is None:
            node.end("a copy in this process" if not copy.shared else "the object itself")
            return Pair((copy.source.env, copy.state))
        env = BranchEnvironment(
            copy.source,
            node=node,
            state=copy.state,
            reseeded=copy.reseeded,
            shared=copy.shared,
            leave=entry.branches.discard,
        )
        entry.branches.add(env)
        return Pair((env, copy.state))

    def _release(self, entries: list[Entry]) -> None:
        links = [link for entry in entries for env in list(entry.branches) for link in env.take_links()]
        run(self._book.release(entries, links))


def _source(env: Any, options: LaunchOptions) -> tuple[Source, Node]:
    if isinstance(env, BranchEnvironment):
        return env.source, env.node
    refuse_other_surface(env, blocking=True)
    check_environment(env)
    spec = spec_of(env)
    return Source(spec, env=env, options=options), Node(0, "environment", spec.name)
