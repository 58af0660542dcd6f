"""One epoll over all the branches' sockets, itself registered once with the event loop.

A thousand sockets that are each registered with asyncio or trio cost more than what is read from them. Here each
is registered once, edge-triggered, with an epoll set of our own; the loop watches that set. A wait costs no system
call. Where there is no epoll, anyio's own waiting serves.

Edge-triggered means: a port is told once that something came. Its reader must read until less comes than it asked
for, and must be ready for `EAGAIN`.

A port belongs to one run of an event loop. A later run that uses it moves it into its own pump.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import anyio
import anyio.lowlevel

__all__ = ["Port", "open_port", "running_on_trio"]

_MAX_EVENTS = 512
_READING = select.EPOLLIN | select.EPOLLET if hasattr(select, "epoll") else 0
_WRITING = _READING | select.EPOLLOUT if hasattr(select, "epoll") else 1


class Port:
    """One socket in the pump.

    Attributes:
        ready: something may be there to read, or there may be room to write if that is watched.
        ended: the other side has closed; no more events will tell of what is left to read.
        waker: called, on the loop's thread, when something came.
    """

    __slots__ = ("_events", "_fd", "_pump", "_sock", "ended", "ready", "waker")

    def __init__(self, sock: socket.socket, pump: _Pump | None) -> None:
        self.ready = False
        self.ended = False
        self.waker: Callable[[], object] | None = None
        self._sock = sock
        self._fd = sock.fileno()
        self._pump = pump
        self._events = _READING
        if pump is not None:
            pump.add(self, self._fd, _READING)

    async def wait(self) -> None:
        """Wait until something came. One waiter at a time; a cancelled wait leaves nothing behind."""
        self.settle()
        if self._pump is not None:
            await self._pump.wait(self)
        elif self._events == _READING:
            with contextlib.suppress(anyio.ClosedResourceError):
                await anyio.wait_readable(self._sock)
        else:
            async with anyio.create_task_group() as tasks:
                for wait in (anyio.wait_readable, anyio.wait_writable):
                    tasks.start_soon(_first, wait, self._sock, tasks.cancel_scope)

    def settle(self, *, keep_waker: bool = False) -> None:
        """Move into the pump of the running event loop, if it is in that of another run."""
        pump = self._pump
        if pump is not None and not pump.here():
            if not keep_waker:
                self.waker = None  # of a run that is over
            pump.remove(self._fd)
            self._pump = pump = _pump_here()
            pump.add(self, self._fd, self._events)

    def watch_writing(self, on: bool) -> None:
        """Tell also when there is room to write, or stop telling it."""
        self._events = _WRITING if on else _READING
        if self._pump is not None:
            self._pump.watch(self._fd, self._events)

    def close(self) -> None:
        """Leave the pump, and wake who waits."""
        pump, self._pump = self._pump, None
        if pump is not None:
            pump.remove(self._fd)
        elif self._fd >= 0:
            with contextlib.suppress(Exception):
                anyio.notify_closing(self._sock)
        self._fd = -1
        self.ready = True
        if self.waker is not None:
            self.waker()


async def _first(
    wait: Callable[[socket.socket], Awaitable[None]], sock: socket.socket, scope: anyio.CancelScope
) -> None:
    with contextlib.suppress(anyio.ClosedResourceError):
        await wait(sock)
    scope.cancel()


class _Pump:
    """The epoll set of one run of an event loop."""

    def __init__(self, attach: Callable[[_Pump], Callable[[], None]]) -> None:
        self.epoll = select.epoll()
        self._ports: dict[int, Port] = {}
        self._detach = attach(self)

    def add(self, port: Port, fd: int, events: int) -> None:
        self.epoll.register(fd, events)
        self._ports[fd] = port

    def watch(self, fd: int, events: int) -> None:
        self.epoll.modify(fd, events)

    def remove(self, fd: int) -> None:
        if self._ports.pop(fd, None) is not None:
            with contextlib.suppress(OSError, ValueError):
                self.epoll.unregister(fd)
        if not self._ports and not self.epoll.closed:
            self._detach()
            self.epoll.close()

    def dispatch(self) -> None:
        """Tell the ports to which something came; called by the loop."""
        if self.epoll.closed:
            return
        ports = self._ports
        for fd, events in self.epoll.poll(0, _MAX_EVENTS):
            port = ports.get(fd)
            if port is not None:
                port.ready = True
                port.ended = events & select.EPOLLHUP != 0
                if port.waker is not None:
                    port.waker()

    def here(self) -> bool:
        """Whether it belongs to the event loop that runs now."""
        raise NotImplementedError  # pragma: no cover

    def wait(self, port: Port) -> Awaitable[None]:
        raise NotImplementedError  # pragma: no cover


class _AsyncioPump(_Pump):
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        super().__init__(self._attach)

    def _attach(self, pump: _Pump) -> Callable[[], None]:
        self._loop.add_reader(self.epoll.fileno(), self.dispatch)
        return self._remove_reader

    def _remove_reader(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed before
            self._loop.remove_reader(self.epoll.fileno())

    def here(self) -> bool:
        return asyncio._get_running_loop() is self._loop

    async def wait(self, port: Port) -> None:
        future = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        port.waker = wake
        try:
            await future
        finally:
            port.waker = None


class _TrioPump(_Pump):
    def __init__(self) -> None:
        import trio

        self._trio = trio.lowlevel
        self._token = trio.lowlevel.current_trio_token()
        self._closed_error = trio.ClosedResourceError
        super().__init__(self._attach)

    def _attach(self, pump: _Pump) -> Callable[[], None]:
        self._trio.spawn_system_task(self._watch, name="ramet pump")
        return self._stop

    async def _watch(self) -> None:
        with contextlib.suppress(self._closed_error):
            while not self.epoll.closed:
                await self._trio.wait_readable(self.epoll.fileno())
                self.dispatch()

    def _stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the run has ended before
            self._trio.notify_closing(self.epoll.fileno())

    def here(self) -> bool:
        try:
            return self._trio.current_trio_token() is self._token
        except RuntimeError:
            return False

    async def wait(self, port: Port) -> None:
        task = self._trio.current_task()

        def wake() -> None:
            port.waker = None
            self._trio.reschedule(task)

        def abort(_: Any) -> Any:
            port.waker = None
            return self._trio.Abort.SUCCEEDED

        port.waker = wake
        await self._trio.wait_task_rescheduled(abort)


class _MakePump(Protocol):
    def __call__(self) -> _Pump: ...


_current: anyio.lowlevel.RunVar[_Pump | None] = anyio.lowlevel.RunVar("ramet pump", None)


def open_port(sock: socket.socket) -> Port:
    """Put a non-blocking socket into the pump of the running event loop."""
    return Port(sock, _pump_here() if hasattr(select, "epoll") else None)


def _pump_here() -> _Pump:
    pump = _current.get()
    if pump is None or pump.epoll.closed:
        make: _MakePump = _TrioPump if running_on_trio() else _AsyncioPump
        pump = make()
        _current.set(pump)
    return pump


def running_on_trio() -> bool:
    """Whether the current task runs on trio."""
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    in_trio_task = getattr(lowlevel, "in_trio_task", None)  # another thread may be in the middle of the import
    return in_trio_task is not None and in_trio_task()
