"""What crosses, what does not, and what hostile bytes can do (faults 25, 26, 33)."""

from __future__ import annotations

import collections
import contextlib
import copy
import datetime as dt
import enum
import math
import pathlib
import pickle
import struct
import subprocess
import sys
import types
import uuid
import zoneinfo
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgpack import ExtType

from ramet.errors import EncodeError, ProtocolError, StaleState
from ramet.protocol import codec as codec_module
from ramet.protocol.codec import HANDLE, PICKLE, Codec, Record, describe
from ramet.types import Action, Hidden, State, StateMetadata, StepResult, ToolCall

DATACLASS, NAMEDTUPLE, ENUM, ARRAY, SCALAR = 20, 21, 22, 30, 31
RAN: list[str] = []  # what ran that must not run


@pytest.fixture(autouse=True)
def _nothing_ran() -> Iterator[None]:
    RAN.clear()
    yield
    assert RAN == []


# --- classes that cross --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any = 0
    y: Any = None


@dataclass
class Loose:
    items: Any
    inner: Any = None
    scale: InitVar[int] = 1
    made: int = field(init=False)
    shared: ClassVar[int] = 5

    def __post_init__(self, scale: int) -> None:
        self.made = 10 * scale


@dataclass
class One:
    only: Any


@dataclass(slots=True)
class Slotted(One):
    more: Any


@dataclass
class Guarded:
    """Any of its own code is an accident."""

    value: Any

    def __new__(cls, *args: Any) -> Guarded:
        RAN.append("__new__")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        RAN.append("__post_init__")

    def __setattr__(self, name: str, value: object) -> None:
        RAN.append("__setattr__")
        object.__setattr__(self, name, value)


class Point(NamedTuple):
    x: Any
    y: Any = None


class GuardedPoint(Point):
    def __new__(cls, *args: Any) -> GuardedPoint:
        RAN.append("__new__")
        return super().__new__(cls, *args)


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"
    CRIMSON = 1
    ODD = (1, object())


class Number(enum.IntEnum):
    ONE = 1
    MANY = 2**70


class Text(enum.StrEnum):
    A = "a"
    LONE = "\ud800"


class Perm(enum.Flag):
    R = 4
    W = 2
    RW = 6


class Bits(enum.IntFlag):
    ONE = 1
    TWO = 2


class Inventive(enum.Enum):
    ONLY = 1

    @classmethod
    def _missing_(cls, value: object) -> Inventive:
        RAN.append("_missing_")
        return cls.ONLY


class InventiveFlag(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value: object) -> Any:
        RAN.append("_missing_")
        return super()._missing_(value)


class Opaque:
    """Has no form."""


# --- equality that knows types and NaN -----------------------------------------------------------------


