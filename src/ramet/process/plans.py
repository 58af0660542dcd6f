"""What is done with several processes at once: start, fork, end; each once, for every driver.

Every plan leaves nothing behind when it is abandoned: connections are closed at once, and what was already forked
ends by itself when it finds its connection closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import secrets
import socket
import time
from collections.abc import Iterable, Sequence

from ramet.errors import BranchLost, ForkSafetyWarning, HostFailed, RametError, warn_user
from ramet.process.descriptors import MAX_FDS
from ramet.process.launch import LaunchOptions, launch
from ramet.process.link import Ended, Gone, Link, Plan, Talk
from ramet.process.recipe import Recipe
from ramet.process.tree import Tree
from ramet.protocol.flows import Flow, Forked, Peer
from ramet.protocol.messages import error_from_facts
from ramet.types import Seed

__all__ = ["END_WITHIN", "close_tree", "discard", "draw_seeds", "end", "fork", "start"]

logger = logging.getLogger("ramet")

_VALUE_MODULES = ("numpy",)
FORK_WITHIN = 300.0
_COLLECT_WITHIN = 2.0
_BUSY_GRACE = 0.5
END_WITHIN = 10.0
"""The longest wait, in seconds, for processes that were killed to be reaped."""


def start(recipe: Recipe, options: LaunchOptions, name: str, *, blocking: bool) -> Plan[Link]:
    """Start a tree with one process that has built the environment.

    Raises:
        HostFailed: the factory cannot be loaded, or raised.
        InvalidEnvironment: what it built is no environment.
    """
    tree = launch(options, blocking=blocking)
    try:
        link = tree.spawn(name)
        tree.register(link, (yield Talk(link, link.peer.prepare(recipe.data), options.start_timeout)))
        yield Talk(link, link.peer.build(), options.start_timeout)
        _meet(link.peer.modules)
    except BaseException as error:
        yield from _abandon(tree, recipe.name, error)
        raise
    logger.debug("%s (pid %d) holds %s", name, link.pid, recipe.name)
    return link


def _meet(modules: Sequence[str]) -> None:
    """Import what the environment's values are made of: decoding never imports, and would give records."""
    for name in _VALUE_MODULES:
        if name in modules:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def _abandon(tree: Tree, factory: str, error: BaseException) -> Plan[None]:
    tree.finish()
    yield Ended(tree, END_WITHIN)
    if isinstance(error, BranchLost):
        raise HostFailed(factory, f"its process ended while the environment was built: {error.reason}") from error


def fork(
    parent: Link,
    names: Sequence[str],
    *,
    seeds: Sequence[int | None],
    instant: int | None = None,
    collect: bool = False,
) -> Plan[list[Link]]:
    """Fork one child for each name; all of them or none.

    Args:
        parent: the process to fork.
        names: the children's names.
        seeds: what each child reseeds with; `None` keeps the exact copy.
        instant: the instant that the caller believes the parent to stand at.
        collect: collect the garbage first, for a parent whose children are forked often.

    Raises:
        BranchLimitError: there is no room.
        CannotBranch: the process cannot be forked.
        CannotReseed: nothing in a child could take the seed.
        StaleState: the parent has moved past `instant`.
    """
    parent.check()
    parent.tree.headroom.require(len(names))
    children: list[Link] = []
    try:
        for first in range(0, len(names), MAX_FDS):
            batch = slice(first, first + MAX_FDS)
            yield from _fork_batch(parent, names[batch], seeds[batch], instant, collect, children)
        for child, seed in zip(children, seeds, strict=True):
            yield Talk(child, child.peer.welcome(), FORK_WITHIN if seed is None else parent.tree.step_timeout)
    except BaseException:
        yield from discard(children)
        raise
    return children


def _fork_batch(
    parent: Link,
    names: Sequence[str],
    seeds: Sequence[int | None],
    instant: int | None,
    collect: bool,
    children: list[Link],
) -> Plan[None]:
    tree = parent.tree
    made: list[Link] = []
    ends: list[socket.socket] = []
    ticket = tree.begin_fork()
    try:
        for name in names:
            link, end = tree.connect(Peer(name, allow_pickle=tree.pickle, parent=parent.peer))
            made.append(link)
            children.append(link)
            ends.append(end)
        flow = parent.peer.fork(
            tuple(end.fileno() for end in ends),
            seeds=seeds,
            instant=instant,
            collect=collect,
            allow_threads=tree.allow_threads,
        )
        forked: Forked = yield Talk(parent, flow, _fork_within(tree, len(names)))
        for link, pid in zip(made, forked.pids, strict=False):
            tree.register(link, pid, ticket)
    finally:
        tree.end_fork(ticket)
        for end in ends:
            end.close()
    if forked.failure is not None:
        raise error_from_facts(forked.failure)
    logger.debug("%s was forked into %s", parent.name, ", ".join(names))
    for link in made:
        link.peer.descend(parent.peer, instant=forked.instant, first_handle=forked.first_handle)
    for text in forked.warnings:
        warn_user(f"fork of {parent.name}: {text}", ForkSafetyWarning)


