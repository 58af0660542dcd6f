"""`BranchManager`: named checkpoints of a live environment, and branches made from them."""

from __future__ import annotations

import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal, TypeVar, overload

from ramet.branch import BranchEnvironment
from ramet.drive import run, shielded
from ramet.errors import CannotBranch
from ramet.gather import Stacked, step_all
from ramet.lineage import Lineage, Node
from ramet.local import LocalEnvironment
from ramet.naming import branch_names, note_fork, refuse_other_surface
from ramet.pending import Pending
from ramet.process.copies import Copy, Factory, Source
from ramet.process.launch import LaunchOptions
from ramet.process.resident import check_environment, spec_of
from ramet.pump import running_on_trio
from ramet.strategies import is_async, make_strategy, resolve
from ramet.strategies.book import Book, Entry
from ramet.types import EnvironmentConfig, Seed, State, StepResult, StrategyName

__all__ = ["BranchManager", "Pair"]

T = TypeVar("T")

Pair = tuple[BranchEnvironment | LocalEnvironment, State]
"""A branch: the environment's async proxy, and the state that it stands at."""


class BranchManager:
    """Checkpoints an environment and makes branches of it.

    Make one with `BranchManager.create(env)`, as an async context manager or with `aclose()`. Leaving the block ends
    every branch and checkpoint, under cancellation too.

    Attributes:
        env: the async proxy of the environment that was passed.
        strategy: the name of the strategy in use.
    """

    def __init__(self, env: BranchEnvironment | LocalEnvironment, book: Book, node: Node) -> None:
        self.env = env
        self.strategy = book.strategy.name
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
        """A manager for `env`.

        Args:
            env: what `host()` gave, a branch (for managers inside managers), or an environment object that lives in
                this process.
            strategy: how copies are made; chosen from `env.spec` by default, see `docs/copies.md`.
            env_factory: builds a fresh environment, for `action_replay`; a host's own factory by default.
            config: its `branching_strategy` is used if `strategy` is not given.
            allow_threads: for an object in this process: let its branches be forked with threads in it.
            allow_pickle: for an object in this process: let values that have no other form cross as pickles.
            step_timeout: for an object in this process: the longest that a call of a branch may take, in seconds.
            keep_fds: for an object in this process: sockets and event descriptors that belong to it.

        Raises:
            CannotBranch: the strategy cannot serve this environment.
            InvalidEnvironment: `env` is no environment.
        """
        options = LaunchOptions(allow_pickle=allow_pickle, allow_threads=allow_threads, step_timeout=step_timeout)
        proxy, source, node = _source(env, options)
        factory = source.factory if env_factory is None else Factory(env_factory)
        wanted = strategy if strategy is not None or config is None else config.branching_strategy
        name = resolve(source, strategy=wanted, factory=factory)
        _check_loop(source, name)
        made = make_strategy(
            name,
            factory=factory,
            options=source.options,
            keep_fds=keep_fds,
            blocking=False,
            by_itself=wanted is None,
        )
        book = Book(made)
        return cls(proxy, book, node)

    # -- checkpoints -----------------------------------------------------------------------------

    async def checkpoint(
        self,
        name: str,
        state: State,
        actions: Sequence[Any] | None = None,
        reset_options: Mapping[str, Any] | None = None,
        *,
        env: BranchEnvironment | LocalEnvironment | None = None,
    ) -> None:
        """Keep the instant of `state` under a name.

        The same name again replaces the old checkpoint once the new one stands; branches of the old one run on.
        Cancelled, it leaves no process behind, and an old checkpoint of that name stands.

        Args:
            name: the checkpoint's name.
            state: the newest state of the environment (any state, if it is pure).
            actions: the actions that led here, for `action_replay` of an object in this process; hosts record them.
            reset_options: the `seed`, and the `options` or just `task_index`, of the reset, likewise.
            env: a branch to checkpoint instead of the manager's environment.

        Raises:
            CannotBranch: the strategy cannot serve, for instance since the process has threads.
            StaleState: the environment has moved past `state`.
            ForeignState: `state` belongs to another environment: pass `env=`.
            BranchLimitError: there is no room.
        """
        of = self.env if env is None else env
        if isinstance(of, LocalEnvironment):
            of.check(state, advice="to checkpoint {owner}, pass env= as well")
        await run(self._book.checkpoint(name, of.source, of.node, state, actions, reset_options))

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """The names of the checkpoints that there are."""
        return self._book.names

    async def release(self, name: str) -> None:
        """End a checkpoint and the branches that were made from it; checkpoints made from those live on.

        It runs to its end under cancellation.

        Raises:
            UnknownCheckpoint: there is none of that name.
        """
        await self._release([self._book.take(name)])

    # -- branches --------------------------------------------------------------------------------

    def branch(self, name: str, *, seed: Seed = None) -> Pending[Pair]:
        """One branch: `async with mgr.branch(name) as (env, state)`, or `env, state = await mgr.branch(name)`.

        Left by the block, or with the manager at the latest, its process is gone. Cancelled, it leaves no process
        behind.

        Args:
            name: the checkpoint's name.
            seed: `None` for an exact copy, random generators included; `"fresh"` or an integer to reseed.

        Raises:
            UnknownCheckpoint: there is no checkpoint of that name.
            BranchLimitError: there is no room.
            CannotReseed: nothing could take the seed.
        """
        return Pending(partial(self._one, name, seed), _end_pair, call=f"mgr.branch({name!r})")

    def branches(self, name: str, n: int, *, seed: Seed = None) -> Pending[list[Pair]]:
        """`n` branches in one round trip, all or none; an integer seed gives each a seed of its own."""
        return Pending(partial(self._several, name, n, seed), self._end_pairs, call=f"mgr.branches({name!r}, {n})")

    @asynccontextmanager
    async def map(
        self,
        function: Callable[[BranchEnvironment | LocalEnvironment, State], Awaitable[T]],
        name: str,
        n: int,
        *,
        limit: int = 64,
        ordered: bool = False,
        seed: Seed = None,
    ) -> AsyncIterator[AsyncIterator[T]]:
        """Run an async function over `n` branches, at most `limit` alive at once.

        `async with mgr.map(rollout, "step5", 1000) as results: async for result in results: ...`. Leaving the block
        cancels what still runs. An exception of the function cancels the others and comes out of the block.

        Args:
            function: called with a branch's environment and state.
            name: the checkpoint's name.
            n: how many branches.
            limit: how many are alive at once; a slow reader holds new ones back too.
            ordered: give the results in the order of the branches instead of as they come.
            seed: as in `branch`; an integer gives each branch a seed of its own.
        """
        from ramet.mapping import mapped

        self._book.find(name)
        async with mapped(partial(self._rollout, function, name), n, limit=limit, ordered=ordered, seed=seed) as out:
            yield out

    async def _rollout(self, function: Callable[[Any, State], Awaitable[T]], name: str, seed: int | None) -> T:
        async with self.branch(name, seed=seed) as (env, state):
            return await function(env, state)

    @overload
    async def step_all(
        self, pairs: Sequence[Pair], actions: Sequence[Any], *, stack: Literal[False] = False
    ) -> list[StepResult | Exception]: ...

    @overload
    async def step_all(self, pairs: Sequence[Pair], actions: Sequence[Any], *, stack: Literal[True]) -> Stacked: ...

    async def step_all(
        self, pairs: Sequence[Pair], actions: Sequence[Any], *, stack: bool = False
    ) -> list[StepResult | Exception] | Stacked:
        """Step many branches at once, without a task for each.

        Args:
            pairs: the branches and the states to step.
            actions: one action for each.
            stack: give NumPy arrays, as users of vector environments expect.

        Returns:
            For each branch its result, or the exception that its step raised; or a `Stacked`. Cancelled, every branch
            stays usable.

        Raises:
            ValueError: there are not as many actions as branches.
        """
        results = await step_all(pairs, actions)
        return Stacked.of(results) if stack else results

    def tree(self) -> Lineage:
        """The lineage as it stands; `print(mgr.tree())` draws it."""
        return Lineage(self._node)

    # -- the end ---------------------------------------------------------------------------------

    async def aclose(self) -> None:
        """End every branch and checkpoint of this manager. It runs to its end under cancellation."""
        entries = self._book.take_all()
        try:
            await self._release(entries)
        finally:
            await shielded(self._book.close())

    async def __aenter__(self) -> BranchManager:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __enter__(self) -> None:
        raise TypeError("this BranchManager is asynchronous: write `async with`, or use ramet.blocking.BranchManager")

    def __exit__(self, *exc_info: object) -> None: ...

    def __repr__(self) -> str:
        return f"<BranchManager of {self.env.name}: {self.strategy}, {len(self._book.names)} checkpoints>"

    def __del__(self) -> None:
        book = getattr(self, "_book", None)
        if book is not None and not book.closed and book.names:
            warnings.warn(f"{self!r} was dropped without being closed", ResourceWarning, 2, source=self)

    # -- inside ----------------------------------------------------------------------------------

    async def _one(self, name: str, seed: Seed) -> Pair:
        return (await self._several(name, 1, seed))[0]

    async def _several(self, name: str, n: int, seed: Seed) -> list[Pair]:
        entry = self._book.find(name)
        began = time.perf_counter()
        copies = await run(self._book.branch(entry, branch_names("branch", n), seed))
        each = (time.perf_counter() - began) / max(1, n)
        return [self._wrap(entry, copy, each) for copy in copies]

    def _wrap(self, entry: Entry, copy: Copy, fork_time: float) -> Pair:
        node = note_fork(entry.node, "branch", copy, fork_time)
        env: BranchEnvironment | LocalEnvironment
        if copy.source.link is not None:
            env = BranchEnvironment(
                copy.source,
                node=node,
                state=copy.state,
                reseeded=copy.reseeded,
                shared=copy.shared,
                leave=entry.branches.discard,
            )
        else:
            env = LocalEnvironment(
                copy.source,
                name=node.name,
                node=node,
                reseeded=copy.reseeded,
                state=copy.state,
                owned=True,
                leave=entry.branches.discard,
            )
        entry.branches.add(env)
        return env, env.newest_state()

    async def _end_pairs(self, pairs: list[Pair]) -> None:
        links = [link for env, _ in pairs for link in env.take_links()]
        await shielded(self._book.release((), links))

    async def _release(self, entries: list[Entry]) -> None:
        links = [link for entry in entries for env in list(entry.branches) for link in env.take_links()]
        await shielded(self._book.release(entries, links))


async def _end_pair(pair: Pair) -> None:
    await pair[0].aclose()


def _source(env: Any, options: LaunchOptions) -> tuple[BranchEnvironment | LocalEnvironment, Source, Node]:
    """The proxy, what copies are made of, and the root of the lineage."""
    if isinstance(env, (BranchEnvironment, LocalEnvironment)):
        return env, env.source, env.node
    if isinstance(env, Pending):
        env.complain()
    refuse_other_surface(env, blocking=False)
    check_environment(env)
    spec = spec_of(env)
    node = Node(0, "environment", spec.name)
    source = Source(spec, env=env, options=options)
    return LocalEnvironment(source, name=spec.name, node=node), source, node


def _check_loop(source: Source, strategy: str) -> None:
    """An async environment that stays in this process needs the loop that it was written for."""
    stays = strategy in ("direct", "clone") and source.link is None
    if stays and is_async(source.env) and not source.spec.any_loop and running_on_trio():
        raise CannotBranch(
            strategy,
            "it is an async environment of asyncio, and the agent runs trio",
            instead="host it, `async with host(factory) as env`, or say spec.any_loop if it runs on both",
        )