def same(left: Any, right: Any) -> bool:
    """Equal in type and value, NaN included, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray | np.generic):
        return same_array(left, right)
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right) or (math.isnan(left) and math.isnan(right))
    if isinstance(left, complex):
        return same(left.real, right.real) and same(left.imag, right.imag)
    if isinstance(left, Decimal):
        return bool(left.as_tuple() == right.as_tuple())
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, set | frozenset):
        return same_members(list(left), list(right))
    if isinstance(left, dt.datetime | dt.time):
        return bool(left == right) and left.fold == right.fold and left.tzname() == right.tzname()
    if isinstance(left, Frozen):
        return same((left.x, left.y), (right.x, right.y))
    return bool(left == right)


def same_array(left: Any, right: Any) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.dtype.kind == "f" and left.dtype.itemsize > 8:
        return bool(np.array_equal(left, right, equal_nan=True))  # its bytes have padding
    return bool(left.tobytes() == right.tobytes())


def same_members(left: list[Any], right: list[Any]) -> bool:
    for item in left:
        match = next((i for i, other in enumerate(right) if same(item, other)), None)
        if match is None:
            return False
        del right[match]
    return not right


def round_trip(value: Any, **options: Any) -> Any:
    codec = Codec(**options)
    return codec.decode(codec.encode(value))


def ext(code: int, plain: Any) -> bytes:
    """The bytes of an extension type as a hostile peer would write them."""
    return bytes(msgpack.packb(ExtType(code, msgpack.packb(plain))))


# --- any value -----------------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates included
offsets = st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)).map(dt.timezone)
zones = st.none() | st.just(dt.UTC) | offsets | st.just(dt.timezone(dt.timedelta(hours=1), "CET"))
paths = st.lists(st.text("abc.é ", min_size=1, max_size=5), max_size=3).map("/".join)

kinds = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, -(2**64)])
    | st.floats()
    | text
    | st.binary(max_size=20)
    | st.complex_numbers()
    | st.datetimes(timezones=zones)
    | st.builds(lambda moment: moment.replace(fold=1), st.datetimes(timezones=zones))
    | st.dates()
    | st.times(timezones=zones)
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | paths.map(pathlib.PosixPath)
    | paths.map(pathlib.PurePosixPath)
    | paths.map(pathlib.PureWindowsPath)
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 9))
    | st.sampled_from([*Colour, *Number, *Text, *Perm, Perm(0), *Bits, Bits(0), Bits(3), Bits(8), Hidden.IN_BRANCH])
    | st.sampled_from(
        [
            np.float32(1.5),
            np.float64("nan"),
            np.int8(-3),
            np.uint64(2**64 - 1),
            np.bool_(True),
            np.complex64(1j),
            np.float16(2),
            np.datetime64("2020-01-01T00:00:00.123456789"),
            np.datetime64("NaT", "s"),
            np.timedelta64(5, "D"),
            np.str_("é\ud800"),
            np.str_(""),
            np.bytes_(b"ab"),
            np.bytes_(b""),
        ]
    )
)


@st.composite
def leaves(draw: st.DrawFn) -> Any:
    return draw(kinds)  # hides their repr, which is longer than hypothesis likes


hashables = st.recursive(
    leaves(),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
        | st.builds(Frozen, inner, inner)
    ),
    max_leaves=5,
)
dtypes = st.sampled_from(
    [
        "?",
        "i1",
        "<u2",
        ">i4",
        "<i8",
        "<f2",
        "<f4",
        ">f8",
        "<c8",
        "<M8[ns]",
        ">M8[25s]",
        "<m8[D]",
        "<U3",
        "S2",
        "V5",
    ]
)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    dtype, shape = np.dtype(draw(dtypes)), draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    if dtype.kind == "U":
        return np.full(shape, draw(st.text("aé", max_size=3)), dtype)
    return (
        np.frombuffer(draw(st.binary(min_size=size, max_size=size)), dtype).reshape(shape)
        if size
        else np.empty(shape, dtype)
    )


values = st.recursive(
    hashables | arrays() | st.builds(slice, st.none() | st.integers()),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashables, inner, max_size=4)
        | st.sets(hashables, max_size=4)
        | st.builds(Frozen, inner, inner)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=12,
)

thorough = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@thorough
@given(values)
def test_every_value_arrives_equal_in_type_and_value(value: Any) -> None:
    assert same(round_trip(value), value)


@thorough
@given(values)
def test_encoding_is_stable(value: Any) -> None:
    codec = Codec()
    data = codec.encode(value)
    assert codec.encode(value) == data
    assert codec.encode(codec.decode(data)) == data


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_decodes(kind: type) -> None:
    assert Codec().decode(kind(Codec().encode([1, (2,)]))) == [1, (2,)]


def test_native_values_are_plain_msgpack() -> None:
    message = [7, 3, 12, {"text": "go left", "n": 1.5, "raw": b"x"}]
    assert Codec().encode(message) == msgpack.packb(message)


# --- single kinds --------------------------------------------------------------------------------------


def test_subclasses_of_plain_types_cross_as_the_type() -> None:
    class Str(str):
        def __str__(self) -> str:
            raise RuntimeError

    class Int(int): ...

    class List(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError

    class Dict(dict[Any, Any]):
        def items(self) -> Any:
            raise RuntimeError

    counts = collections.defaultdict(list, {"a": [1]})
    cases: list[tuple[Any, Any]] = [
        (collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
        (counts, {"a": [1]}),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (Str("s\ud800"), "s\ud800"),
        (Int(5), 5),
        (Int(2**80), 2**80),
        (Int(-(2**80)), -(2**80)),
        (type("Float", (float,), {})(1.5), 1.5),
        (type("Bytes", (bytes,), {})(b"x"), b"x"),
        (type("Bytearray", (bytearray,), {})(b"x"), b"x"),
        (type("Tuple", (tuple,), {})((1,)), (1,)),
        (type("Set", (set,), {})({1}), {1}),
        (List([1]), [1]),
        (Dict(a=1), {"a": 1}),
        (types.MappingProxyType({"a": (1,)}), {"a": (1,)}),
        (bytearray(b"ab"), b"ab"),
        (memoryview(b"ab"), b"ab"),
        (sys.version_info, tuple(sys.version_info)),
    ]
    for value, expected in cases:
        assert same(round_trip([value]), [expected]), type(value)


def test_datetimes_keep_fold_and_offset() -> None:
    berlin = zoneinfo.ZoneInfo("Europe/Berlin") if zoneinfo.available_timezones() else dt.UTC
    moment = dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=berlin)
    arrived = round_trip(moment)
    assert arrived.utcoffset() == moment.utcoffset()
    assert (arrived.replace(tzinfo=None), arrived.fold) == (moment.replace(tzinfo=None), 1)
    odd = dt.timezone(dt.timedelta(seconds=-3601, microseconds=7))
    assert round_trip(dt.time(1, 2, 3, 4, tzinfo=odd)).utcoffset() == odd.utcoffset(None)
    assert round_trip(dt.datetime(1, 1, 1, tzinfo=dt.UTC)).tzinfo is dt.UTC


def test_a_datetime_that_is_no_moment_is_refused_here_and_not_over_there() -> None:
    class NaT(dt.datetime):
        @property
        def year(self) -> Any:
            return math.nan

    with pytest.raises(EncodeError, match=r"value\[0\]: reading it raised ValueError"):
        Codec().encode([NaT(1, 1, 1)])


def test_a_broken_tzinfo_is_named() -> None:
    class Broken(dt.tzinfo):
        def utcoffset(self, _: object) -> dt.timedelta:
            raise RuntimeError("no idea")

        dst = tzname = utcoffset  # type: ignore[assignment]

    with pytest.raises(EncodeError, match=r'value\["at"\].*no idea'):
        Codec().encode({"at": dt.datetime(2024, 1, 1, tzinfo=Broken())})


def test_a_windows_path_arrives_pure_where_there_are_none() -> None:
    arrived = Codec().decode(ext(12, ["WindowsPath", "c:\\x"]))
    assert arrived == pathlib.PureWindowsPath("c:\\x")


def test_decimal_nan_keeps_its_payload() -> None:
    assert str(round_trip(Decimal("sNaN123"))) == "sNaN123"
    assert str(round_trip(Decimal("-0E+5"))) == "-0E+5"


# --- arrays --------------------------------------------------------------------------------------------

ARRAYS = {
    "zero-dimensional": np.array(5, "f4"),
    "empty": np.zeros((3, 0, 2), "i2"),
    "big-endian": np.arange(4, dtype=">i8"),
    "fortran": np.asfortranarray(np.arange(6, dtype="f8").reshape(2, 3)),
    "strided": np.arange(10)[::3],
    "negative stride": np.arange(5)[::-1],
    "broadcast": np.broadcast_to(np.float32(2), (2, 3)),
    "structured": np.array([(1, 2.5, "ab")], [("a", "i1"), ("b", ">f8"), ("c", "U3")]),
    "aligned": np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "nested": np.zeros(2, [("p", [("x", "f4"), ("y", "f4", (2, 2))]), ("q", "M8[ns]")]),
    "titled": np.zeros(1, [(("a title", "a"), "i4")]),
    "out of order": np.zeros(2, {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [4, 0], "itemsize": 12}),
    "no fields": np.zeros(2, []),
    "bool": np.array([True, False]),
    "datetime": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "void": np.zeros(2, "V3"),
    "long double": np.ones(2, np.longdouble),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_arrive_equal_writable_and_on_their_own(name: str) -> None:
    array = ARRAYS[name]
    arrived = round_trip({"obs": array})["obs"]
    assert type(arrived) is np.ndarray
    assert same_array(arrived, np.asarray(array, order="C"))
    assert arrived.flags.writeable
    assert arrived.flags.owndata
    assert arrived.flags.c_contiguous


def test_subclasses_of_arrays_arrive_as_arrays_but_masks_are_not_dropped() -> None:
    records = np.zeros(2, [("a", "i4")]).view(np.recarray)
    assert type(round_trip(records)) is np.ndarray
    for masked in (np.ma.array([1, 2], mask=[False, True]), np.ma.masked):
        with pytest.raises(EncodeError, match="it has no form"):
            Codec().encode(masked)
        assert type(round_trip(masked, allow_pickle=True)) is type(masked)


def test_a_long_double_keeps_its_value() -> None:
    # its bytes have padding, which NumPy leaves to chance: only the value is the same each time
    assert same(round_trip(np.longdouble(1) / 3), np.longdouble(1) / 3)


def test_a_structured_scalar_arrives_writable() -> None:
    scalar = np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")])[0]
    arrived = round_trip(scalar)
    assert type(arrived) is np.void
    assert arrived.dtype == scalar.dtype
    arrived["a"] = 7
    assert arrived["a"] == 7


@pytest.mark.parametrize("dtype", [object, [("a", object)]])
def test_arrays_of_objects_are_refused(dtype: Any) -> None:
    with pytest.raises(EncodeError, match=r"value\[1\]: numpy:ndarray: an array of objects has no form"):
        Codec().encode([0, np.zeros(2, dtype)])


def test_dtypes_that_numpy_only_hosts_are_refused() -> None:
    if string := getattr(getattr(np, "dtypes", None), "StringDType", None):
        with pytest.raises(EncodeError, match="has no form"):
            Codec().encode(np.array(["a"], string()))


def test_tensors_cross_as_arrays() -> None:
    class Tensor:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.ones((2, 2), "f4")

    class OnDevice:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise TypeError("can't convert device tensor, use cpu()")

    assert same_array(round_trip(Tensor()), np.ones((2, 2), "f4"))
    with pytest.raises(EncodeError, match=r"value\.x: .*use cpu"):
        Codec().encode(Frozen(OnDevice()))
    assert round_trip([OnDevice()], export=lambda _: (3, "t", "r"), resolve=lambda *facts: facts) == [(3, "t", "r")]


def test_a_large_array_gives_its_buffer_back() -> None:
    codec = Codec()
    array = np.arange(1 << 19)
    assert same_array(codec.decode(codec.encode([array]))[0], array)
    assert codec._packs == []


# --- classes -------------------------------------------------------------------------------------------


def test_dataclasses_cross() -> None:
    loose = Loose([1], Frozen((1,), {2}), scale=3)
    loose.items.append(Slotted(None, more=One("x")))
    arrived = round_trip(loose)
    assert arrived == loose
    assert arrived.made == 30
    for value in (
        StepResult(State("obs", Hidden.IN_BRANCH, StateMetadata(3, "e", True, {"k": (1,)})), 1.5, {"a": 0.5}, True),
        Action.from_tool_calls([ToolCall("f", {"x": 1}, id="7")], text="t"),
    ):
        assert round_trip(value) == value


def test_missing_fields_stay_missing() -> None:
    one = One(1)
    del one.only
    loose = object.__new__(Loose)
    loose.items = [1]
    assert vars(round_trip(one)) == {}
    assert vars(round_trip(loose)) == {"items": [1], "inner": None}  # `inner` has a value: its class's


def test_no_code_of_a_class_runs_on_arrival() -> None:
    guarded = object.__new__(Guarded)
    object.__setattr__(guarded, "value", (1, 2))
    arrived = round_trip(guarded)
    assert type(arrived) is Guarded
    assert vars(arrived) == {"value": (1, 2)}
    point = tuple.__new__(GuardedPoint, (1, 2))
    assert type(round_trip(point)) is GuardedPoint


def test_named_classes_win_over_modules() -> None:
    def local() -> Any:
        @dataclass
        class Local:
            a: int

        return Local

    cls = local()
    name = f"{__name__}:{cls.__qualname__}"
    data = Codec().encode(cls(1))
    assert Codec().decode(data) == Record(name, {"a": 1})
    classes: dict[str, type] = {}
    codec = Codec(classes=classes)
    classes[name] = cls
    assert codec.decode(data) == cls(1)


@pytest.mark.parametrize(
    "code,name,fields",
    [
        (DATACLASS, "nowhere:Thing", {"a": 1, "b": (2, "x")}),
        (DATACLASS, f"{__name__}:Frozen", {"x": 1, "z": 2}),
        (DATACLASS, f"{__name__}:Point", {"x": 1, "y": 2}),
        (DATACLASS, f"{__name__}:np.ndarray", {"x": 1}),
        (DATACLASS, "builtins:object", {}),
        (DATACLASS, "builtins:int", {"real": 1}),
        (DATACLASS, "os:system", {"command": "true"}),
        (DATACLASS, "os:", {}),
        (DATACLASS, "", {}),
        (DATACLASS, ":::", {}),
        (DATACLASS, "os:path.join", {}),
        (DATACLASS, "\ud800:x", {}),
        (NAMEDTUPLE, "nowhere:Thing", {"a": 1}),
        (NAMEDTUPLE, f"{__name__}:Point", {"y": 1, "x": 2}),
        (NAMEDTUPLE, f"{__name__}:Point", {"x": 1}),
        (NAMEDTUPLE, f"{__name__}:Frozen", {"x": 1, "y": 2}),
        (NAMEDTUPLE, "builtins:tuple", {}),
        (NAMEDTUPLE, "sys:version_info", {}),
        (ENUM, "nowhere:Colour", {"name": "RED", "value": 1}),
        (ENUM, f"{__name__}:Colour", {"name": "GREEN", "value": 1}),
        (ENUM, f"{__name__}:Colour", {"name": "__class__", "value": 1}),
        (ENUM, f"{__name__}:Colour", {"name": ["RED"], "value": {}}),
        (ENUM, f"{__name__}:Colour", {"name": "RED"}),
        (ENUM, f"{__name__}:Inventive", {"name": "x", "value": 77}),
        (ENUM, f"{__name__}:InventiveFlag", {"name": None, "value": 3}),
        (ENUM, f"{__name__}:Perm", {"name": "R", "value": 1 << 20}),
        (ENUM, f"{__name__}:Perm", {"name": "R", "value": "R"}),
        (ENUM, f"{__name__}:Perm", {"name": "R", "value": 2**1000}),
        (ENUM, f"{__name__}:Frozen", {"name": "R", "value": 1}),
        (ENUM, "enum:Enum", {"name": "R", "value": 1}),
    ],
)
def test_what_does_not_fit_is_a_record_and_encodes_back(code: int, name: str, fields: dict[str, Any]) -> None:
    before = set(sys.modules)
    codec = Codec()
    data = bytes(codec.encode(Record(name, fields, code)))
    arrived = codec.decode(data)
    assert arrived == Record(name, fields, code)
    assert codec.encode(arrived) == data
    assert set(sys.modules) == before


def test_aliases_of_enums_and_their_unencodable_values_do_not_matter() -> None:
    assert round_trip([Colour.CRIMSON, Colour.ODD]) == [Colour.RED, Colour.ODD]


def test_a_module_that_imports_lazily_is_not_asked() -> None:
    lazy = types.ModuleType("lazy_for_codec")
    lazy.__getattr__ = lambda name: RAN.append(name)  # type: ignore[method-assign]

    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            RAN.append(name)
            return type.__getattribute__(cls, name)

    lazy.Odd = Meta("Odd", (), {})  # type: ignore[attr-defined]
    sys.modules["lazy_for_codec"] = lazy
    try:
        for path in ("Thing", "Odd.Inner"):
            record = Codec().decode(ext(DATACLASS, [f"lazy_for_codec:{path}", {}]))
            assert type(record) is Record
        assert not RAN
    finally:
        del sys.modules["lazy_for_codec"]


class WithProperty:
    x = property(lambda self: 1, lambda self, value: RAN.append("property"))


@dataclass
class Behind:
    x: int = field(default=0, init=False)
    __slots__ = ()


Behind.x = WithProperty.x  # type: ignore[assignment]


@dataclass
class Failing(Exception):
    x: int = 0


@pytest.mark.parametrize("name", ["Behind", "Failing"])
def test_classes_that_need_their_own_code_stay_records(name: str) -> None:
    assert Codec().decode(ext(DATACLASS, [f"{__name__}:{name}", {"x": 1}])) == Record(f"{__name__}:{name}", {"x": 1})


def test_a_record_reads_like_the_value() -> None:
    record = Record("m:T", {"x": 1, "fields": 2})
    assert record.x == 1
    assert record.fields["fields"] == 2
    with pytest.raises(AttributeError, match="m:T has no field 'y'; its fields: x, fields"):
        _ = record.y
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    assert {record: 1}[copy.copy(record)] == 1
    assert repr(record) == "Record(type_name='m:T', fields={'x': 1, 'fields': 2})"


def test_records_cross_as_keys() -> None:
    data = Codec().encode({Frozen(1): "a"}).replace(b":Frozen", b":Fr0zen")
    arrived = Codec().decode(data)
    assert arrived == {Record(f"{__name__}:Fr0zen", {"x": 1, "y": None}): "a"}
    assert Codec().encode(arrived) == data


# --- errors --------------------------------------------------------------------------------------------


@dataclass
class Board:
    board: Any


class Nasty:
    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("getattr")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("array")

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("class")


@dataclass
class NastyFields:
    x: Any = 1
    y: Any = 2

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


OPAQUE = Opaque()


@pytest.mark.parametrize(
    "value,path",
    [
        (OPAQUE, "value"),
        ({"info": [0, 1, 2, Board(OPAQUE)]}, 'value["info"][3].board'),
        ([Point(1, (OPAQUE,))], "value[0].y[0]"),
        ({1: {(2, 3): OPAQUE}}, "value[1][(2, 3)]"),
        ({'a"b\n': OPAQUE}, 'value["a"b\\n"]'),
        ([[], {OPAQUE: 1}], "value[1]<key <"),
        ([{OPAQUE}], "value[0]<item <"),
        (collections.OrderedDict(a=OPAQUE), 'value["a"]'),
        (types.MappingProxyType({"a": OPAQUE}), 'value["a"]'),
        (Record("m:T", {"f": [OPAQUE]}), "value.f[0]"),
        ([Nasty()], "value[0]"),
        ([0, NastyFields()], "value[1]"),
        ([{"v": memoryview(b"abcd")[::2]}], 'value[0]["v"]'),
        (((memoryview(b"abcd")[::2],),), "value[0][0]"),
        ([lambda: 1], "value[0]"),
        ([Opaque], "value[0]"),
    ],
)
def test_errors_name_the_path(value: Any, path: str) -> None:
    with pytest.raises(EncodeError) as caught:
        Codec().encode(value)
    assert caught.value.path.startswith(path)
    assert "<" in path or caught.value.path == path
    assert caught.value.reason


def deep(wrap: Any, depth: int) -> Any:
    value: Any = None
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}, lambda v: (v,), One, lambda v: ([v],)])
@pytest.mark.parametrize("depth", [2000, 100_000])
def test_too_deep_is_a_typed_error(wrap: Any, depth: int) -> None:
    codec = Codec()
    value = deep(wrap, depth)
    with pytest.raises(EncodeError, match="nested deeper"):
        codec.encode(value)
    assert codec.decode(codec.encode([1, (2,)])) == [1, (2,)]
    while value is not None:  # dataclasses this deep overflow the stack when they are dropped as one
        value = value.only if type(value) is One else next(iter(value.values() if type(value) is dict else value))


@pytest.mark.parametrize("wrap", [lambda v: (v,), One, lambda v: ([v],), lambda v: Point(v)])
@pytest.mark.parametrize("depth", [7, 8, 9, 60, 99])
def test_deep_enough_crosses(wrap: Any, depth: int) -> None:
    assert round_trip(deep(wrap, depth)) == deep(wrap, depth)


def test_deep_alternation_does_not_overflow_the_stack() -> None:
    def wrap(value: Any) -> Any:
        return (deep(lambda inner: [inner], 900) or [], value, deep(lambda inner: [inner], 900))

    value: Any = None
    for _ in range(90):
        value = (deep_list(900, value),)
    with pytest.raises(EncodeError, match="nested deeper"):
        Codec().encode(value)


def deep_list(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


def test_cycles_are_named() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    one = One(None)
    one.only = (one,)
    for value, path in (
        (loop, 'value[1]["again"]'),
        (one, "value.only[0]"),
        ([0, (loop,)], 'value[1][0][1]["again"]'),
    ):
        with pytest.raises(EncodeError, match="contains itself") as caught:
            Codec().encode(value)
        assert caught.value.path == path


def test_a_long_path_is_cut() -> None:
    with pytest.raises(EncodeError) as caught:
        Codec().encode(deep_list(500, OPAQUE))
    assert len(caught.value.path) < 200


def test_the_packer_stays_clean_after_a_failure() -> None:
    codec = Codec()
    good = [1, (2, {"x": Frozen(3)})]
    clean = codec.encode(good)
    for bad in (
        [b"left over", OPAQUE],
        [(b"left over", OPAQUE)],
        [b"x", memoryview(b"abcd")[::2]],
        ["\ud800", OPAQUE],
    ):
        with pytest.raises(EncodeError):
            codec.encode(bad)
        assert codec.encode(good) == clean


def test_describe_survives_anything() -> None:
    assert describe(Nasty()) == (f"{__name__}:Nasty", f"<{__name__}:Nasty whose repr raised RuntimeError>")
    assert describe(5) == ("builtins:int", "5")
    assert describe("x" * 500) == ("builtins:str", "'" + "x" * 199)
    assert describe(deep_list(100_000, 0))[1].endswith("RecursionError>")


# --- pickles and handles -------------------------------------------------------------------------------


def test_pickles_only_where_allowed() -> None:
    data = Codec(allow_pickle=True).encode([Opaque()])
    assert type(Codec(allow_pickle=True).decode(data)[0]) is Opaque
    with pytest.raises(ProtocolError, match="allow pickle on both sides"):
        Codec().decode(data)
    with pytest.raises(ProtocolError):
        Codec(allow_pickle=True).decode(bytes(msgpack.packb(ExtType(PICKLE, b"garbage"))))
    with pytest.raises(EncodeError):
        Codec(allow_pickle=True).encode([lambda: 1])


def test_handles_cross_and_come_back() -> None:
    kept: dict[int, Any] = {}

    def export(obj: object) -> tuple[int, str, str]:
        kept[id(obj)] = obj
        return (id(obj), *describe(obj))

    def resolve(ident: int, type_name: str, text: str) -> object:
        assert type_name == f"{__name__}:Opaque"
        assert text.startswith("<")
        return kept[ident]

    codec = Codec(export=export, resolve=resolve)
    data = codec.encode({"obj": Frozen(OPAQUE), "plain": (1,)})
    assert codec.decode(data)["obj"].x is OPAQUE
    with pytest.raises(ProtocolError, match="nothing here resolves handles"):
        Codec().decode(data)
    kept.clear()
    with pytest.raises(ProtocolError, match="KeyError"):
        codec.decode(data)
    assert round_trip(Opaque(), allow_pickle=True, export=export).__class__ is Opaque


def test_export_may_decline_fail_or_encode_by_itself() -> None:
    with pytest.raises(EncodeError, match="it has no form"):
        Codec(export=lambda _: None).encode(OPAQUE)

    def broken(obj: object) -> None:
        raise RuntimeError("export broke")

    with pytest.raises(EncodeError, match="export broke"):
        Codec(export=broken).encode([OPAQUE])

    def stale(obj: object) -> None:
        raise error

    error = StaleState.__new__(StaleState)
    with pytest.raises(StaleState):
        Codec(export=stale).encode([(OPAQUE,)])

    def again(obj: object) -> tuple[int, str, str]:
        return (len(codec.encode([1, ("nested",)])), "t", "r")

    codec = Codec(export=again, resolve=lambda ident, *_: ident)
    assert codec.decode(codec.encode([b"before", OPAQUE, "after"])) == [b"before", 12, "after"]


# --- hostile bytes -------------------------------------------------------------------------------------


def survives(data: bytes) -> None:
    before = set(sys.modules)
    codec = Codec(resolve=lambda *facts: facts)
    with contextlib.suppress(ProtocolError):
        codec.decode(data)
    assert set(sys.modules) == before
    assert codec.decode(codec.encode((1, (2,)))) == (1, (2,))


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    survives(data)


@settings(max_examples=300, deadline=None)
@given(st.integers(-128, 127), st.binary(max_size=60))
def test_random_payloads(code: int, payload: bytes) -> None:
    survives(b"\xc7" + bytes([len(payload)]) + struct.pack("b", code) + payload)


plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=3)
    ),
    max_leaves=8,
)
names = st.sampled_from(
    [f"{__name__}:{name}" for name in ("Frozen", "Loose", "Guarded", "Point", "Colour", "Perm", "Inventive", "Opaque")]
    + ["os:system", "builtins:object", "builtins:eval", "subprocess:Popen", "nowhere:X"]
)
fields = st.dictionaries(st.sampled_from(["x", "y", "name", "value", "items", "__class__"]), plain_values, max_size=3)
hostile_payloads = plain_values | st.tuples(names, fields).map(list) | st.tuples(names, plain_values).map(list)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from([*range(1, 15), 20, 21, 22, 30, 31, HANDLE]), hostile_payloads)
@example(20, [f"{__name__}:Guarded", {"value": 1}])
@example(1, {})
def test_plausible_payloads(code: int, payload: Any) -> None:
    survives(ext(code, payload))
    survives(bytes(msgpack.packb({"k": [1, ExtType(code, msgpack.packb(payload))]})))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, st.data())
def test_mutated_messages(value: Any, data: st.DataObject) -> None:
    message = bytearray(Codec().encode(value))
    for _ in range(data.draw(st.integers(1, 4))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(message))
    survives(bytes(message[: data.draw(st.integers(0, len(message)))]))


@settings(max_examples=300, deadline=None)
@given(plain_values, plain_values, st.binary(max_size=40), st.sampled_from([ARRAY, SCALAR]))
@example("O", [1], bytes(8), ARRAY)
@example("|O", [1], bytes(8), ARRAY)
@example("os:system", [1], b"", ARRAY)
@example("<f4", [2**40, 2**40], b"", ARRAY)
@example("<f4", [-1], b"", ARRAY)
@example("<f4", [2**62, 0], b"", ARRAY)
@example("V9999999999", [0], b"", ARRAY)
@example("<U0", [5], b"", ARRAY)
@example("<U1", [], b"\xff" * 4, SCALAR)
@example(["<f4", [2**31, 4]], [0], b"", ARRAY)
@example(
    {"names": ["a"], "formats": ["O"], "offsets": [0], "titles": [None], "itemsize": 8, "aligned": 0},
    [1],
    bytes(8),
    ARRAY,
)
@example(
    {"names": ["a"], "formats": ["<f8"], "offsets": [-8], "titles": [None], "itemsize": 8, "aligned": 0},
    [1],
    bytes(8),
    ARRAY,
)
@example(
    {"names": ["a"], "formats": ["<f8"], "offsets": [4], "titles": [None], "itemsize": 8, "aligned": 0},
    [1],
    bytes(8),
    ARRAY,
)
def test_hostile_arrays(dtype: Any, shape: Any, elements: bytes, code: int) -> None:
    header = msgpack.packb([dtype, shape])
    survives(bytes(msgpack.packb(ExtType(code, struct.pack(">I", len(header)) + header + elements))))


def nested_ext(code: int, depth: int, wrap: Any) -> bytes:
    data = b"\x90"
    for _ in range(depth):
        data = bytes(msgpack.packb(ExtType(code, wrap(data))))
    return data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000 + b"\xc0",
        b"\x81\xc0" * 5000 + b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xdb\xff\xff\xff\xff",
        b"\x81\x90\xc0",
        b"\xa1\xff",
        b"\xc0\xc0",
        b"\xd4\x63\x00",
        ext(1, range(3).start),
        ext(1, "abc"),
        bytes(msgpack.packb(ExtType(1, ext(13, [0, 10**15, 1])))),
        bytes(msgpack.packb(ExtType(2, ext(13, [0, 10**15, 1])))),
        ext(2, [[]]),
        ext(5, 10**9),
        ext(6, [1] * 9),
        ext(8, [99, 0, 0, 0, 0, None]),
        ext(9, [10**15, 0, 0]),
        ext(10, "1e99999999999999999999999"),
        ext(12, ["os", "x"]),
        ext(13, [0, 1, 0]),
        ext(20, [1, {}]),
        ext(20, ["nowhere:X", {1: 2}]),
        ext(20, ["nowhere:X", {}, 3]),
        ext(HANDLE, ["1", "t", "r"]),
        nested_ext(1, 5000, lambda data: b"\x91" + data),
        nested_ext(1, 200, lambda data: b"\x91" + data),
        nested_ext(1, 60, lambda data: b"\x91" * 1000 + data),
        nested_ext(20, 300, lambda data: b"\x92\xa3a:b\x81\xa1x" + data),
    ],
)
def test_hostile_messages_are_protocol_errors(data: bytes) -> None:
    survives(data)
    with pytest.raises(ProtocolError):
        Codec().decode(data)


def test_hostile_lengths_make_no_lists() -> None:
    size = 4 << 20
    data = (b"\xdd" + struct.pack(">I", size)) * 1000
    with pytest.raises(ProtocolError):
        Codec().decode(data + bytes(size))


def test_names_never_import() -> None:
    name = "this"  # a module of the standard library that prints when it is imported
    assert name not in sys.modules
    assert type(Codec().decode(ext(DATACLASS, [f"{name}:s", {}]))) is Record
    assert name not in sys.modules


# --- without NumPy -------------------------------------------------------------------------------------

WITHOUT_NUMPY = """
import sys
from ramet.protocol.codec import Codec, Record
codec = Codec()
data = bytes.fromhex(sys.stdin.read())
array, scalar = codec.decode(data)
assert type(array) is type(scalar) is Record
assert (array.type_name, array.dtype, array.shape) == ("numpy:ndarray", "<f4", [2, 3]), array
assert (scalar.type_name, len(scalar.data)) == ("numpy:generic", 2)
class Tensor:
    def __array__(self): raise SystemExit("asked for an array")