def _fork_within(tree: Tree, count: int) -> float:
    """How long a batch may take: as many steps, and time for a collection, or a large one would end its checkpoint."""
    return FORK_WITHIN if tree.step_timeout is None else tree.step_timeout * count + _COLLECT_WITHIN


def discard(links: Iterable[Link]) -> Plan[None]:
    """End processes of one tree without waiting for it; a fork of the agent's own that served them alone goes too."""
    links = list(links)
    if links:
        links[0].tree.kill(links)
    for link in links:
        link.shut()
    if links and links[0].tree.disposable and links[0].tree.childless:
        links[0].tree.finish()
        yield Ended(links[0].tree, END_WITHIN)


def end(links: Iterable[Link], *, timeout: float = END_WITHIN) -> Plan[None]:
    """End processes and wait until they were reaped, but no longer than `timeout` seconds.

    An environment that was built in its process, and is no copy, closes itself first: all of them at the same time.
    """
    links = list(links)
    interrupted = yield from _close_fresh([link for link in links if link.fresh and link.open and not link.busy])
    by_tree: dict[Tree, list[Link]] = {}
    for link in links:
        by_tree.setdefault(link.tree, []).append(link)
    for tree, group in by_tree.items():
        # The connection is closed after the kill: a process that ends by itself would leave behind what it started.
        tree.kill(group)
        for link in group:
            link.bar()
    for tree, group in by_tree.items():
        waiting = tuple(link for link in group if link.pid not in (0, tree.pid) and not link.gone)
        try:
            if waiting and not tree.ended:
                yield Gone(waiting, timeout)
        except BaseException as error:
            interrupted = interrupted or error
        for link in group:
            link.shut()
        if tree.disposable and tree.childless:
            tree.finish()
            yield Ended(tree, timeout)
    if interrupted is not None:
        raise interrupted


def _close_fresh(links: Sequence[Link]) -> Plan[BaseException | None]:
    """Have environments close themselves within `grace` seconds for all of them; gives what interrupted it."""
    began = time.monotonic()
    flows = [(link, link.peer.close()) for link in links]
    # First all the requests, then all the answers.
    for link, flow in [*((link, _request_of(flow)) for link, flow in flows), *flows]:
        left = began + link.tree.grace - time.monotonic()
        if link.open and left > 0:
            try:
                yield Talk(link, flow, left)
            except RametError:
                pass  # it is ended in any case
            except BaseException as error:  # a cancellation that no shield holds off
                return error
    return None


def _request_of(flow: Flow[None]) -> Flow[None]:
    """Only the request of a conversation; the conversation itself goes on from there."""
    yield flow.send(None)


def close_tree(host: Link, *, grace: float) -> Plan[None]:
    """Have the environment close itself, then end the whole tree.

    The environment's `close()` runs in the host alone, for at most `grace` seconds; copies are killed.

    Raises:
        EnvironmentFailed: `close()` raised; the tree has ended all the same.
    """
    failure: BaseException | None = None
    if host.peer.waiting:
        grace = min(grace, _BUSY_GRACE)  # it is still at work on a call that was abandoned
    if host.open and not host.busy and not host.tree.ended:
        host.shared = False  # from now on calls do not queue, or the end would wait for those that do
        try:
            yield Talk(host, host.peer.close(), grace)
        except BranchLost:
            pass  # it took too long, or ended by itself
        except BaseException as error:  # its own, or a cancellation that no shield holds off
            failure = error
    host.tree.finish()
    yield Ended(host.tree, END_WITHIN)
    logger.debug("%s and its branches have ended", host.name)
    if failure is not None:
        raise failure


def draw_seeds(seed: Seed, count: int) -> list[int | None]:
    """A seed for each of `count` branches: none, fresh ones, or ones derived from an integer.

    A single branch gets the integer itself; several get different ones, the same in every run.

    Raises:
        TypeError: the seed is none of these.
    """
    if seed is None:
        return [None] * count
    if seed == "fresh":
        return [secrets.randbits(63) for _ in range(count)]
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"a seed is an integer, 'fresh' or None, got {seed!r}")
    if count == 1:
        return [seed]
    return [_derived(seed, number) for number in range(count)]


def _derived(seed: int, number: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
