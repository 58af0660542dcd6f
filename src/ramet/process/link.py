"""The agent's end of one connection, and what a plan may ask of its driver.

A *plan* is a generator of steps that concern several processes: it yields a `Talk`, `Gone` or `Ended`, and is
sent what came of it. One driver runs plans on anyio, another on blocking sockets, so that each is written once.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Generator
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ramet.errors import BranchClosed, BranchLost
from ramet.protocol.flows import Flow, Peer
from ramet.protocol.wire import FrameReader

if TYPE_CHECKING:
    from ramet.process.tree import Tree

__all__ = ["Ended", "Gone", "Link", "Plan", "Talk"]

T = TypeVar("T")


class Link:
    """The connection to one process.

    Attributes:
        sock: the agent's end; there is no other copy of it.
        peer: what is said on it.
        tree: the tree that the process belongs to.
        pid: the process id, 0 until it is known.
        busy: a call is under way.
        shared: several users call at once, so calls queue in order instead of refusing the second.
        queue: the driver's lock for that.
        fresh: its environment was built in it and is no copy, so its end is orderly: `env.close()` first.
        gone: the process has ended and was reaped.
        status: its wait status, `None` until it is known.
        on_gone: what to call when the process has ended and was reaped.
        port: whatever the driver keeps of the connection.
    """

    __slots__ = (
        "__weakref__",
        "_ended",
        "_shut",
        "busy",
        "fresh",
        "gone",
        "inbox",
        "on_gone",
        "peer",
        "pid",
        "port",
        "queue",
        "shared",
        "sock",
        "status",
        "tree",
    )

    def __init__(self, sock: socket.socket, peer: Peer, tree: Tree) -> None:
        self.sock = sock
        self.peer = peer
        self.tree = tree
        self.inbox = FrameReader()
        self.pid = 0
        self.busy = False
        self.fresh = False
        self.shared = False
        self.queue: Any = None
        self.gone = False
        self.status: int | None = None
        self.on_gone: tuple[Callable[[], None], ...] = ()
        self.port: Any = None
        self._ended: Exception | None = None
        self._shut = False

    @property
    def name(self) -> str:
        """The process's name for people."""
        return self.peer.name

    @property
    def open(self) -> bool:
        """Whether calls can be made."""
        return self._ended is None

    def check(self) -> None:
        """Raise what says why no call can be made, if none can."""
        if self._ended is not None:
            raise copy(self._ended)  # several tasks may raise it, and each adds a traceback of its own

    def bar(self) -> None:
        """Refuse later calls and wake who waits for an answer; the process does not notice yet."""
        if self._ended is None:
            self._ended = BranchClosed(self.name)
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RD)

    def shut(self, reason: Exception | None = None) -> None:
        """Close the connection; later calls raise `reason`. The process ends when it notices, or by a kill."""
        if self._ended is None:
            self._ended = reason or BranchClosed(self.name)
        if not self._shut:
            self._shut = True
            if self.port is not None:
                self.port.close()
                self.port = None
            self.sock.close()
            self.tree.disconnected(self)

    def reaped(self, status: int | None) -> None:
        """Note that the process has ended and was reaped."""
        self.gone, self.status = True, status
        for call in self.on_gone:
            call()

    def lose(self) -> BranchLost:
        """Note that the process is gone; the error to raise, with the exit status if that is known by now."""
        lost = BranchLost(self.name, pid=self.pid, status=self.status)
        self.shut(lost)
        return lost


@dataclass(frozen=True, slots=True)
class Talk:
    """Run a flow on a connection; gives its result."""

    link: Link
    flow: Flow[Any]
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Wait until these processes were reaped, but no longer than `timeout` seconds."""

    links: tuple[Link, ...]
    timeout: float


@dataclass(frozen=True, slots=True)
class Ended:
    """Wait until the warden of a tree has ended, but no longer than `timeout` seconds; gives whether it has."""

    tree: Tree
    timeout: float


Plan = Generator[Talk | Gone | Ended, Any, T]
