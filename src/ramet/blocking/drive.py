"""Run flows and plans on blocking sockets; the twin of `ramet.drive`."""

from __future__ import annotations

import errno
import math
import select
import socket
import threading
import time
from typing import Any, TypeVar

from ramet.errors import (
    BranchBusy,
    BranchClosed,
    BranchLost,
    ProtocolError,
    StepTimeout,
)
from ramet.process.limits import no_room
from ramet.process.link import Ended, Gone, Link, Plan, Talk
from ramet.process.tree import Tree
from ramet.protocol.flows import Flow, Post
from ramet.protocol.wire import MAX_FRAME

__all__ = ["run", "talk"]

T = TypeVar("T")

_CHUNK = 65536
_STATUS_WITHIN = 2.0
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have SIGPIPE at its default, which ends it
_AT_ONCE = _QUIET | getattr(socket, "MSG_DONTWAIT", 0)


def talk(link: Link, flow: Flow[T], *, timeout: float | None = None) -> T:
    """Run one conversation on a connection; see `ramet.drive.talk`. An interrupt leaves the branch usable."""
    link.check()
    if link.shared:
        if link.queue is None:
            link.queue = threading.Lock()
        with link.queue:
            link.check()
            if not link.shared:  # its end has begun
                raise BranchClosed(link.name)
            return _talk(link, flow, timeout)
    return _talk(link, flow, timeout)


def _talk(link: Link, flow: Flow[T], timeout: float | None) -> T:
    if link.busy:
        raise BranchBusy(link.name)
    link.busy = True
    try:
        if link.sock.gettimeout() is not None:  # from `socket.setdefaulttimeout`
            link.sock.settimeout(None)
        return _drive(link, flow, None if timeout is None else time.monotonic() + timeout)
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


def _drive(link: Link, flow: Flow[T], until: float | None) -> T:
    try:
        wanted = flow.send(None)
        while True:
            try:
                came = None
                if wanted is None:
                    came = link.peer.decode(_receive(link, until))
                else:
                    _send(link, wanted, until)
            except BaseException as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(came)
    except StopIteration as stop:
        result: T = stop.value
        return result


def _receive(link: Link, until: float | None) -> bytes:
    inbox = link.inbox
    while (payload := inbox.next()) is None:
        try:
            if until is not None:
                _await(link.sock, select.POLLIN, until)
            data = link.sock.recv(_CHUNK)
        except TimeoutError:
            raise
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        inbox.feed(data)
    return payload


def _await(sock: socket.socket, events: int, until: float | None) -> None:
    """Wait until a socket is ready for one of these.

    Raises:
        TimeoutError: it was not until then.
    """
    poll = select.poll()
    poll.register(sock, events)
    if not poll.poll(None if until is None else max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


def _send(link: Link, wanted: bytes | Post, until: float | None) -> None:
    """Write a request. What comes meanwhile, a late answer, is taken in: its writer may not read until it is."""
    data = wanted.data if isinstance(wanted, Post) else wanted
    sent = taken = 0
    try:
        while sent < len(data):
            try:
                if isinstance(wanted, Post) and not sent:
                    sent = socket.send_fds(link.sock, [data], wanted.fds, _AT_ONCE)
                else:
                    sent += link.sock.send(memoryview(data)[sent:] if sent else data, _AT_ONCE)
            except BlockingIOError:
                _await(link.sock, select.POLLIN | select.POLLOUT, until)
                taken += _take_in(link)
                if taken > MAX_FRAME:
                    raise ProtocolError(f"{link.name} sent {taken} bytes and did not read its request") from None
    except (TimeoutError, ProtocolError):
        raise
    except BaseException as error:
        if isinstance(error, ConnectionError) or (
            isinstance(error, OSError) and error.errno in (errno.EBADF, errno.ENOTCONN)
        ):
            raise EOFError from None
        if sent and not isinstance(error, EOFError):
            link.tree.kill([link])
            link.shut(BranchLost(link.name, pid=link.pid, reason="interrupted while a request was half written"))
        if isinstance(error, OSError):
            raise no_room(error, 1) from error
        raise


def _take_in(link: Link) -> int:
    """Read what is there, without waiting."""
    try:
        data = link.sock.recv(_CHUNK, _AT_ONCE)
    except BlockingIOError:
        return 0
    if not data:
        raise EOFError
    link.inbox.feed(data)
    return len(data)


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
