"""NumPy arrays and scalars as bytes. NumPy itself is never imported here: without it they stay `Record`s.

The wire form is the length of a header (4 bytes), the header in msgpack (dtype, shape) and the elements in
C order.
"""

from __future__ import annotations

import math
import re
import struct
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgpack

from ramet.protocol.classes import Record, static

__all__ = ["ARRAY", "SCALAR", "array_of", "join", "kind_of", "pack", "unpack"]

ARRAY, SCALAR = 30, 31

_NAMES = {ARRAY: "numpy:ndarray", SCALAR: "numpy:generic"}
_LENGTH = struct.Struct(">I")
_DTYPE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,10}(\[[0-9]{0,10}[A-Za-z]{1,2}\])?")


def numpy() -> Any:
    """NumPy if it is loaded, completely: while it is being imported it may lack its types."""
    module = sys.modules.get("numpy")
    return module if hasattr(module, "ndarray") and hasattr(module, "generic") else None


def kind_of(cls: type) -> int | None:
    """`ARRAY` or `SCALAR` for the types of NumPy, else `None`; a masked array is neither."""
    np = numpy()
    if np is None:
        return None
    if issubclass(cls, np.generic):
        return SCALAR
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())
    return ARRAY if issubclass(cls, np.ndarray) and not issubclass(cls, masked) else None


def array_of(obj: object) -> Any:
    """The array that an object such as a CPU tensor gives of itself, or `None` if it does not.

    Raises:
        Exception: whatever its `__array__` raises.
    """
    np = numpy()
    if np is None or static(type(obj), "__array__") is None or issubclass(type(obj), np.ndarray):
        return None  # an array that is no ARRAY has more to it, such as a mask
    return np.asarray(obj)


def pack(value: Any) -> bytes:
    """An array or a scalar as bytes.

    Raises:
        ValueError: its dtype holds objects or is an extension of NumPy's.
    """
    np = numpy()
    array = np.asarray(value, order="C")
    header = _header(array.dtype, array.shape)
    if not array.nbytes:
        return header
    # a view as bytes joins without a copy, and works for types without the buffer protocol too
    return b"".join((header, array.reshape(-1).view(np.uint8)))


def join(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a `Record` of an array."""
    return _join(fields["dtype"], fields["shape"]) + bytes(memoryview(fields["data"]))


def _join(dtype: object, shape: object) -> bytes:
    header: bytes = msgpack.packb([dtype, shape], unicode_errors="surrogatepass")
    return _LENGTH.pack(len(header)) + header


@lru_cache(maxsize=256)
def _header(dtype: Any, shape: tuple[int, ...]) -> bytes:
    if dtype.hasobject:
        raise ValueError("an array of objects has no form: give it a numeric dtype, or send a list")
    plain = _plain_dtype(dtype)
    if _build_dtype(plain) != dtype:
        raise ValueError(f"dtype {dtype} has no form: convert it to one of NumPy's own")
    return _join(plain, shape)


def _plain_dtype(dtype: Any) -> Any:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return [_plain_dtype(base), list(shape)]
    if dtype.names is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names]
    return {
        "names": list(dtype.names),
        "formats": [_plain_dtype(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def _build_dtype(plain: Any) -> Any:
    np = sys.modules["numpy"]
    if type(plain) is str:
        if not _DTYPE.fullmatch(plain):
            raise ValueError(f"{plain!r:.60} is no dtype")
        return np.dtype(plain)
    if type(plain) is list:
        base, shape = plain
        return np.dtype((_build_dtype(base), _shape(shape)))
    fields = {key: plain[key] for key in ("names", "offsets", "titles", "itemsize", "aligned")}
    return np.dtype(fields | {"formats": [_build_dtype(item) for item in plain["formats"]]})


def _shape(plain: Any) -> tuple[int, ...]:
    if type(plain) is not list or not all(type(size) is int and size >= 0 for size in plain):
        raise ValueError("a shape must be a list of sizes")
    return tuple(plain)


def unpack(code: int, data: bytes) -> Any:
    """The array or scalar again, in memory of its own; a `Record` if NumPy is not loaded.

    Raises:
        Exception: the bytes make no sense; the caller translates.
    """
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    header = data[_LENGTH.size : start]
    if numpy() is None:
        dtype, shape = _plain_header(header)
        return Record(_NAMES[code], {"dtype": dtype, "shape": shape, "data": data[start:]}, code)
    array = _array(header, data, start)
    return array if code == ARRAY else array[()]


def _plain_header(header: bytes) -> tuple[Any, Any]:
    dtype, shape = msgpack.unpackb(header, unicode_errors="surrogatepass")
    return dtype, shape


@lru_cache(maxsize=256)
def _layout(header: bytes) -> tuple[Any, tuple[int, ...], int]:
    plain_dtype, plain_shape = _plain_header(header)
    dtype, shape = _build_dtype(plain_dtype), _shape(plain_shape)
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _array(header: bytes, data: bytes, start: int) -> Any:
    np = numpy()
    dtype, shape, size = _layout(header)
    if size != len(data) - start:
        raise ValueError("the elements of an array do not fit its shape")
    if not size:
        return np.ndarray(shape, dtype)
    if dtype.names is None:
        return np.ndarray(shape, dtype, data, start).copy()
    array = np.empty(shape, dtype)  # a plain copy would leave the padding between fields to chance
    array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8, offset=start)
    return array
