"""Run flows and plans on anyio: the only place where the agent's side waits for a branch."""

from __future__ import annotations

import os
import socket
import weakref
from typing import Any, TypeVar

import anyio

from ramet.errors import BranchBusy, BranchClosed, BranchLost, ProtocolError, StepTimeout
from ramet.process.link import Ended, Gone, Link, Plan, Talk
from ramet.process.tree import Tree
from ramet.protocol.flows import Flow, Post
from ramet.pump import open_port

__all__ = ["attach", "reason", "run", "send_at_once", "send_rest", "shielded", "talk"]

T = TypeVar("T")

_CHUNK = 65536
_STATUS_WITHIN = 2.0


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
        if link.queue is None:
            link.queue = anyio.Lock(fast_acquire=True)
        async with link.queue:
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
                elif (sent := send_at_once(link, wanted)) is not None:
                    await send_rest(link, wanted, sent)
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
        if port is not None:
            if not port.ready:
                await port.wait()
            port.ready = port.ended
        try:
            data = link.sock.recv(_CHUNK)
        except BlockingIOError:
            if port is None:
                link.port = open_port(link.sock)
            continue
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        if port is not None and len(data) == _CHUNK:
            port.ready = True
        inbox.feed(data)


def send_at_once(link: Link, wanted: bytes | Post) -> int | None:
    """Write without waiting; `None` if all of it went, or else how many bytes did."""
    data, fds = (wanted.data, wanted.fds) if isinstance(wanted, Post) else (wanted, ())
    try:
        sent = socket.send_fds(link.sock, [data], fds) if fds else link.sock.send(data)
    except BlockingIOError:
        return 0
    except OSError:
        raise EOFError from None
    return None if sent == len(data) else sent


async def send_rest(link: Link, wanted: bytes | Post, sent: int) -> None:
    """Write what is left; the descriptors, if there are any, went with the first bytes."""
    left: bytes | Post | None = wanted if sent == 0 else _bytes_of(wanted)[sent:]
    begun = sent > 0
    try:
        while left is not None:
            await anyio.wait_writable(link.sock)
            sent_now = send_at_once(link, left)
            if sent_now is None:
                left = None
            elif sent_now:
                left, begun = _bytes_of(left)[sent_now:], True
    except (OSError, anyio.ClosedResourceError):
        raise EOFError from None
    except anyio.get_cancelled_exc_class():
        if begun:
            reason = "a call was cancelled while its request was half written"
            link.tree.kill([link])
            link.shut(BranchLost(link.name, pid=link.pid, reason=reason))
        raise


def _bytes_of(wanted: bytes | Post) -> bytes:
    return wanted.data if isinstance(wanted, Post) else wanted


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
    if tree.port is None and not tree.ended:
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
    """
    cancelled: BaseException | None = None
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
                    scope.shield = True
                    step = plan.throw(error)
                else:
                    step = plan.send(came)
        except StopIteration as stop:
            if cancelled is not None:
                raise cancelled from None
            result: T = stop.value
            return result
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
