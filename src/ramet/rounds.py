"""Run one conversation on each of many connections, in one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from ramet.drive import reason, send_at_once, send_rest
from ramet.errors import BranchBusy, ProtocolError, StepTimeout
from ramet.process.link import Link
from ramet.protocol.flows import Flow, Post
from ramet.pump import open_port

__all__ = ["talk_all"]

T = TypeVar("T")

_CHUNK = 65536


async def talk_all(talks: Sequence[tuple[Link, Flow[T]]]) -> list[T | Exception]:
    """Run one conversation on each of many connections, in one task, each for as long as its `step_timeout` allows.

    Returns:
        For each its result, or the exception that it raised. Cancelled, every connection stays usable.
    """
    round_ = _Round(talks)
    limits = [math.inf if (limit := link.tree.step_timeout) is None else limit for link, _ in talks]
    began = anyio.current_time()
    try:
        for limit in sorted(set(limits)):
            with anyio.CancelScope(deadline=began + limit):
                await round_.finish()
            round_.expire([number for number in round_.waiting if limits[number] <= limit], limit)
    finally:
        round_.leave()
    return [await reason(talks[i][0]) if isinstance(r, EOFError) else r for i, r in enumerate(round_.results)]


class _Round:
    """Many conversations at once: all requests first, then whatever answer comes next."""

    def __init__(self, talks: Sequence[tuple[Link, Flow[Any]]]) -> None:
        self.talks = talks
        self.results: list[Any] = [None] * len(talks)
        self.waiting: dict[int, bytes | Post | None] = {}
        self._ready: list[int] = []
        self._event = anyio.Event()
        for number, (link, flow) in enumerate(talks):
            try:
                link.check()
                if link.busy:
                    raise BranchBusy(link.name)
            except Exception as error:
                self.results[number] = error
                continue
            link.busy = True
            self.waiting[number] = None
            self._advance(number, lambda flow=flow: flow.send(None))  # type: ignore[misc]

    async def finish(self) -> None:
        """Go on until every conversation is over."""
        for number in list(self.waiting):
            await self._start(number)
        while self.waiting:
            if not self._ready:
                await self._event.wait()
            self._event = anyio.Event()
            ready, self._ready = self._ready, []
            for number in ready:
                if number in self.waiting:
                    self._read(number)

    async def _start(self, number: int) -> None:
        link, flow = self.talks[number]
        wanted = self.waiting[number]
        if wanted is None:
            return
        try:
            sent = send_at_once(link, wanted)
            if sent is not None:
                await send_rest(link, wanted, sent)
        except EOFError as error:
            self._settle(number, error)
            return
        if link.port is None:
            link.port = open_port(link.sock)
        link.port.waker = partial(self._wake, number)
        self._advance(number, lambda: flow.send(None))
        if link.port.ready:
            self._wake(number)

    def _wake(self, number: int) -> None:
        self._ready.append(number)
        self._event.set()

    def _read(self, number: int) -> None:
        link, flow = self.talks[number]
        try:
            while number in self.waiting and (payload := _read_now(link)) is not None:
                message = link.peer.decode(payload)
                self._advance(number, lambda message=message: flow.send(message))  # type: ignore[misc]
        except (EOFError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                link.tree.kill([link])
                link.shut(error)
            self._settle(number, error)

    def _advance(self, number: int, resume: Callable[[], Any]) -> None:
        try:
            self.waiting[number] = resume()
        except StopIteration as stop:
            self._settle(number, stop.value)
        except Exception as error:
            if isinstance(error, ProtocolError):
                link = self.talks[number][0]
                link.tree.kill([link])
                link.shut(error)
            self._settle(number, error)

    def _settle(self, number: int, result: Any) -> None:
        link = self.talks[number][0]
        self.results[number] = result
        del self.waiting[number]
        link.busy = False
        if link.port is not None:
            link.port.waker = None

    def expire(self, numbers: Iterable[int], timeout: float) -> None:
        """End the branches whose calls took too long."""
        for number in numbers:
            link, flow = self.talks[number]
            late = StepTimeout(link.name, pid=link.pid, timeout=timeout)
            flow.close()
            self._settle(number, late)
            link.tree.kill([link])
            link.shut(late)

    def leave(self) -> None:
        """Let go of the conversations that are not over; their late answers will be skipped."""
        for number in list(self.waiting):
            self.talks[number][1].close()
            self._settle(number, self.results[number])


def _read_now(link: Link) -> bytes | None:
    """The next payload, if it has come in whole."""
    while (payload := link.inbox.next()) is None:
        try:
            data = link.sock.recv(_CHUNK)
        except BlockingIOError:
            if link.port is not None:
                link.port.ready = False
            return None
        except OSError:
            raise EOFError from None
        if not data:
            raise EOFError
        link.inbox.feed(data)
    return payload
