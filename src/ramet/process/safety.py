"""What stands in the way of a fork: threads, devices, connections, unflushed files.

The checks run before every fork, so they are cheap while nothing has changed: one `stat` for the
threads, one `fstat` for each descriptor.
"""

from __future__ import annotations

import gc
import io
import os
import socket
import stat
import sys
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ramet.errors import CannotBranch

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    import threading

__all__ = ["Safety", "connected_sockets", "python_threads", "thread_count"]

_IDLE_THREADS = ("tqdm_monitor",)
_Files = dict[int, tuple[int, int]]


def thread_count() -> int:
    """The number of threads of this process, native ones included."""
    try:
        return os.stat("/proc/self/task").st_nlink - 2
    except OSError:  # no /proc: count what Python knows
        return 1 + len(python_threads())


def python_threads() -> list[threading.Thread]:
    """The threads that Python has started, but for the main one."""
    # Not imported here: a module that nobody uses would make every fork slower by its own fork hook.
    module = sys.modules.get("threading")
    return [] if module is None else [t for t in module.enumerate() if t is not module.main_thread()]


class Safety:
    """Checks one process before its forks; a forked child goes on with what is known."""

    def __init__(self, own: Iterable[int] = ()) -> None:
        self.own = set(own)
        self._files: _Files = {}
        self._count = -1
        self._writers: list[weakref.ref[io.IOBase]] = []
        self._deleters: list[weakref.ref[Any]] = []
        self._told: set[str] = set()

    def check(
        self,
        *,
        allow_threads: bool,
        passing: Collection[int] = (),
        shared: Collection[int] | None = None,
        also: str = "",
    ) -> list[str]:
        """Flush what is buffered and look for hazards.

        Args:
            allow_threads: let Python threads pass.
            passing: descriptors that are here only for the fork itself.
            shared: the sockets that the children keep; all of them by default.
            also: another text to give.

        Returns:
            Texts for `ForkSafetyWarning`; each is given once in a line of processes.

        Raises:
            CannotBranch: children of this process could not work.
        """
        warnings = [] if thread_count() == 1 or _settled() else list(self._threads(allow_threads))
        if also:
            warnings += self._once(also)
        if not self._as_before(len(passing)):
            files = open_files({*self.own, *passing})
            warnings += self._look_at(files, set(files) if shared is None else set(files).intersection(shared))
        self.flush()
        return warnings

    def _as_before(self, passing: int) -> bool:
        """Whether the open files are those of the last look: as many, and each of them is there."""
        try:
            if os.stat("/proc/self/fd").st_size != self._count + passing:  # 0 before Linux 6.2
                return False
            for fd, known in self._files.items():
                status = os.fstat(fd)
                if (status.st_dev, status.st_ino) != known:
                    return False
        except OSError:
            return False
        return all(_usable(ref) for ref in self._writers)

    def _threads(self, allow: bool) -> Iterator[str]:
        python = python_threads()
        busy = [t.name for t in python if t.name not in _IDLE_THREADS]
        if busy and not allow:
            raise CannotBranch(
                "process_fork",
                f"the environment's process runs Python threads ({', '.join(busy)}), and a fork copies only one",
                instead="end them before the fork, or pass allow_threads=True if they hold no lock",
            )
        if python:
            yield from self._once(f"Python threads do not exist in the children: {_names(python)}")
        if thread_count() > 1 + len(python):
            yield from self._once(f"native threads do not exist in the children: {', '.join(native_threads(python))}")

    def _look_at(self, files: _Files, shared: set[int]) -> list[str]:
        warnings: list[str] = []
        for fd in files:
            target = _target(fd)
            if target.startswith("/dev/nvidia"):
                raise CannotBranch(
                    "process_fork",
                    f"the environment's process has {target} open (fd {fd}), and CUDA does not survive a fork",
                    instead="keep models in the agent or in a server of their own",
                )
        if "sockets" not in self._told:
            self._told.add("sockets")
            peers = connected_sockets(shared)
            if peers:
                warnings.append(
                    "the environment's process has open connections, which its copies would share: " + ", ".join(peers)
                )
        # Those known before are kept: the collector does not show what was frozen.
        self._writers = [ref for ref in self._writers if _usable(ref)]
        self._deleters = [ref for ref in self._deleters if ref() is not None]
        known = {id(ref()) for ref in (*self._writers, *self._deleters)}
        for thing in _find_owners(files):
            if id(thing) not in known:
                refs: list[Any] = self._writers if isinstance(thing, io.IOBase) else self._deleters
                refs.append(weakref.ref(thing))
        self._files = files
        self._count = len(files) + len(self.own) + 3
        return warnings

    def spare_files(self) -> None:
        """In a child: the temporary files of the parent are not deleted by who drops them here."""
        for ref in self._deleters:
            if (deleter := ref()) is not None:
                deleter.delete = False
        self._deleters.clear()

    def flush(self) -> None:
        """Write out what the standard streams and the open files hold back."""
        for stream in (sys.stdout, sys.stderr):
            _try_flush(stream)
        for ref in self._writers:
            _try_flush(ref())

    def _once(self, text: str) -> Iterator[str]:
        if text not in self._told:
            self._told.add(text)
            yield text


def _settled() -> bool:
    """Whether only one thread is left in a moment: one that was joined takes that long to leave the kernel."""
    if not python_threads():
        for _ in range(20):
            time.sleep(0.0005)
            if thread_count() == 1:
                return True
    return False


def open_files(except_for: Collection[int] = ()) -> _Files:
    """The open descriptors above stderr, each with its device and inode."""
    files: _Files = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        names = os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else []
    for name in names:
        fd = int(name)
        if fd > 2 and fd not in except_for:
            try:
                status = os.fstat(fd)
            except OSError:  # the descriptor of the listing itself
                continue
            files[fd] = (status.st_dev, status.st_ino)
    return files


def connected_sockets(fds: set[int]) -> list[str]:
    """A description of each connected socket among `fds`."""
    found = []
    for fd in sorted(fds):
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            probe = socket.socket(fileno=os.dup(fd))
            try:
                peer = probe.getpeername()
            except OSError:
                continue
            finally:
                probe.close()
            found.append(f"fd {fd} ({probe.family.name} to {_address(peer)})")
    return found


def native_threads(python: list[threading.Thread]) -> list[str]:
    """The names of this process's threads that Python did not start."""
    known = {t.native_id for t in python} | {os.getpid()}
    names = []
    for tid in os.listdir("/proc/self/task"):
        if int(tid) not in known:
            try:
                with open(f"/proc/self/task/{tid}/comm") as comm:
                    names.append(comm.read().strip())
            except OSError:
                continue  # it ended in the meantime
    return names


def _find_owners(files: _Files) -> Iterator[Any]:
    """Python's file objects that may hold unwritten bytes, and what deletes temporary files; looked for only if
    a descriptor is writable."""
    writable = {fd for fd in files if _is_writable(fd)}
    if not writable:
        return
    deleter = getattr(sys.modules.get("tempfile"), "_TemporaryFileCloser", None)
    for thing in gc.get_objects():
        if type(thing) in (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper, io.BufferedRWPair):
            try:
                found = thing.fileno() in writable
            except Exception:  # closed, detached, or made of something that raises what it likes
                continue
            if found:
                yield thing
        elif type(thing) is deleter:
            yield thing


def _is_writable(fd: int) -> bool:
    try:
        mode = os.fstat(fd).st_mode
        return not stat.S_ISSOCK(mode) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def _usable(ref: weakref.ref[io.IOBase]) -> bool:
    stream = ref()
    try:
        return stream is not None and not stream.closed
    except Exception:  # detached
        return False


def _try_flush(stream: object) -> None:
    try:
        stream.flush()  # type: ignore[attr-defined]
    except Exception:
        pass  # closed, replaced by something that is no file or raises what it likes, or its reader is gone


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _address(peer: object) -> str:
    if isinstance(peer, tuple):
        return ":".join(map(str, peer[:2]))
    return str(peer) or "an unnamed peer"


def _names(threads: list[threading.Thread]) -> str:
    return ", ".join(t.name for t in threads)
