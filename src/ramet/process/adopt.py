"""Checkpoint an environment that lives in the agent's own process, by forking the agent.

The child never returns to the agent's event loop: it becomes warden and checkpoint in one process, and forks its
branches plainly. What it must let go of, and in which order, is the whole of this module.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from ramet.errors import ForkSafetyWarning, warn_user
from ramet.process import fork as forks
from ramet.process.descriptors import plug_standard_streams, put_null_over
from ramet.process.launch import LaunchOptions
from ramet.process.limits import Headroom, no_room, raise_descriptor_limit
from ramet.process.link import Link
from ramet.process.memory import freeze, thaw
from ramet.process.safety import Safety, native_threads, open_files, thread_count
from ramet.process.server import Server
from ramet.process.tree import Tree, socket_pair
from ramet.process.warden import Warden
from ramet.protocol.flows import Peer
from ramet.types import State

__all__ = ["adopt"]

_KINDS = (
    "socket:",
    "anon_inode:[eventpoll]",
    "anon_inode:[eventfd]",
    "anon_inode:[io_uring]",
    "anon_inode:[pidfd]",
)


def adopt(
    env: Any, state: State, name: str, *, options: LaunchOptions, keep_fds: Sequence[int], blocking: bool
) -> Link:
    """Fork this process; the child keeps `env` as it stands.

    Returns:
        The connection to the child. Its first request is to be `build`, which answers with the spec.

    Raises:
        CannotBranch: this process has `/dev/nvidia*` open.
        BranchLimitError: the fork was refused.
    """
    raise_descriptor_limit()
    plug_standard_streams()
    Headroom().require(1)
    safety = Safety()
    for text in _hazards(safety, keep_fds):
        warn_user(text, ForkSafetyWarning)
    safety.flush()  # what was just said must not stand in the child's buffers too
    control, their_control = socket_pair()
    tree = Tree(
        control,
        0,
        blocking=blocking,
        pickle=options.allow_pickle,
        allow_threads=options.allow_threads,
        step_timeout=options.step_timeout,
    )
    tree.disposable = True
    try:
        with their_control:
            link, their_end = tree.connect(Peer(name, allow_pickle=options.allow_pickle))
            with their_end:
                keep = {their_control.fileno(), their_end.fileno(), *keep_fds}
                tree.pid = _fork(lambda: _live_on(env, state, their_control, their_end, keep, options, safety))
    except BaseException:
        tree.discard()
        raise
    link.pid = tree.pid
    return link


def _hazards(safety: Safety, keep_fds: Sequence[int]) -> list[str]:
    crowd = _other_threads() if thread_count() > 1 else ""  # before the check: a thread may end meanwhile
    texts = safety.check(allow_threads=True, shared=keep_fds)  # the child lets go of every other socket
    others = [text for text in texts if "threads do not exist" not in text]
    return [crowd, *others] if crowd else others


def _other_threads() -> str:
    python = [t for t in threading.enumerate() if t is not threading.main_thread()]
    names = [t.name for t in python] + (native_threads(python) if os.path.isdir("/proc/self/task") else [])
    return (
        "this process is forked to checkpoint the environment that lives in it, and it has other threads"
        f" ({', '.join(names)}): a lock that one of them holds is held for ever in the copy. Let the environment"
        " live in a process of its own: `async with host(factory) as env`"
    )


def _fork(child: Callable[[], NoReturn]) -> int:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    freeze(collect=True)
    try:
        pid = forks.offspring()
        if pid == 0:
            try:
                child()
            finally:
                os._exit(1)  # whatever went wrong, there must not be two agents
    except OSError as error:
        raise no_room(error, 1) from error
    finally:
        thaw()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid


def _live_on(
    env: Any,
    state: State,
    control: socket.socket,
    end: socket.socket,
    keep: set[int],
    options: LaunchOptions,
    safety: Safety,
) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        _forget_signals()
        os.setsid()
        put_null_over(_foreign(keep))
        _forget_loop()
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            faulthandler.enable()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        server = Server(
            end,
            warden=os.getpid(),
            adopted=True,
            own=[control.fileno()],
            pickle=options.allow_pickle,
            safety=safety,
        )
        server.adopt(env, state, instant=0)
        warden = Warden(control, server=server, pickle=options.allow_pickle)
        contextvars.Context().run(warden.run)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _forget_signals() -> None:
    """No handler of the agent runs here; uvloop's are unknown to Python, so every caught signal is set anew."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def _foreign(keep: set[int]) -> Iterable[int]:
    """The agent's sockets and event descriptors; regular files, terminals and the environment's own are kept."""
    for fd in open_files():
        if fd in keep:
            continue
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(_KINDS) or _is_tracker_pipe(fd) or stat.S_ISSOCK(os.fstat(fd).st_mode):
                yield fd


def _is_tracker_pipe(fd: int) -> bool:
    """Whether this is multiprocessing's pipe to its resource tracker."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return tracker is not None and getattr(getattr(tracker, "_resource_tracker", None), "_fd", None) == fd


def _forget_loop() -> None:
    """This thread is inside the agent's event loop, which will never run here again."""
    sys.set_asyncgen_hooks(firstiter=None, finalizer=None)
    events = sys.modules.get("asyncio.events")
    if events is not None:
        events._set_running_loop(None)
    sniffio = sys.modules.get("sniffio")
    if sniffio is not None:
        sniffio.thread_local.name = None
