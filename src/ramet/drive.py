"""Run flows and plans on anyio: the only place where the agent's side waits for a branch."""

from __future__ import annotations

import errno
import os
import socket
import weakref
from typing import Any, TypeVar

import anyio

from ramet.errors import BranchBusy, BranchClosed, BranchLost, ProtocolError, StepTimeout
from ramet.process.limits import no_room
from ramet.process.link import Ended, Gone, Link, Plan, Talk
from ramet.process.tree import Tree
from ramet.protocol.flows import Flow, Post
from ramet.protocol.wire import MAX_FRAME
from ramet.pump import open_port, running_on_trio

__all__ = ["Rest", "attach", "reason", "run", "send_at_once", "shielded", "talk"]

T = TypeVar("T")

_CHUNK = 65536
_STATUS_WITHIN = 2.0
_QUIET = getattr(socket, "MSG_NOSIGNAL", 0)  # a program may have SIGPIPE at its default, which ends it


async def talk(link: Link, flow: Flow[T], *, timeout: float | None = None) -> T:
    """Run one conversation on a connection.

    A call that is cancelled while it waits for the answer leaves the branch usable: the late answer is skipped by
    the next call. One that is cancelled while its request is half written loses the branch.

    Raises:
        BranchBusy: another call is under way on it.
        BranchClosed: it was ended by its owner.
        BranchLost: its process is gone.
        StepTimeout: the answer took longer than `timeout` seconds, and the branch was ended.
    """
    link.check()
    if link.shared:
        on_trio = running_on_trio()  # a lock is of one kind of loop, and the next run may be of the other
        if link.queue is None or link.queue[0] != on_trio:
            link.queue = (on_trio, anyio.Lock(fast_acquire=True))
        async with link.queue[1]:
            link.check()
            if not link.shared:  # its end has begun
                raise BranchClosed(link.name)
            return await _talk(link, flow, timeout)
    return await _talk(link, flow, timeout)


async def _talk(link: Link, flow: Flow[T], timeout: float | None) -> T:
    if link.busy:
        raise BranchBusy(link.name)
    link.busy = True
    try:
        if timeout is None:
            return await _drive(link, flow)
        with anyio.move_on_after(timeout):
            return await _drive(link, flow)
    except EOFError:
        raise await reason(link) from None
    except ProtocolError as error:
        link.tree.kill([link])
        link.shut(error)
        raise
    finally:
        link.busy = False
    late = StepTimeout(link.name, pid=link.pid, timeout=timeout)
    link.tree.kill([link])
    link.shut(late)
    raise late


async def _drive(link: Link, flow: Flow[T]) -> T:
    try:
        wanted = flow.send(None)
        while True:
            try:
                came = None
                if wanted is None:
                    came = link.peer.decode(await _receive(link))
                elif (left := send_at_once(link, wanted)) is not None:
                    await _send_rest(Rest(link, left))
            except BaseException as error:
                wanted = flow.throw(error)
            else:
                wanted = flow.send(came)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def _receive(link: Link) -> bytes:
    inbox = link.inbox
    while True:
        payload = inbox.next()
        if payload is not None:
            return payload
        port = link.port
        if port is None:  # waited for even if the answer is there: a call always lets others run
            port = link.port = open_port(link.sock)
        if not port.ready:
            await port.wait()
        port.ready = port.ended
        try:
            data = link.sock.recv(_CHUNK)
        except BlockingIOError:
            continue
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        if len(data) == _CHUNK:
            port.ready = True
        inbox.feed(data)


def send_at_once(link: Link, wanted: bytes | Post | memoryview) -> bytes | Post | memoryview | None:
    """Write without waiting; what is left, which is a `memoryview` when a part of it went. `None`: all of it went.

    Raises:
        EOFError: the other side is gone, or the connection was closed.
        BranchLimitError: the system has no room for it; nothing of it went.
    """
    data = wanted.data if isinstance(wanted, Post) else wanted
    try:
        if isinstance(wanted, Post):
            sent = socket.send_fds(link.sock, [data], wanted.fds, _QUIET)
        else:
            sent = link.sock.send(data, _QUIET)
    except BlockingIOError:
        return wanted
    except OSError as error:
        if isinstance(error, ConnectionError) or error.errno in (errno.EBADF, errno.ENOTCONN):
            raise EOFError from None
        raise no_room(error, 1) from error
    return None if sent == len(data) else memoryview(data)[sent:]


