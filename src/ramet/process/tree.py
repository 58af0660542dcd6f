"""The agent's side of a warden: who lives in its tree, who has ended and how."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgpack

from ramet.errors import BranchLost, ProtocolError, describe_status
from ramet.process.descriptors import NO_SIGNAL, put_null_over
from ramet.process.limits import Headroom, no_room
from ramet.process.link import Link
from ramet.process.warden import KILL, SPAWN
from ramet.protocol.flows import Peer
from ramet.protocol.wire import FrameReader, frame

__all__ = ["Tree", "socket_pair"]

logger = logging.getLogger("ramet")
_live: weakref.WeakSet[Tree] = weakref.WeakSet()
_ACKNOWLEDGE_EVERY = 1000


class Tree:
    """One warden and the processes below it.

    Args:
        control: the connection to the warden.
        pid: the warden's process id; it is a child of this process.
        blocking: whether the connections are used by blocking calls.
        pickle: let values that have no other form cross as pickles.
        allow_threads: fork although the environment's process runs Python threads.
        step_timeout: the longest that a call may take, in seconds.
        grace: how long an environment's `close()` may take, in seconds.
    """

    def __init__(
        self,
        control: socket.socket,
        pid: int,
        *,
        blocking: bool,
        pickle: bool = False,
        allow_threads: bool = False,
        step_timeout: float | None = None,
        grace: float = 5.0,
    ) -> None:
        self.control = control
        self.pid = pid
        self.blocking = blocking
        self.pickle = pickle
        self.allow_threads = allow_threads
        self.step_timeout = step_timeout
        self.grace = grace
        self.headroom = Headroom()
        self.disposable = False  # a fork of the agent's own process: it goes with its last descendant
        self.ended = False
        self.port: Any = None
        self._reader = FrameReader()
        self._links: dict[int, list[Link]] = {}
        self._spawning: deque[Link] = deque()
        self._open: set[Link] = set()
        self._tickets: set[int] = set()  # the forks whose pids are not known yet
        self._last_ticket = 0
        self._early: dict[int, tuple[int, int]] = {}  # deaths that came before the pid was known: ticket, status
        self._deaths = 0
        self._acknowledged = 0
        self._reaped = False
        self._lock = threading.RLock()  # blocking calls may come from several threads
        control.setblocking(False)
        _live.add(self)

    # -- connections -----------------------------------------------------------------------------

    def connect(self, peer: Peer) -> tuple[Link, socket.socket]:
        """A new connection: our end as a link, and the end for the process that is about to be.

        Raises:
            BranchLimitError: there is no descriptor left.
        """
        ours, theirs = socket_pair()
        if not self.blocking:
            ours.setblocking(False)
        link = Link(ours, peer, self)
        self._open.add(link)
        return link, theirs

    def spawn(self, name: str) -> Link:
        """Start a blank process under the warden."""
        link, theirs = self.connect(Peer(name, allow_pickle=self.pickle))
        with self._lock, theirs:
            self._spawning.append(link)
            self._send([self._deaths, SPAWN], [theirs.fileno()])
        return link

    def register(self, link: Link, pid: int, ticket: int = 0) -> None:
        """Note the process id of a connection, and the fork that it came from; it may be told twice."""
        with self._lock:
            if link.pid == pid:
                return
            link.pid = pid
            self._links.setdefault(pid, []).append(link)
            at, status = self._early.pop(pid, (0, 0))
            if ticket and at >= ticket:
                self._died(pid, status)

    def begin_fork(self) -> int:
        """Note that a fork is under way: a child may die before its pid is known. Gives the fork's ticket."""
        with self._lock:
            self._last_ticket += 1
            self._tickets.add(self._last_ticket)
            return self._last_ticket

    def end_fork(self, ticket: int) -> None:
        """The pids of that fork are known, or will never matter; older deaths are forgotten, their pids reused."""
        with self._lock:
            self._tickets.discard(ticket)
            oldest = min(self._tickets, default=self._last_ticket + 1)
            self._early = {pid: death for pid, death in self._early.items() if death[0] >= oldest}

    @property
    def childless(self) -> bool:
        """Whether no process of this tree has an open connection."""
        return not self._open

    def disconnected(self, link: Link) -> None:
        """Note that a connection was closed."""
        self._open.discard(link)

    def kill(self, links: Iterable[Link]) -> None:
        """Have the warden kill these processes and what they have started."""
        self.kill_pids([link.pid for link in links if link.pid not in (0, self.pid) and not link.gone])

    def kill_pids(self, pids: list[int]) -> None:
        """The same for processes that have no connection (any more)."""
        if pids and not self.ended:
            with self._lock:
                self._acknowledged = self._deaths
                self._send([self._deaths, KILL, pids])

    def _send(self, message: list[Any], fds: list[int] | None = None) -> None:
        data = frame(msgpack.packb(message))
        try:
            sent = socket.send_fds(self.control, [data], fds, NO_SIGNAL) if fds else self.control.send(data, NO_SIGNAL)
            while sent < len(data):
                _wait_writable(self.control)
                sent += self.control.send(data[sent:], NO_SIGNAL)
        except BlockingIOError:
            _wait_writable(self.control)
            self._send(message, fds)
        except OSError:
            pass  # the warden is gone, and with it whatever the message was about

    # -- what the warden says --------------------------------------------------------------------

    def pull(self) -> None:
        """Read what the warden has said, without waiting."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        while not self.ended:
            try:
                data = self.control.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                _end_session(self.pid)
                self.finish(BranchLost("the process tree", pid=self.pid, reason="its warden has ended"))
                break
            self._reader.feed(data)
            while (payload := self._reader.next()) is not None:
                pid, status = msgpack.unpackb(payload)
                if status is None:
                    self.register(self._spawning.popleft(), pid)
                else:
                    self._deaths += 1
                    self._died(pid, status)
        if self._deaths - self._acknowledged > _ACKNOWLEDGE_EVERY:
            self._acknowledged = self._deaths
            self._send([self._deaths, KILL, []])

    def _died(self, pid: int, status: int) -> None:
        links = self._links.get(pid)
        if not links:
            if self._tickets:
                self._early[pid] = (self._last_ticket, status)
            return
        link = links.pop(0)
        if not links:
            del self._links[pid]
        if link.open:
            logger.warning("%s (pid %d) has ended by itself: %s", link.name, pid, describe_status(status))
        link.reaped(status)

    def finish(self, reason: Exception | None = None) -> None:
        """Close everything: the warden ends the tree when it notices. Later calls raise `reason`."""
        if self.ended:
            return
        self.ended = True
        for link in list(self._open):
            link.shut(reason)
        for links in self._links.values():
            for link in links:
                link.reaped(None)
        self._links.clear()
        if self.port is not None:
            self.port.close()
            self.port = None
        self.control.close()
        self.reap(0.0)

    def discard(self) -> None:
        """Close everything of a tree whose warden was never made."""
        self._reaped = True
        self.finish()

    def reap(self, timeout: float) -> bool:
        """Reap the warden; whether it has ended within `timeout` seconds."""
        if not self._reaped and _ended_within(self.pid, timeout):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self._reaped = True
        return self._reaped

    def __del__(self) -> None:
        if not self.ended:
            try:
                warnings.warn("a host or manager was dropped without being closed", ResourceWarning, 2, source=self)
            finally:  # the warning may be an error
                self.finish()
                self.reap(1.0)
        self.reap(1.0)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets.

    Raises:
        BranchLimitError: there is no descriptor left.
    """
    try:
        return socket.socketpair()
    except OSError as error:
        raise no_room(error, 2) from error


