"""The same API without `await`, for scripts and notebooks: blocking sockets, no event loop, no helper thread.

    from ramet.blocking import BranchManager, host

    with host(MyEnv) as env:
        state, info = env.reset(seed=42)
        with BranchManager.create(env) as mgr:
            mgr.checkpoint("start", state)
            with mgr.branch("start") as (branch, state):
                result = branch.step(state, "go left")

Under `direct` and `clone` a branch's environment is the object itself (or its copy), not a proxy.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from ramet.errors import (
    BranchBusy,
    BranchClosed,
    BranchLost,
    CannotBranch,
    ForeignState,
    ProtocolError,
    RametError,
    StepTimeout,
)
from ramet.lineage import Lineage, Node
from ramet.naming import branch_names, note_fork, refuse_other_surface, refuse_remote, warn_of_handle
from ramet.process.copies import Copy, Factory, Source, fork_live
from ramet.process.launch import LaunchOptions
from ramet.process.link import Ended, Gone, Link, Plan, Talk
from ramet.process.plans import close_tree, draw_seeds, end, start
from ramet.process.recipe import Recipe
from ramet.process.resident import check_environment, spec_of
from ramet.process.tree import Tree
from ramet.protocol.flows import Flow, Post
from ramet.protocol.handles import Handle
from ramet.strategies import is_async, make_strategy, resolve
from ramet.strategies.book import Book, Entry
from ramet.types import EnvironmentConfig, EnvironmentSpec, Seed, State, StepResult, StrategyName

__all__ = ["BranchEnvironment", "BranchManager", "Pair", "Pairs", "host"]

T = TypeVar("T")

_CHUNK = 65536
_STATUS_WITHIN = 2.0


# -- the driver ----------------------------------------------------------------------------------


def talk(link: Link, flow: Flow[T], *, timeout: float | None = None) -> T:
    """Run one conversation on a connection; see `ramet.drive.talk`. An interrupt leaves the branch usable."""
    link.check()
    if link.shared:
        if link.queue is None:
            link.queue = threading.Lock()
        with link.queue:
            link.check()
            return _talk(link, flow, timeout)
    return _talk(link, flow, timeout)


def _talk(link: Link, flow: Flow[T], timeout: float | None) -> T:
    if link.busy:
        raise BranchBusy(link.name)
    link.busy = True
    try:
        link.sock.settimeout(timeout)
        return _drive(link, flow)
    except TimeoutError:
        late = StepTimeout(link.name, pid=link.pid, timeout=timeout or math.inf)
        link.tree.kill([link])
        link.shut(late)
        raise late from None
    except EOFError:
        link.check()
        if link.pid and not link.gone:
            _wait(link.tree, (link,), _STATUS_WITHIN)
        raise link.lose() from None
    except ProtocolError as error:
        link.tree.kill([link])
        link.shut(error)
        raise
    finally:
        link.busy = False


def _drive(link: Link, flow: Flow[T]) -> T:
    try:
        wanted = flow.send(None)
        while True:
            try:
                came = None
                if wanted is None:
                    came = link.peer.decode(_receive(link))
                else:
                    _send(link, wanted)
            except BaseException as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(came)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _receive(link: Link) -> bytes:
    inbox = link.inbox
    while (payload := inbox.next()) is None:
        try:
            data = link.sock.recv(_CHUNK)
        except TimeoutError:
            raise
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        inbox.feed(data)
    return payload


def _send(link: Link, wanted: bytes | Post) -> None:
    data = wanted.data if isinstance(wanted, Post) else wanted
    sent = 0
    try:
        if isinstance(wanted, Post):
            sent = socket.send_fds(link.sock, [data], wanted.fds)
        while sent < len(data):
            sent += link.sock.send(data[sent:] if sent else data)
    except TimeoutError:
        raise
    except OSError:
        raise EOFError from None
    except BaseException:
        if sent:
            link.tree.kill([link])
            link.shut(BranchLost(link.name, pid=link.pid, reason="interrupted while a request was half written"))
        raise


def run(plan: Plan[T]) -> T:
    """Run a plan; see `ramet.process.link`."""
    try:
        step = plan.send(None)
        while True:
            try:
                came = _do(step)
            except BaseException as error:
                step = plan.throw(error)
            else:
                step = plan.send(came)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _do(step: Talk | Gone | Ended) -> Any:
    if isinstance(step, Talk):
        return talk(step.link, step.flow, timeout=step.timeout)
    if isinstance(step, Gone):
        return _wait(step.links[0].tree, step.links, step.timeout)
    return step.tree.reap(step.timeout)


def _wait(tree: Tree, links: tuple[Link, ...], timeout: float) -> None:
    """Wait until the warden has reaped these processes."""
    until = time.monotonic() + timeout
    while True:
        tree.pull()
        left = until - time.monotonic()
        if tree.ended or all(link.gone for link in links) or left <= 0:
            return
        poll = select.poll()
        poll.register(tree.control, select.POLLIN)
        poll.poll(min(left, 0.05) * 1000)  # another thread may read what we wait for


# -- environments --------------------------------------------------------------------------------


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
        result = self._talk(self._peer.step(state, action))
        self._note(result.next_state)
        return result

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another public method of the environment, or read a public attribute."""
        return self._talk(self._peer.method(name, args, kwargs))

    def hidden(self, state: State) -> Any:
        """The hidden part of `state`."""
        return self._talk(self._peer.hidden(state))

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


# -- the manager ---------------------------------------------------------------------------------


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
        made = make_strategy(name, factory=factory, options=source.options, keep_fds=keep_fds, blocking=True)
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
