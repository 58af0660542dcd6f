"""Where inside a value the trouble is: a slow walk, made only after encoding has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Any

from ramet.protocol.classes import Record, describe, reader_of

__all__ = ["locate"]

# A place is (the place of the container, how to write the step, its key): written out only once, since
# the places of a deeply nested value would fill the memory as text.
Place = tuple[Any, Callable[[Any], str], Any]
Step = tuple[object, Callable[[Any], str], object]


def locate(value: object, culprit: object) -> str:
    """The path to `culprit` inside `value`, or to what cannot be packed by its nature if it is `None`.

    Returns:
        A path such as `value["info"][3].board`; `value` alone if nothing was found.
    """
    for obj, place, cyclic in _walk(value):
        if obj is culprit if culprit is not None else cyclic or _is_scattered(obj):
            return _written(place)
    return "value"


def _is_scattered(obj: object) -> bool:
    return type(obj) is memoryview and not obj.c_contiguous


def _walk(value: object) -> Iterator[tuple[object, Place | None, bool]]:
    """Every object inside, its place, and whether it stands inside itself."""
    above: set[int] = set()
    kept: dict[int, object] = {}  # keeps what a property made from giving its id to another
    stack: list[tuple[object, Place | None, bool]] = [(value, None, False)]
    while stack:
        obj, place, leaving = stack.pop()
        if leaving:
            above.discard(id(obj))
            continue
        yield obj, place, id(obj) in above
        if id(obj) in kept:
            continue
        kept[id(obj)] = obj
        if steps := _steps(obj):
            above.add(id(obj))
            stack.append((obj, place, True))
            stack.extend((item, (place, write, key), False) for item, write, key in reversed(steps))


def _written(place: Place | None) -> str:
    parts: list[str] = []
    while place is not None:
        place, write, key = place
        parts.append(write(key))
    path = "".join(["value", *reversed(parts)])
    return path if len(path) <= 200 else f"{path[:95]}…{path[-95:]}"


def _steps(obj: object) -> list[Step]:
    try:
        return list(_inside(obj))
    except Exception:
        return []  # its own code fails: it is a leaf of this walk, as it was for the encoder


def _inside(obj: Any) -> Iterable[Step]:
    cls = type(obj)
    if cls is Record:
        return _fields(obj.fields)
    reader = None if cls in _BASES else reader_of(cls)
    if reader is not None:
        return _fields(reader[1](obj))
    base = next((base for base in type.__getattribute__(cls, "__mro__") if base in _BASES), None)
    return () if base is None else _BASES[base](obj)


def _fields(fields: Any) -> Iterable[Step]:
    return ((item, _write_field, name) for name, item in fields.items())


def _items(base: Any) -> Callable[[Any], Iterable[Step]]:
    return lambda obj: ((item, _write_index, index) for index, item in enumerate(base.__iter__(obj)))


def _members(base: Any) -> Callable[[Any], Iterable[Step]]:
    return lambda obj: ((item, _write_member, item) for item in base.__iter__(obj))


def _entries(obj: dict[Any, Any]) -> Iterable[Step]:
    for key, item in dict.items(obj):
        yield key, _write_key, key
        yield item, _write_index, key


def _write_field(name: object) -> str:
    return f".{name}"


def _write_index(key: object) -> str:
    return f"[{_short(key)}]"


def _write_key(key: object) -> str:
    return f"<key {_short(key)}>"


def _write_member(item: object) -> str:
    return f"<item {_short(item)}>"


def _short(key: object) -> str:
    text = describe(key)[1]
    return f'"{text[1:-1]:.60}"' if type(key) is str else f"{text:.60}"


_BASES: dict[type, Callable[[Any], Iterable[Step]]] = {
    list: _items(list),
    tuple: _items(tuple),
    dict: _entries,
    set: _members(set),
    frozenset: _members(frozenset),
    MappingProxyType: lambda obj: _entries(dict(obj)),
}
