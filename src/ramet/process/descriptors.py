"""Descriptors: how they arrive, and how a child lets go of what is not its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

__all__ = ["MAX_FDS", "NO_SIGNAL", "plug_standard_streams", "put_null_over", "receive"]

MAX_FDS = 253
"""The most descriptors that one message can carry (the kernel's SCM_MAX_FD)."""

NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)
"""For every send: a closed connection is an error, also where SIGPIPE would end the process."""

_CHUNK = 65536
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_FD_SPACE = socket.CMSG_SPACE(MAX_FDS * 4) if hasattr(socket, "CMSG_SPACE") else 0


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The next bytes and the descriptors that came with them; no bytes at the end of the stream."""
    try:
        data, ancillary, _, _ = sock.recvmsg(_CHUNK, _FD_SPACE, _CLOEXEC)
    except ConnectionError:
        return b"", []
    fds: list[int] = []
    for _, _, payload in ancillary:
        fds += memoryview(payload[: len(payload) - len(payload) % 4]).cast("i").tolist()
    return data, fds


def put_null_over(fds: Iterable[int]) -> None:
    """Replace descriptors by the null device; closing them would let an old owner close what reuses the number."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
    except OSError:  # no descriptor is left for that: then closing is better than keeping
        for fd in fds:
            os.close(fd)
        return
    for fd in fds:
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def plug_standard_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed, or a socket takes the number and is printed to."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