def _ended_within(pid: int, timeout: float) -> bool:
    """Whether a child ends within `timeout` seconds; it is not reaped."""
    if sys.platform != "linux":
        return _polled(pid, timeout)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True  # somebody else has reaped it
    except OSError:
        return _polled(pid, timeout)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(timeout * 1000))
    finally:
        os.close(pidfd)


def _polled(pid: int, timeout: float) -> bool:
    import time

    end = time.monotonic() + timeout
    while True:
        try:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return True
        except ChildProcessError:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.005)


def _end_session(leader: int) -> None:
    """Kill what is left of the session of a warden that was killed: what the environments have started.

    The warden is our child and was not reaped, so no other session can have its number.
    """
    seen = {leader}
    with contextlib.suppress(FileNotFoundError):  # no /proc
        while left := _session_of(leader) - seen:
            seen |= left
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)


def _session_of(leader: int) -> set[int]:
    pids = set()
    for name in os.listdir("/proc"):
        with contextlib.suppress(ProcessLookupError):
            if name.isdigit() and os.getsid(int(name)) == leader:
                pids.add(int(name))
    return pids


def _wait_writable(sock: socket.socket) -> None:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(5000):
        raise ProtocolError("the warden does not read")


def _close_in_child() -> None:
    """A fork of the agent that is not ours must not hold the ends whose closing means the agent's death."""
    fds = []
    for tree in list(_live):
        if not tree.ended:
            fds += [tree.control.fileno(), *(link.sock.fileno() for link in list(tree._open) if link.open)]
            tree.ended = tree._reaped = True
    put_null_over(fds)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
