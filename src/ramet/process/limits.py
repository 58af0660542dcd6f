"""How many more processes and descriptors this machine allows."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ramet.errors import BranchLimitError

__all__ = ["Headroom", "Limit", "limits", "raise_descriptor_limit"]

_FRESH_FOR = 0.5
_RESERVE_FDS = 16
_RESERVE_MEMORY = 64 << 20
_MEMORY_EACH = 1 << 20


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
        known = list(limits())
        for limit in known:
            if limit.free < count:
                raise BranchLimitError(
                    limit.name, value=limit.value, used=limit.used, needed=count, advice=limit.advice
                )
        self._left = min((limit.free for limit in known), default=1 << 30)
        self._read_at = time.monotonic()


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def limits() -> Iterator[Limit]:
    """The limits that bound the number of branches, in branches (one descriptor, one process each)."""
    yield from _descriptors()
    yield from _processes()
    yield from _memory()


def _descriptors() -> Iterator[Limit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    with contextlib.suppress(OSError):
        # A branch needs two while it is made and one afterwards.
        used = len(os.listdir("/proc/self/fd")) + _RESERVE_FDS
        yield Limit(
            "RLIMIT_NOFILE", soft, used, "raise it with `ulimit -n`, or keep fewer branches alive at once"
        )


def _processes() -> Iterator[Limit]:
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/loadavg") as file:
            total = int(file.read().split()[3].split("/")[1])
        yield Limit("kernel.pid_max", _number("/proc/sys/kernel/pid_max"), total, "raise it with sysctl")
        yield Limit(
            "kernel.threads-max", _number("/proc/sys/kernel/threads-max"), total, "raise it with sysctl"
        )
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
            yield Limit("RLIMIT_NPROC", soft, total, "raise it with `ulimit -u`")
    for folder in _pids_cgroups():
        with contextlib.suppress(OSError, ValueError):
            value = _number(f"{folder}/pids.max")
            used = _number(f"{folder}/pids.current")
            yield Limit("cgroup pids.max", value, used, "start the container with a higher --pids-limit")


def _memory() -> Iterator[Limit]:
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024 - _RESERVE_MEMORY
                yield Limit(
                    "available memory in MiB", max(0, free // _MEMORY_EACH), 0, "a branch takes about 1 MiB"
                )
                return


def _pids_cgroups() -> Iterator[str]:
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.strip().split(":", 2)
            if controllers == "" or "pids" in controllers.split(","):
                root = "/sys/fs/cgroup" if controllers == "" else "/sys/fs/cgroup/pids"
                yield f"{root}{path}"
                if path != "/":
                    yield root  # inside a container the path is the host's, and the root is ours


def _number(path: str) -> int:
    with open(path) as file:
        return int(file.read())
