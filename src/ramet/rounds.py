"""Run one conversation on each of many connections, in one task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import anyio

from ramet.drive import Rest, reason, send_at_once
from ramet.errors import BranchBusy, BranchLimitError, ProtocolError, StepTimeout
from ramet.process.link import Link
from ramet.protocol.flows import Flow, Post
from ramet.pump import open_port

__all__ = ["talk_all"]

T = TypeVar("T")

_CHUNK = 65536


async def talk_all(talks: Sequence[tuple[Link, Flow[T]]]) -> list[T | Exception]:
    """Run one conversation on each of many connections, in one task, each for as long as its `step_timeout` allows.

    Returns:
        For each its result, or the exception that it raised. Cancelled, every connection stays usable, but for
        those whose request is half written: they are lost.
    """
    round_ = _Round(talks)
    limits = [math.inf if (limit := link.tree.step_timeout) is None else limit for link, _ in talks]
    began = anyio.current_time()
    try:
        round_.start()
        for limit in sorted(set(limits)):
            with anyio.CancelScope(deadline=began + limit):
                await round_.finish()
            round_.expire([number for number in round_.waiting if limits[number] <= limit], limit)
    finally:
        round_.leave()
    return [await reason(talks[i][0]) if isinstance(r, EOFError) else r for i, r in enumerate(round_.results)]


class _Round:
    """Many conversations at once: all requests first, then whatever answer comes next.

    A request for which there is no room goes on when there is some; it holds up no other.
    """

    def __init__(self, talks: Sequence[tuple[Link, Flow[Any]]]) -> None:
        self.talks = talks
        self.results: list[Any] = [None] * len(talks)
        self.waiting: dict[int, bytes | Post | None] = {}
        self._rests: dict[int, Rest] = {}
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

    def start(self) -> None:
        """Send every request, as far as there is room."""
        for number in list(self.waiting):
            self._go_on(number, self._start)

    async def finish(self) -> None:
        """Go on until every conversation is over."""
        while self.waiting:
            if not self._ready:
                await self._event.wait()
            self._event = anyio.Event()
            ready, self._ready = self._ready, []
            for number in ready:
                if number in self.waiting:
                    self._go_on(number, self._read)

    def _go_on(self, number: int, how: Callable[[int], None]) -> None:
        try:
            how(number)
        except (EOFError, BranchLimitError) as error:
            self._settle(number, error)
        except ProtocolError as error:
            self._end(number, error)

    def _start(self, number: int) -> None:
        link, flow = self.talks[number]
        wanted = self.waiting[number]
        left = None if wanted is None else send_at_once(link, wanted)
        if link.port is None:
            link.port = open_port(link.sock)
        else:
            link.port.settle()
        link.port.waker = partial(self._wake, number)
        if left is not None:
            self._rests[number] = Rest(link, left)
            self._wake(number)  # a late answer may be there to be taken in
            return
        if wanted is not None:
            self._advance(number, lambda: flow.send(None))
        if link.port is not None and link.port.ready:
            self._wake(number)

    def _wake(self, number: int) -> None:
        self._ready.append(number)
        self._event.set()

    def _read(self, number: int) -> None:
        link, flow = self.talks[number]
        rest = self._rests.get(number)
        if rest is not None:
            if not rest.go_on():
                if rest.port.ready:
                    self._wake(number)
                return
            del self._rests[number]
            rest.leave("")
            self._advance(number, lambda: flow.send(None))
        while number in self.waiting and (payload := _read_now(link)) is not None:
            message = link.peer.decode(payload)
            self._advance(number, lambda message=message: flow.send(message))  # type: ignore[misc]

    def _advance(self, number: int, resume: Callable[[], Any]) -> None:
        try:
            self.waiting[number] = resume()
        except StopIteration as stop:
            self._settle(number, stop.value)
        except Exception as error:
            if isinstance(error, ProtocolError):
                self._end(number, error)
            else:
                self._settle(number, error)

    def _end(self, number: int, error: ProtocolError | StepTimeout) -> None:
        """End a conversation and its branch."""
        link = self.talks[number][0]
        if (rest := self._rests.pop(number, None)) is not None:
            rest.leave("")
        self._settle(number, error)
        link.tree.kill([link])
        link.shut(error)

    def _settle(self, number: int, result: Any) -> None:
        link = self.talks[number][0]
        if (rest := self._rests.pop(number, None)) is not None:
            rest.leave("" if isinstance(result, EOFError) else "a call was given up")
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
            self._end(number, late)

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
