"""`ramet doctor`: what this machine allows, and what to change.

Every answer is tried where that is possible, in a child process that ends at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

__all__ = ["Check", "examine", "report"]

Status = Literal["ok", "note", "problem"]

_FEW = 100
_WIDTH = 23
_PROBE_TIMEOUT = 10.0
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_COLLAPSE_SINCE = (6, 1)
_PACKAGES = ("uvloop", "trio", "numpy", "gymnasium", "rich")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        status: `"problem"` if ramet cannot work with it, `"note"` if something is smaller or slower than it could
            be.
        found: what there is.
        advice: what to change; empty if nothing.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def examine() -> Iterator[Check]:
    """Look at this machine."""
    yield _python()
    yield _system()
    if hasattr(os, "fork"):
        yield _fork()
    if sys.platform == "linux":
        yield _sibling()
        yield from _limits()
        yield _overcommit()
        yield _huge_pages()
        yield _user_namespaces()
        yield _overlay()
    yield _loops()
    yield _packages()


def report(checks: Iterable[Check]) -> Iterator[str]:
    """The checks as lines."""
    problems = 0
    for check in checks:
        problems += check.status == "problem"
        yield f"{check.status:<8} {check.name:<{_WIDTH}} {check.found}"
        if check.advice:
            yield f"{'':<{_WIDTH + 9}} → {check.advice}"
    yield ""
    plural = "" if problems == 1 else "s"
    yield f"{problems} problem{plural}: ramet cannot fork here" if problems else "ramet can fork here"


# -- the interpreter and the system --------------------------------------------------------------


def _python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()}"
    if sys.implementation.name != "cpython":
        return Check("Python", "problem", found, "use CPython 3.11 or later")
    return Check("Python", "ok", found)


def _system() -> Check:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    name = platform.system()
    if name == "Windows":
        return Check("system", "problem", found, "there is no fork here: only direct and clone work")
    if name != "Linux":
        return Check("system", "note", found, "only Linux is tested; here a killed agent may leave processes")
    return Check("system", "ok", found)


def _fork() -> Check:
    began = time.perf_counter()
    trouble = _in_child(lambda: "")
    took = time.perf_counter() - began
    if trouble:
        return Check("fork", "problem", trouble, "a container's seccomp profile or a limit forbids it")
    return Check("fork", "ok", f"a child of this process has come and gone in {took * 1e3:.1f} ms")


def _sibling() -> Check:
    """Whether a child can make a child of ours, which is how branches are made."""
    from ramet.process import fork

    answer = _in_child(_make_sibling) if fork.sibling_works() else "not on this architecture"
    if answer.isdigit():
        with contextlib.suppress(ChildProcessError):  # it was another's after all
            os.waitpid(int(answer), 0)
            return Check("CLONE_PARENT", "ok", "branches are forked once")
    return Check("CLONE_PARENT", "note", answer, "branches are forked twice instead, at twice the cost")


def _make_sibling() -> str:
    from ramet.process import fork

    pid = fork.sibling()
    if pid == 0:
        os._exit(0)
    return str(pid)


def _in_child(probe: Callable[[], str]) -> str:
    """What `probe` says in a forked child, or how it failed; empty if all is well."""
    reader, writer = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        os.close(writer)
        os.close(reader)
        return error.strerror or str(error)
    if child == 0:
        _say_and_leave(probe, writer)
    os.close(writer)
    answered = bool(select.select([reader], [], [], _PROBE_TIMEOUT)[0])
    if not answered:
        os.kill(child, signal.SIGKILL)
    said = os.read(reader, 4096).decode(errors="replace")
    os.close(reader)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answered:
        return f"no answer within {_PROBE_TIMEOUT:g} s"
    return said[1:] if said else f"the child ended with status {status}"


def _say_and_leave(probe: Callable[[], str], writer: int) -> NoReturn:
    text = ""
    try:
        text = probe()
    except OSError as error:
        text = error.strerror or str(error)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        os.write(writer, f":{text}".encode())  # never empty, as is the end of a child that died
        os._exit(0)


# -- limits --------------------------------------------------------------------------------------


def _limits() -> Iterator[Check]:
    from ramet.process.limits import limits, raise_descriptor_limit

    raise_descriptor_limit()  # as every agent does
    for limit in limits():
        found = f"{limit.value:,}, {limit.used:,} in use: room for {limit.free:,} branches"
        if limit.free < 1:
            yield Check(limit.name, "problem", found, limit.advice)
        elif limit.free < _FEW:
            yield Check(limit.name, "note", found, limit.advice)
        else:
            yield Check(limit.name, "ok", found)


# -- memory --------------------------------------------------------------------------------------


def _overcommit() -> Check:
    if _text("/proc/sys/vm/overcommit_memory") == "2":
        advice = "`sysctl vm.overcommit_memory=0`, or forks of a large heap fail although they copy nothing"
        return Check("overcommit", "note", "every fork must be able to copy the whole heap", advice)
    return Check("overcommit", "ok", "a fork needs memory for what it changes only")


def _huge_pages() -> Check:
    chosen = _chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    collapse = _kernel() >= _COLLAPSE_SINCE
    found = f"transparent huge pages: {chosen or 'not built in'}" + (
        "; an existing heap can be gathered" if collapse else ""
    )
    if chosen not in ("always", "madvise"):
        advice = "large heaps fork faster with `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
        return Check("huge pages", "note", found, advice)
    return Check("huge pages", "ok", found)


def _chosen(path: str) -> str:
    """The word in brackets, as in `always [madvise] never`."""
    return _text(path).partition("[")[2].partition("]")[0]


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _kernel() -> tuple[int, ...]:
    numbers = platform.release().split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


# -- namespaces ----------------------------------------------------------------------------------


def _user_namespaces() -> Check:
    trouble = _in_child(lambda: _unshare(_CLONE_NEWUSER))
    if trouble:
        return Check(
            "user namespaces",
            "note",
            f"not allowed: {trouble}",
            "forks do not need them; copies of files will. " + _namespace_advice(),
        )
    return Check("user namespaces", "ok", "allowed")


def _namespace_advice() -> str:
    for name, bad in (
        ("kernel.unprivileged_userns_clone", "0"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1"),
        ("user.max_user_namespaces", "0"),
    ):
        if _text(f"/proc/sys/{name.replace('.', '/')}") == bad:
            return f"the setting {name} is {bad}"
    return "a container's seccomp profile may forbid them"


def _overlay() -> Check:
    with tempfile.TemporaryDirectory(prefix="ramet-doctor-") as folder:
        trouble = _in_child(lambda: _try_overlay(folder))
    if trouble:
        advice = "forks do not need it; copies of files will be slower without"
        return Check("overlayfs", "note", f"cannot be mounted: {trouble}", advice)
    return Check("overlayfs", "ok", "can be mounted in a user namespace")


def _unshare(flags: int) -> str:
    """Enter new namespaces; the only user of the new one is the one that we are."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc().unshare(flags):
        return os.strerror(ctypes.get_errno())
    if flags & _CLONE_NEWUSER:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return ""


def _try_overlay(folder: str) -> str:
    """Mount an overlay over a directory where nobody else can see it, write to it, and see what was written."""
    if trouble := _unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return trouble
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
    _mount("tmpfs", folder, "tmpfs", 0, None)
    lower, upper, work, merged = (Path(folder, name) for name in ("lower", "upper", "work", "merged"))
    for directory in (lower, upper, work, merged):
        directory.mkdir()
    (lower / "file").write_text("lower")
    _mount("overlay", str(merged), "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")
    (merged / "file").write_text("upper")
    texts = [(directory / "file").read_text() for directory in (lower, upper)]
    return "" if texts == ["lower", "upper"] else f"it does not copy on write: {texts}"


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    if _libc().mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# -- what is installed ---------------------------------------------------------------------------


def _loops() -> Check:
    found = ["asyncio", *(name for name in ("uvloop", "trio") if _version(name))]
    advice = "" if "uvloop" in found else 'uvloop steps more branches a second: pip install "ramet[uvloop]"'
    return Check("event loops", "note" if advice else "ok", ", ".join(found), advice)


def _packages() -> Check:
    found = [f"{name} {version}" for name in _PACKAGES if (version := _version(name))]
    return Check("packages", "ok", ", ".join(found) or "none of the optional ones")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
