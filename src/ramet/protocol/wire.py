"""Frames: a length of four bytes (big-endian), then that many bytes.

This module does no I/O and does not know which side it is on.
"""

from __future__ import annotations

from ramet.errors import EncodeError, ProtocolError

__all__ = ["MAX_FRAME", "FrameReader", "frame"]

MAX_FRAME = 1 << 30
"""The largest frame, in bytes: a bound for hostile lengths, far above what environments send."""

_HEADER = 4


def frame(payload: bytes) -> bytes:
    """Put the length before `payload`.

    Raises:
        EncodeError: the payload is larger than `MAX_FRAME`.
    """
    if len(payload) > MAX_FRAME:
        raise EncodeError("value", f"a message of {len(payload)} bytes is over the cap of {MAX_FRAME}")
    return len(payload).to_bytes(_HEADER) + payload


class FrameReader:
    """Bytes in, payloads out; any split of the bytes gives the same payloads."""

    __slots__ = ("_buffer", "_cap", "_missing")

    def __init__(self, cap: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self._cap = cap
        self._missing = _HEADER

    def feed(self, data: bytes) -> None:
        """Take bytes as they came from the socket."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next whole payload, or `None` if more bytes are needed.

        Raises:
            ProtocolError: the length in the header is over the cap.
        """
        buffer = self._buffer
        if len(buffer) < self._missing:
            return None
        size = int.from_bytes(buffer[:_HEADER])
        if size > self._cap:
            raise ProtocolError(f"a frame of {size} bytes is over the cap of {self._cap}")
        end = _HEADER + size
        if len(buffer) < end:
            self._missing = end
            return None
        payload = bytes(memoryview(buffer)[_HEADER:end])
        del buffer[:end]
        self._missing = _HEADER
        return payload

    def clear(self) -> None:
        """Forget what was fed: in a forked child it belongs to the parent."""
        self._buffer = bytearray()
        self._missing = _HEADER

    @property
    def empty(self) -> bool:
        """Whether the stream stands between two frames."""
        return not self._buffer
