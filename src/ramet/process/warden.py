"""The small process above every process tree.

It is the parent of every process of the tree and the only one that reaps: it tells the agent who ended and
how, kills whom the agent names, and ends the whole tree when the agent goes away. It runs no code of the
environment, no event loop and no thread.

On the control connection, requests are `[seen, op, ...]`, where `seen` is the number of deaths that the agent
knows of, and what the warden says is `[pid, status]`, one for each death, in order.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final, NoReturn

import msgpack

from ramet.process import fork as forks
from ramet.process.descriptors import receive
from ramet.process.server import Server
from ramet.protocol.wire import FrameReader, frame

__all__ = ["KILL", "SPAWN", "Warden", "main"]

KILL: Final = 1  # pids: end these and what they have started
SPAWN: Final = 2  # (a descriptor comes along): start a blank process that serves on it -> [pid, None] at once

_PR_SET_CHILD_SUBREAPER = 36


def main(control: int, pickle: int) -> NoReturn:
    """The body of the warden's process; `control` is the descriptor of the connection to the agent."""
    code = 1
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the agent's thread may have blocked SIGCHLD
        os.set_inheritable(control, False)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # or prints vanish at a SIGKILL
        sys.argv[:] = [""]
        warden = Warden(socket.socket(fileno=control), pickle=bool(pickle))
        warden.run()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


class Warden:
    """Watches over one tree of processes.

    Args:
        control: the connection to the agent.
        server: the environment that this very process holds, if the agent forked itself.
        pickle: passed on to the servers.
    """

    def __init__(self, control: socket.socket, *, server: Server | None = None, pickle: bool = False) -> None:
        self._control = control
        self._server = server
        self._pickle = pickle
        self._reader = FrameReader()
        self._fds: list[int] = []
        self._groups: list[int] = []
        self._outgoing = bytearray()
        self._deaths: list[int] = []  # the pids of the deaths that the agent may not know of yet
        self._acknowledged = 0
        control.setblocking(False)
        become_subreaper()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.set_wakeup_fd(self._wake_out, warn_on_full_buffer=False)

    def run(self) -> None:
        """Watch until the agent goes away, then end the tree."""
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        if self._server is not None:
            poll.register(self._server.sock, select.POLLIN)
        try:
            while True:
                poll.register(self._control, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
                for fd, _ in poll.poll():
                    if fd == self._wake_in:
                        _drain(self._wake_in)
                        self._reap()
                    elif fd == self._control.fileno():
                        if not self._listen():
                            return
                    elif not self._serve():
                        poll.unregister(fd)
        finally:
            end_all(self._groups)

    def _serve(self) -> bool:
        """One turn of the environment in this process; in a forked child it never returns."""
        assert self._server is not None
        try:
            turn = self._server.turn()
        except ConnectionError:
            return False  # the agent has let this checkpoint go before it had our answer; its branches live on
        if turn:
            self._leave()
            self._server.serve()
        return turn is not None

    def _leave(self) -> None:
        """In a child: nothing of the warden stays behind."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (self._wake_in, self._wake_out, self._control.fileno()):
            os.close(fd)
        self._control.detach()

    def _listen(self) -> bool:
        """Do what the agent asks; false when it is gone."""
        self._send()
        try:
            data, fds = receive(self._control)
        except BlockingIOError:
            return True
        if not data:
            return False
        self._fds += fds
        self._reader.feed(data)
        while (payload := self._reader.next()) is not None:
            seen, op, *arguments = msgpack.unpackb(payload)
            del self._deaths[: seen - self._acknowledged]
            self._acknowledged = max(seen, self._acknowledged)
            _OPS[op](self, *arguments)
        return True

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            # A pid whose death the agent has not heard of yet may be another process by now.
            if sys.platform != "linux":
                self._kill_stranger(pid)
            elif pid not in self._deaths and is_child(pid):
                kill_family(pid)

    def _kill_stranger(self, pid: int) -> None:
        """Without a subreaper a branch is nobody's child here, and its exit status is not known."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        if pid not in self._groups:
            self._deaths.append(pid)
            self._tell(pid, int(signal.SIGKILL))

    def _spawn(self) -> None:
        end = self._fds.pop(0)
        warden = os.getpid()
        try:
            pid = forks.offspring()
        except OSError:
            os.close(end)  # the agent reads the end of the stream
            self._tell(0, None)
            return
        if pid == 0:
            self._leave()
            os.setpgid(0, 0)
            forks.set_parent_death_signal()
            if os.getppid() != warden:
                os._exit(0)
            Server(socket.socket(fileno=end), warden=warden, pickle=self._pickle).serve()
        os.close(end)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        self._groups.append(pid)
        self._tell(pid, None)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._deaths.append(pid)
            self._tell(pid, status)

    def _tell(self, pid: int, status: int | None) -> None:
        self._outgoing += frame(msgpack.packb([pid, status]))
        self._send()

    def _send(self) -> None:
        """Write what fits: the warden never waits for the agent to read."""
        try:
            while self._outgoing:
                del self._outgoing[: self._control.send(self._outgoing)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outgoing.clear()  # the end of the stream is read in a moment


_OPS: dict[int, Callable[..., None]] = {KILL: Warden._kill, SPAWN: Warden._spawn}


def become_subreaper() -> None:
    """Become the parent of orphans below this process. Does nothing outside Linux."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(pid: int | str = "self") -> list[int]:
    """The living and unreaped children of a process; empty if it is gone or the system cannot say."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def is_child(pid: int) -> bool:
    """Whether `pid` is a child of this process that was not reaped."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def kill_family(pid: int) -> None:
    """Kill a process and what it has started (and has not orphaned)."""
    started = children(pid)
    with contextlib.suppress(OSError):  # gone, or of another user
        os.kill(pid, signal.SIGKILL)
    for child in started:
        kill_family(child)


def end_all(groups: list[int]) -> None:
    """Kill every process below this one, and reap until there is none that can be killed."""
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)  # one operation: nothing can fork past it
    while True:
        killed = [pid for pid in children() if _kill(pid)]
        try:
            if os.waitpid(-1, 0 if killed else os.WNOHANG)[0] == 0:
                return  # what is left belongs to another user
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _kill(pid: int) -> bool:
    """Kill a process; whether it will end."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return True


def _ignore(signum: int, frame: Any) -> None:
    """Be woken by the signal's byte in the pipe, and do nothing here."""


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass
