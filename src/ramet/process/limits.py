"""How many more processes and descriptors this machine allows."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ramet.errors import BranchLimitError
from ramet.process.descriptors import MAX_FDS

if sys.platform != "win32":
    import resource

__all__ = ["Headroom", "Limit", "limits", "no_room", "raise_descriptor_limit"]

_FRESH_FOR = 0.5
_RESERVE_FDS = 16  # for the event loop, the warden's connection and whatever the agent does meanwhile
_RESERVE_MEMORY = 64 << 20
_MEMORY_EACH = 1 << 20
_OPEN_FILES = "RLIMIT_NOFILE"


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of the machine.

    Attributes:
        name: what it is called where one can change it.
        value: the limit.
        used: how much of it is in use.
        advice: how to raise it.
    """

    name: str
    value: int
    used: int
    advice: str

    @property
    def free(self) -> int:
        """How much is left."""
        return max(0, self.value - self.used)


class Headroom:
    """Knows the limits without reading them before every fork."""

    def __init__(self) -> None:
        self._read_at = float("-inf")
        self._left = 0

    def require(self, count: int) -> None:
        """Check that `count` more branches fit.

        Raises:
            BranchLimitError: they do not.
        """
        if count * 4 > self._left or time.monotonic() - self._read_at > _FRESH_FOR:
            self._read(count)
        self._left -= count

    def _read(self, count: int) -> None:
        self._left, left = 0, 1 << 30
        for limit in limits():
            needed, reserve = count, 0
            if limit.name == _OPEN_FILES:  # a branch takes two while it is made and one afterwards
                needed, reserve = count + min(count, MAX_FDS), _RESERVE_FDS
            if limit.free - reserve < needed:
                raise _error(limit, needed, limit.advice)
            left = min(left, limit.free - reserve)
        self._left, self._read_at = left, time.monotonic()


def no_room(error: OSError, needed: int) -> BranchLimitError:
    """The error for a system call that found no room for `needed` more: it names the limit that was met."""
    text = error.strerror or str(error)
    for limit in _of(error.errno):
        if limit.free < needed or error.errno == errno.EMFILE:
            return _error(limit, needed, f"{text}: {limit.advice}")
    return BranchLimitError(
        "the system's room for processes",
        value=0,
        used=0,
        needed=needed,
        advice=f"{text}: look at memory, pids.max and RLIMIT_NPROC with `ramet doctor`",
    )


def _of(number: int | None) -> Iterator[Limit]:
    """The limits that a system call may have met when it failed with this number."""
    if number == errno.EMFILE:
        yield from _descriptors()
    elif number in (errno.EAGAIN, errno.ENOMEM):
        yield from _processes()
        yield from _memory()


def _error(limit: Limit, needed: int, advice: str) -> BranchLimitError:
    return BranchLimitError(limit.name, value=limit.value, used=limit.used, needed=needed, advice=advice)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limits() -> Iterator[Limit]:
    """The limits that bound the number of branches, each in its own unit."""
    yield from _descriptors()
    yield from _processes()
    yield from _memory()


def _descriptors() -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    try:
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        if error.errno != errno.EMFILE:
            return  # no /proc here
        used = soft
    yield Limit(_OPEN_FILES, soft, used, "raise it with `ulimit -n`, or keep fewer branches alive at once")


def _processes() -> Iterator[Limit]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/loadavg") as file:
            total = int(file.read().split()[3].split("/")[1])
        yield Limit("kernel.pid_max", _number("/proc/sys/kernel/pid_max"), total, "raise it with sysctl")
        yield Limit("kernel.threads-max", _number("/proc/sys/kernel/threads-max"), total, "raise it with sysctl")
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY and os.getuid() != 0:
            # It bounds the threads of one user; they are counted only if those of all users come near.
            used = total if total * 2 < soft else _threads_of(os.getuid())
            yield Limit("RLIMIT_NPROC", soft, used, "raise it with `ulimit -u`")
    for folder in _cgroups("pids"):
        with contextlib.suppress(OSError, ValueError):
            value = _number(f"{folder}/pids.max")
            used = _number(f"{folder}/pids.current")
            yield Limit("cgroup pids.max", value, used, "start the container with a higher --pids-limit")


def _memory() -> Iterator[Limit]:
    for folder in _cgroups("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):
                value = _number(f"{folder}/{limit}")
                used = _number(f"{folder}/{usage}") - _reclaimable(folder)
                yield Limit(
                    f"cgroup {limit} in MiB", value // _MEMORY_EACH, used // _MEMORY_EACH, "a branch takes about 1 MiB"
                )
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024 - _RESERVE_MEMORY
                yield Limit("available memory in MiB", max(0, free // _MEMORY_EACH), 0, "a branch takes about 1 MiB")
                return


def _threads_of(user: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                tasks = os.stat(f"/proc/{name}/task")
                if tasks.st_uid == user:
                    count += tasks.st_nlink - 2
    return count


def _reclaimable(folder: str) -> int:
    """The bytes of a memory cgroup's use that are file cache nobody waits for."""
    with open(f"{folder}/memory.stat") as file:
        for line in file:
            if line.startswith(("inactive_file ", "total_inactive_file ")):
                return int(line.split()[1])
    return 0


def _cgroups(controller: str) -> Iterator[str]:
    """The folders of this process's cgroup that bound `controller`, in version 1 or 2."""
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controllers == "" or controller in controllers.split(","):
                root = "/sys/fs/cgroup" if controllers == "" else f"/sys/fs/cgroup/{controller}"
                yield f"{root}{path}"
                if path != "/":
                    yield root  # inside a container the path is the host's, and the root is ours


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())