try:
    codec.encode(Tensor())
except ValueError as error:
    assert "has no form" in str(error)
assert "numpy" not in sys.modules
assert "asyncio" not in sys.modules
assert codec.encode([array, scalar]) == data
print("good")
"""


def test_without_numpy_arrays_are_records_that_encode_back() -> None:
    data = Codec().encode([np.ones((2, 3), "f4"), np.int16(3)])
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY], input=data.hex(), capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("good\n", "")


def test_a_half_imported_numpy_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Codec().encode(np.ones(2))
    monkeypatch.setitem(sys.modules, "numpy", types.ModuleType("numpy"))
    assert Codec().decode(data).type_name == "numpy:ndarray"


def test_classes_made_on_the_fly_do_not_pile_up() -> None:
    codec = Codec()
    for _ in range(3000):
        codec.encode(type("Fresh", (dict,), {})())
    assert len(codec._forms) <= 1024


def test_options_are_typed() -> None:
    mapping: Mapping[str, type] = types.MappingProxyType({"m:Frozen": Frozen})
    assert Codec(classes=mapping).decode(ext(DATACLASS, ["m:Frozen", {"x": 1, "y": 2}])) == Frozen(1, 2)
    assert codec_module.MAX_DEPTH == 100
    assert round_trip(uuid.UUID(int=5)) == uuid.UUID(int=5)