class Rest:
    """A request that did not go at once. The descriptors, if there are any, go with the first bytes.

    The other side may be writing too, a late answer that nobody has read: unless that is taken in, neither goes on.
    """

    def __init__(self, link: Link, left: bytes | Post | memoryview) -> None:
        self._link = link
        self._left = left
        self._taken = 0
        if link.port is None:
            link.port = open_port(link.sock)
        link.port.settle()
        link.port.watch_writing(True)
        self.port = link.port

    @property
    def begun(self) -> bool:
        """Whether a part of it went."""
        return isinstance(self._left, memoryview)

    def go_on(self) -> bool:
        """Take in some of what came and write some, without waiting; whether all is written.

        Raises:
            EOFError: the other side is gone, or the connection was closed.
            ProtocolError: it writes without end and does not read.
            BranchLimitError: the system has no room for it.
        """
        port = self.port
        port.ready = port.ended
        try:
            data = self._link.sock.recv(_CHUNK)
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None
        else:
            if not data:
                raise EOFError
            self._link.inbox.feed(data)
            self._taken += len(data)
            if self._taken > MAX_FRAME:
                raise ProtocolError(f"{self._link.name} sent {self._taken} bytes and did not read its request")
            if len(data) == _CHUNK:
                port.ready = True
        left = send_at_once(self._link, self._left)
        if left is not None:
            self._left = left
        return left is None

    def leave(self, why: str) -> None:
        """Stop watching. A request of which a part went cannot be taken back: then the branch is lost."""
        self.port.watch_writing(False)
        link = self._link
        if why and self.begun and link.open:
            link.tree.kill([link])
            link.shut(BranchLost(link.name, pid=link.pid, reason=f"{why} while its request was half written"))


async def _send_rest(rest: Rest) -> None:
    why = "a call ended"
    try:
        while not rest.go_on():
            if not rest.port.ready:
                await rest.port.wait()
        why = ""
    except (EOFError, ProtocolError):
        why = ""  # the caller ends it
        raise
    except anyio.get_cancelled_exc_class():
        why = "a call was cancelled"
        raise
    finally:
        rest.leave(why)


async def reason(link: Link) -> Exception:
    """Why a connection has ended: its owner's doing, or a lost process."""
    try:
        link.check()
    except Exception as error:
        return error
    return await _lost(link)


async def _lost(link: Link) -> BranchLost:
    """The error for a process that has closed its end: with its exit status, if that comes soon."""
    if link.pid and not link.gone:
        await _wait(link.tree, (link,), _STATUS_WITHIN)
    return link.lose()


async def _wait(tree: Tree, links: tuple[Link, ...], timeout: float) -> None:
    """Wait until the warden has reaped these processes."""
    attach(tree)
    tree.pull()
    left = [link for link in links if not link.gone]
    if not left or tree.ended:
        return
    event = anyio.Event()

    missing = len(left)

    def count() -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            event.set()

    for link in left:
        link.on_gone += (count,)
    with anyio.move_on_after(timeout):
        await event.wait()


def attach(tree: Tree) -> None:
    """Listen to the warden of `tree` on the running event loop."""
    if tree.port is not None:
        tree.port.settle(keep_waker=True)
    elif not tree.ended:
        tree.port = open_port(tree.control)
        pull = weakref.WeakMethod(tree.pull)  # or the loop would keep a tree that its user has dropped
        tree.port.waker = lambda: (alive := pull()) and alive()


async def _ended(tree: Tree, timeout: float) -> bool:
    """Wait until the warden has ended, and reap it."""
    if tree.reap(0.0):
        return True
    if not hasattr(os, "pidfd_open"):
        return await anyio.to_thread.run_sync(tree.reap, timeout)
    pidfd = os.pidfd_open(tree.pid)
    try:
        with anyio.move_on_after(timeout):
            await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    return tree.reap(0.0)


async def run(plan: Plan[T], *, shield: bool = False) -> T:
    """Run a plan. After an error or a cancellation, what the plan still does is clean-up: it runs under a shield,
    and every wait in it is bounded.

    asyncio's own `Task.cancel()` passes through a shield: it waits until the clean-up is done, and comes out then.
    A cancellation comes out even if the clean-up fails; what that raised is its cause.
    """
    cancelled: BaseException | None = None
    thrown: BaseException | None = None
    with anyio.CancelScope(shield=shield) as scope:
        try:
            step = plan.send(None)
            while True:
                try:
                    came = await _do(step)
                except BaseException as error:
                    if scope.shield and isinstance(error, anyio.get_cancelled_exc_class()):
                        cancelled = error
                        if not isinstance(step, Talk):
                            continue
                    if isinstance(error, anyio.get_cancelled_exc_class()):
                        thrown = error
                    scope.shield = True
                    step = plan.throw(error)
                else:
                    step = plan.send(came)
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            result: T = stop.value
            return result
        except Exception as error:
            if (lost := cancelled or thrown) is not None:  # asyncio tells of it once
                raise lost from error
            raise
    raise AssertionError("a cancel scope has swallowed what it did not begin")


async def _do(step: Talk | Gone | Ended) -> Any:
    if isinstance(step, Talk):
        attach(step.link.tree)
        return await talk(step.link, step.flow, timeout=step.timeout)
    if isinstance(step, Gone):
        return await _wait(step.links[0].tree, step.links, step.timeout)
    return await _ended(step.tree, step.timeout)


async def shielded(plan: Plan[T]) -> T:
    """Run a plan that cleans up: to its end, even under cancellation; every wait in it is bounded."""
    return await run(plan, shield=True)
