"""The fork itself: three ways, one contract.

Each returns the child's pid in the parent and 0 in the child, runs Python's own fork hooks, and leaves
the state of the global `random` generator as it was (CPython reseeds it in every forked child).

* `sibling` makes the child a child of *our* parent, the warden, by the raw clone system call with
  `CLONE_PARENT`: the warden reaps it, we never see it, and it costs what a plain fork costs.
* `orphan` reaches the same by forking twice: the child's parent is the nearest subreaper, the warden.
  It serves where `sibling` does not hold: several threads, another architecture, a refused system call.
* `offspring` is a plain fork, for a warden that forks its own children.
"""

from __future__ import annotations

import ctypes
import os
import platform
import random
import signal
import sys
import warnings
from collections.abc import Callable

__all__ = ["offspring", "on_foreign_fork", "orphan", "set_parent_death_signal", "sibling", "sibling_works"]

_PR_SET_PDEATHSIG = 1
_PR_GET_TID_ADDRESS = 40
_CLONE_PARENT = 0x00008000
_CLONE_CHILD_CLEARTID = 0x00200000
_CLONE_CHILD_SETTID = 0x01000000

_NR_CLONE, _NR_SET_ROBUST_LIST, _NR_GET_ROBUST_LIST, _NR_PRCTL = {
    "x86_64": (56, 273, 274, 157),
    "aarch64": (220, 99, 100, 167),
}.get(platform.machine() if sys.platform == "linux" else "", (-1, -1, -1, -1))

_ours = False
_foreign_hooks: list[Callable[[], None]] = []


class _Libc:
    """The system calls, through handles that keep the GIL (nothing may run between clone and its hooks)."""

    def __init__(self) -> None:
        self.libc = ctypes.PyDLL(None, use_errno=True)
        self.syscall = self.libc.syscall
        self.syscall.restype = ctypes.c_long
        self.before = ctypes.pythonapi.PyOS_BeforeFork
        self.after_child = ctypes.pythonapi.PyOS_AfterFork_Child
        self.after_parent = ctypes.pythonapi.PyOS_AfterFork_Parent
        for hook in (self.before, self.after_child, self.after_parent):
            hook.restype = None
            hook.argtypes = ()
        self.death_signal = (_NR_PRCTL, _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0)
        self.clone_arguments = self._clone_arguments()

    def _clone_arguments(self) -> tuple[object, ...] | None:
        """What libc's own fork passes: the address of the thread's tid, so that libc stays consistent."""
        tid, head, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        if _NR_CLONE < 0 or self.libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid), 0, 0, 0) or not tid.value:
            return None
        if self.syscall(_NR_GET_ROBUST_LIST, 0, ctypes.byref(head), ctypes.byref(size)):
            return None
        self.robust_list = (_NR_SET_ROBUST_LIST, head, size)
        flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
        zero = ctypes.c_void_p(0)
        pair = (tid, zero) if _NR_CLONE == 56 else (zero, tid)  # the last two differ by architecture
        return (_NR_CLONE, ctypes.c_ulong(flags), zero, zero, *pair)


_libc = _Libc() if sys.platform == "linux" else None


def sibling_works() -> bool:
    """Whether this machine can do `sibling` at all (single-threaded processes only)."""
    return _libc is not None and _libc.clone_arguments is not None


def sibling() -> int:
    """Fork a child of our own parent, which is killed when that ends. Only in a process with a single thread.

    What the child runs here is kept short: each page that it writes to is copied.

    Raises:
        OSError: the system call was refused.
    """
    assert _libc is not None and _libc.clone_arguments is not None
    global _ours
    saved = random.getstate()
    _ours = True
    _libc.before()
    pid = _libc.syscall(*_libc.clone_arguments)
    if pid == 0:
        _libc.syscall(*_libc.robust_list)
        _libc.syscall(*_libc.death_signal)
        _libc.after_child()
        random.setstate(saved)
        _ours = False
        return 0
    error = ctypes.get_errno()
    _libc.after_parent()
    _ours = False
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return int(pid)


def offspring() -> int:
    """Fork a child of this process.

    Raises:
        OSError: the system call was refused.
    """
    global _ours
    saved = random.getstate()
    _ours = True
    try:
        with warnings.catch_warnings():
            # The caller has counted the threads and has said what there is to say.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
    finally:
        _ours = False
    if pid == 0:
        random.setstate(saved)
    return pid


def orphan() -> int:
    """Fork a child and orphan it at once, so that the nearest subreaper becomes its parent.

    Raises:
        OSError: one of the two forks was refused.
    """
    receive, send = os.pipe()
    try:
        middle = offspring()
    except OSError:
        os.close(receive)
        os.close(send)
        raise
    if middle == 0:
        os.close(receive)
        between = os.getpid()
        try:
            pid = offspring()
        except OSError as error:
            os.write(send, (-(error.errno or 1)).to_bytes(8, signed=True))
            os._exit(0)
        if pid == 0:
            os.close(send)
            while os.getppid() == between:  # a death signal that is set now would come from the wrong parent
                os.sched_yield()
            set_parent_death_signal()
            return 0
        os.write(send, pid.to_bytes(8, signed=True))
        os._exit(0)
    os.close(send)
    answer = os.read(receive, 8)
    os.close(receive)
    try:
        os.waitpid(middle, 0)
    except ChildProcessError:
        pass  # the environment reaps whatever it finds
    pid = int.from_bytes(answer, signed=True) if answer else -1
    if pid < 0:
        raise OSError(-pid, os.strerror(-pid))
    return pid


def set_parent_death_signal() -> None:
    """Have this process killed when its parent, the warden, ends. Does nothing outside Linux."""
    if _libc is not None:
        _libc.libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def on_foreign_fork(hook: Callable[[], None]) -> None:
    """Run `hook` in the children of forks that are not made here, such as the environment's own."""
    _foreign_hooks.append(hook)


def _after_in_child() -> None:
    if not _ours:
        for hook in _foreign_hooks:
            hook()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
