"""Frames: any split of the bytes gives the same payloads, and hostile lengths are refused."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramet.errors import EncodeError, ProtocolError
from ramet.protocol import wire
from ramet.protocol.wire import MAX_FRAME, FrameReader, frame

PAYLOADS = st.lists(st.binary(max_size=300), max_size=8)


def read_all(reader: FrameReader) -> list[bytes]:
    found = []
    while (payload := reader.next()) is not None:
        found.append(payload)
    return found


def test_a_frame() -> None:
    assert frame(b"abc") == b"\0\0\0\3abc"
    assert frame(b"") == b"\0\0\0\0"


@given(payloads=PAYLOADS, data=st.data())
def test_any_split_gives_the_same_payloads(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12), label="cuts"))
    reader = FrameReader()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[begin:end])
        found += read_all(reader)
    assert found == payloads
    assert reader.empty
    assert reader.next() is None


def test_byte_by_byte() -> None:
    payloads = [b"", b"a", b"bc" * 200, b"", b"d"]
    reader = FrameReader()
    found = []
    for byte in b"".join(map(frame, payloads)):
        reader.feed(bytes([byte]))
        found += read_all(reader)
    assert found == payloads


@given(payloads=PAYLOADS, lost=st.integers(1, 300))
def test_a_truncated_stream_gives_no_more_than_it_holds(payloads: list[bytes], lost: int) -> None:
    stream = b"".join(map(frame, payloads))
    reader = FrameReader()
    reader.feed(stream[: max(0, len(stream) - lost)])
    found = read_all(reader)
    assert found == payloads[: len(found)]
    assert reader.empty == (stream[: max(0, len(stream) - lost)] == b"".join(map(frame, found)))


def test_the_cap_of_what_comes_in() -> None:
    reader = FrameReader(cap=10)
    reader.feed(frame(b"x" * 10))
    assert reader.next() == b"x" * 10
    reader.feed(frame(b"x" * 11)[:4])  # the length alone is enough
    with pytest.raises(ProtocolError, match="a frame of 11 bytes is over the cap of 10"):
        reader.next()
    with pytest.raises(ProtocolError):  # it stays broken
        reader.next()


@given(st.binary(min_size=4, max_size=40))
def test_hostile_bytes_never_take_memory_or_hang(data: bytes) -> None:
    reader = FrameReader(cap=64)
    reader.feed(data)
    if int.from_bytes(data[:4]) > 64:
        with pytest.raises(ProtocolError, match="over the cap of 64"):
            read_all(reader)
        return
    with contextlib.suppress(ProtocolError):  # from the second on
        assert sum(map(len, read_all(reader))) <= len(data)


def test_the_cap_of_what_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_FRAME < 2**32  # the length has four bytes
    monkeypatch.setattr(wire, "MAX_FRAME", 10)
    assert len(frame(b"x" * 10)) == 14
    with pytest.raises(EncodeError, match="a message of 11 bytes is over the cap of 10"):
        frame(b"x" * 11)


def test_a_forked_child_forgets_what_was_its_parents() -> None:
    reader = FrameReader()
    reader.feed(frame(b"whole") + frame(b"half")[:5])
    reader.clear()
    assert reader.empty
    assert reader.next() is None
    reader.feed(frame(b"mine"))
    assert reader.next() == b"mine"
