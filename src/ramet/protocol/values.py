"""The values of the standard library that msgpack does not know, each as one extension type.

A form turns a value into something that msgpack knows (`plain`) and back (`build`). Rules:

1. `plain` never gives what `build` would refuse: it raises instead, as for pandas' `NaT`.
2. `build` is handed exactly the type named in `wire`, never a hostile `range` of a billion items.
3. What `build` raises on hostile data is the caller's to translate.
"""

from __future__ import annotations

import datetime as dt
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any
from uuid import UUID

__all__ = ["BASES", "FORMS", "INTEGER", "Form", "integer_bytes"]

INTEGER = 5


@dataclass(frozen=True, slots=True)
class Form:
    """How one type crosses.

    Attributes:
        code: the number of the extension type.
        base: the type; its subclasses cross as this type too.
        wire: the exact type of what `plain` returns and `build` takes.
        plain: the value as something that msgpack knows.
        build: the value again.
    """

    code: int
    base: type
    wire: type
    plain: Callable[[Any], object]
    build: Callable[[Any], object]


def _complex(value: complex) -> list[float]:
    return [complex.real.__get__(value), complex.imag.__get__(value)]


def _offset(delta: dt.timedelta | None, name: list[str]) -> list[object] | None:
    return None if delta is None else [*_timedelta(delta), *name]


def _tz_name(zone: dt.tzinfo | None) -> list[str]:
    # only a zone that was given a name says so here; one that names itself "UTC+01:00" does not
    return list(zone.__getinitargs__()[1:]) if type(zone) is dt.timezone else []  # type: ignore[attr-defined]


def _zone(plain: list[Any] | None) -> dt.timezone | None:
    if plain is None:
        return None
    days, seconds, microseconds, *name = plain
    return dt.timezone(dt.timedelta(days, seconds, microseconds), *name)


def _integers(*fields: object) -> list[object]:
    if not all(type(field) is int for field in fields):
        raise ValueError("a part of this date or time is not an integer")
    return list(fields)


def _date(value: dt.date) -> list[object]:
    return _integers(value.year, value.month, value.day)


def _clock(value: dt.datetime | dt.time) -> list[object]:
    return _integers(value.hour, value.minute, value.second, value.microsecond, value.fold)


def _datetime(value: dt.datetime) -> list[object]:
    offset = _offset(dt.datetime.utcoffset(value), _tz_name(value.tzinfo))
    return [*_date(value), *_clock(value), offset]


def _build_datetime(plain: list[Any]) -> dt.datetime:
    year, month, day, hour, minute, second, micro, fold, zone = plain
    return dt.datetime(year, month, day, hour, minute, second, micro, _zone(zone), fold=fold)


def _time(value: dt.time) -> list[object]:
    return [*_clock(value), _offset(dt.time.utcoffset(value), _tz_name(value.tzinfo))]


def _build_time(plain: list[Any]) -> dt.time:
    hour, minute, second, micro, fold, zone = plain
    return dt.time(hour, minute, second, micro, _zone(zone), fold=fold)


def _timedelta(value: dt.timedelta) -> list[object]:
    return _integers(value.days, value.seconds, value.microseconds)


def integer_bytes(value: int) -> bytes:
    """The shortest signed big-endian bytes of `value`."""
    return int.to_bytes(value, int.bit_length(value) // 8 + 1, "big", signed=True)


_PATHS: dict[str, type[pathlib.PurePath]] = {
    kind.__name__: kind
    for kind in (pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
}


def _path(value: pathlib.PurePath) -> list[object]:
    kind = next(base for base in type(value).__mro__ if base in _PATHS.values())
    return [kind.__name__, pathlib.PurePath.__str__(value)]


def _build_path(plain: list[Any]) -> pathlib.PurePath:
    name, text = plain
    kind = _PATHS[name]
    if issubclass(kind, pathlib.Path) and kind is not type(pathlib.Path()):
        kind = _PATHS[f"Pure{name}"]  # a path of another operating system has no files here
    if type(text) is not str:
        raise TypeError("a path must be text")
    return kind(text)


def _range(value: range) -> list[object]:
    return [value.start, value.stop, value.step]


FORMS = (
    Form(1, tuple, list, lambda value: list(tuple.__iter__(value)), tuple),
    Form(2, set, list, lambda value: list(set.__iter__(value)), set),
    Form(3, frozenset, list, lambda value: list(frozenset.__iter__(value)), frozenset),
    Form(4, complex, list, _complex, lambda plain: complex(*plain)),
    Form(INTEGER, int, bytes, integer_bytes, lambda plain: int.from_bytes(plain, "big", signed=True)),
    Form(6, dt.datetime, list, _datetime, _build_datetime),
    Form(7, dt.date, list, _date, lambda plain: dt.date(*plain)),
    Form(8, dt.time, list, _time, _build_time),
    Form(9, dt.timedelta, list, _timedelta, lambda plain: dt.timedelta(*plain)),
    Form(10, Decimal, str, Decimal.__str__, Decimal),
    Form(11, UUID, bytes, lambda value: value.bytes, lambda plain: UUID(bytes=plain)),
    Form(12, pathlib.PurePath, list, _path, _build_path),
    Form(13, range, list, _range, lambda plain: range(*plain)),
    Form(14, slice, list, lambda value: [value.start, value.stop, value.step], lambda plain: slice(*plain)),
)
"""Every form, by code."""

BASES: dict[type, Callable[[Any], object]] = {
    str: str.__str__,
    float: float.__float__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    bytearray: lambda value: bytes(memoryview(value)),
    list: list.copy,
    dict: lambda value: dict(dict.items(value)),
    MappingProxyType: lambda value: dict(value.items()),
}
"""Types that msgpack knows, or nearly: their subclasses cross as the type itself."""
