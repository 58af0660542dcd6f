"""Dataclasses, named tuples and enums: named on the wire as "module:qualname", rebuilt without their code.

Rules:

1. Nothing is imported: a class is looked up in `sys.modules` as it is, in namespaces, not by `getattr`.
2. No `__init__`, `__post_init__`, `__new__`, `__setattr__` or property of a class runs on what the wire says.
3. A class that is not here, or does not fit, is no error: the value becomes a `Record`.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from types import MemberDescriptorType, ModuleType
from typing import Any

__all__ = ["DATACLASS", "ENUM", "NAMEDTUPLE", "REBUILD", "Record", "describe", "find", "name_of", "reader_of"]

DATACLASS, NAMEDTUPLE, ENUM = 20, 21, 22

Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A value whose class is not known here: its fields are attributes, and it encodes back as it came.

    Attributes:
        type_name: the name of its class, as "module:qualname".
        fields: the fields by name; use it for a field that is called like one of these attributes.
        code: the extension type that it came as.
    """

    type_name: str
    fields: Mapping[str, Any]
    code: int = dataclasses.field(default=DATACLASS, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name in Record.__slots__:  # a half-built copy, as in unpickling
            raise AttributeError(name)
        try:
            return self.fields[name]
        except KeyError:
            known = ", ".join(self.fields) or "none"
            raise AttributeError(f"{self.type_name} has no field {name!r}; its fields: {known}") from None

    def __hash__(self) -> int:
        return hash((self.type_name, self.code, frozenset(self.fields)))


def name_of(cls: type) -> str:
    """The name of a class on the wire; "?" stands for a module without a proper name. Never raises."""
    try:
        module = type.__getattribute__(cls, "__module__")
        return f"{module if type(module) is str else '?'}:{type.__getattribute__(cls, '__qualname__')}"
    except Exception:
        return "?:?"


def describe(obj: object) -> tuple[str, str]:
    """The type's name as "module:qualname" and the `repr` cut to 200 characters; never raises."""
    name = name_of(type(obj))
    try:
        return name, str.__getitem__(repr(obj), slice(200))
    except Exception as error:
        return name, f"<{name} whose repr raised {type(error).__name__}>"


def static(cls: type, name: str) -> object:
    """What `name` is in the namespaces of a class, without running descriptors; `None` if it is nowhere."""
    for base in type.__getattribute__(cls, "__mro__"):
        namespace = type.__getattribute__(base, "__dict__")
        if name in namespace:
            return namespace[name]
    return None


def find(name: str, classes: Mapping[str, type]) -> type | None:
    """The class of that name in `classes`, else in the modules that are loaded, else `None`."""
    found: object = classes.get(name)
    if found is None:
        found = _walk(name)
    return found if issubclass(type(found), type) else None  # type: ignore[return-value]


def _walk(name: str) -> object:
    module, parts = _split(name)
    found: object = sys.modules.get(module)
    for part in parts:
        found = _namespace(found).get(part)
    return found


@lru_cache(maxsize=1024)
def _split(name: str) -> tuple[str, list[str]]:
    module, _, path = name.partition(":")
    return module, path.split(".")


def _namespace(owner: object) -> Mapping[str, object]:
    # a plain getattr would run a module's lazy imports, or a metaclass
    if issubclass(type(owner), ModuleType):
        return object.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    if issubclass(type(owner), type):
        return type.__getattribute__(owner, "__dict__")  # type: ignore[no-any-return]
    return {}


# --- what crosses of a value ---------------------------------------------------------------------------


def reader_of(cls: type) -> tuple[int, Callable[[Any], Fields]] | None:
    """The extension type of a class and a function that reads the fields of its values.

    Returns:
        `None` if the class is neither an enum nor a named tuple nor a dataclass.
    """
    if issubclass(cls, enum.Enum):
        return ENUM, _read_enum
    if issubclass(cls, tuple) and (names := _tuple_names(cls)) is not None:
        return NAMEDTUPLE, lambda value: dict(zip(names, tuple.__iter__(value), strict=True))
    if dataclasses.is_dataclass(cls):
        return DATACLASS, _dataclass_reader(cls)
    return None


def _read_enum(member: enum.Enum) -> Fields:
    value = object.__getattribute__(member, "_value_")
    simple = type(value) in (bool, int, float, str, bytes)
    return {"name": object.__getattribute__(member, "_name_"), "value": value if simple else None}


def _tuple_names(cls: type) -> tuple[str, ...] | None:
    names = static(cls, "_fields")
    if type(names) is tuple and all(type(name) is str for name in names):
        return names
    return None


def _dataclass_reader(cls: type) -> Callable[[Any], Fields]:
    names = [field.name for field in dataclasses.fields(cls)]
    if len(names) < 2:
        return lambda value: dict(_present(value, names))
    read_all = attrgetter(*names)

    def read(value: Any) -> Fields:
        try:
            return dict(zip(names, read_all(value), strict=True))
        except AttributeError:
            return dict(_present(value, names))

    return read


def _present(value: object, names: list[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        try:
            yield name, object.__getattribute__(value, name)
        except AttributeError:
            continue  # never set, as a field with init=False may be: it will be missing over there too


# --- and back ------------------------------------------------------------------------------------------


def _rebuild_dataclass(cls: type, fields: Fields) -> object | None:
    settable = _settable(cls)
    if settable is None or not settable.issuperset(fields):
        return None
    try:
        value: object = object.__new__(cls)
    except TypeError:
        return None  # abstract, or not laid out as a plain object: an exception, a dict
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    return value


@lru_cache(maxsize=1024)
def _settable(cls: type) -> frozenset[str] | None:
    """The fields of a dataclass, or `None` if setting one of them would run code of the class."""
    if type(static(cls, "__dataclass_fields__")) is not dict:
        return None
    names = [field.name for field in dataclasses.fields(cls)]
    return frozenset(names) if all(_is_plain(static(cls, name)) for name in names) else None


def _is_plain(attribute: object) -> bool:
    kind = type(attribute)
    return kind is MemberDescriptorType or static(kind, "__set__") is None


def _rebuild_namedtuple(cls: type, fields: Fields) -> object | None:
    if not issubclass(cls, tuple) or _tuple_names(cls) != tuple(fields):
        return None
    try:
        return tuple.__new__(cls, fields.values())
    except TypeError:
        return None


def _rebuild_enum(cls: type, fields: Fields) -> object | None:
    if not issubclass(cls, enum.Enum) or fields.keys() != {"name", "value"}:
        return None
    if issubclass(cls, enum.Flag):
        return _rebuild_flag(cls, fields["value"])
    name = fields["name"]
    return cls._member_map_.get(name) if type(name) is str else None


def _rebuild_flag(cls: type[enum.Flag], value: object) -> object | None:
    if type(value) is not int or value.bit_length() > 64:
        return None
    member = cls._value2member_map_.get(value)
    if member is not None or not _combines_plainly(cls):
        return member
    try:
        member = enum.EnumMeta.__call__(cls, value)
    except ValueError:
        return None  # a bit that this version of the class does not have
    return member if type(member) is cls else None


def _combines_plainly(cls: type[enum.Flag]) -> bool:
    own = static(cls, "_missing_") is not static(enum.Flag, "_missing_")
    return not own and static(cls, "_member_type_") in (object, int)


REBUILD: dict[int, Callable[[type, Fields], object | None]] = {
    DATACLASS: _rebuild_dataclass,
    NAMEDTUPLE: _rebuild_namedtuple,
    ENUM: _rebuild_enum,
}
"""By extension type: a function that makes the value, or returns `None` if the class does not fit."""
