"""Values to msgpack and back, without I/O.

Rules:

1. Only the standard library and msgpack are imported; NumPy is used if somebody else has loaded it.
2. `encode` raises `EncodeError` and `decode` raises `ProtocolError`, whatever the value or the bytes are.
3. Bytes never import a module and never run a class's own construction.
4. What msgpack knows by itself stays at its speed: all else is in its hooks.

Extension types: 1 to 14 are the standard library's values (`values`), 20 to 22 classes (`classes`), 30 and
31 NumPy (`arrays`), 40 a pickle, 41 a handle. Payloads are msgpack again, except those of NumPy and pickles.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgpack
from msgpack import ExtType, fallback

from ramet.errors import EncodeError, ProtocolError, RametError
from ramet.protocol import arrays
from ramet.protocol.classes import REBUILD, Record, describe, find, name_of, reader_of
from ramet.protocol.paths import locate
from ramet.protocol.values import BASES, FORMS, INTEGER, Form, integer_bytes

__all__ = ["HANDLE", "PICKLE", "Codec", "Record", "describe"]

PICKLE, HANDLE = 40, 41

MAX_DEPTH = 100
"""How deep extension types may stand in each other; lists and dicts have msgpack's own limit of 1024."""

# msgpack's C code takes 45 KiB of stack for each nested decode and 400 KiB for the deepest nested encode:
# past this depth its Python twin, which takes none, goes on
_C_DEPTH = 8

_LARGE = 1 << 20  # bytes from which on the lengths in a message are checked before anything is made
_KEEP = 1 << 20  # bytes of a message from which on the packers' buffers are given back

_SURROGATES = "surrogatepass"  # lone surrogates do occur in what models write

_PACKER_ERRORS = (ValueError, TypeError, OverflowError, BufferError, RecursionError, MemoryError)

Export = Callable[[object], "tuple[int, str, str] | None"]
Resolve = Callable[[int, str, str], object]


class _Refused(Exception):
    """A value that cannot cross; `culprit` is `None` where msgpack did not say which one it was."""

    def __init__(self, culprit: object, reason: str) -> None:
        self.culprit = culprit
        self.reason = reason


class Codec:
    """Encodes and decodes messages; one thread at a time, hooks may use it again.

    Args:
        allow_pickle: let what has no other form cross as a pickle, and load pickles that arrive. Only
            between processes that trust each other.
        classes: classes by "module:qualname" that are looked at before the modules that are loaded. It is
            kept, not copied, so that classes may be added later.
        export: called with an object that has no form; returns `(id, type_name, repr)` to let it cross as
            a handle, or `None`. May be called again for the same object, and for a message that fails in
            the end.
        resolve: called with what `export` returned over there; returns the object to use. What it raises
            becomes a `ProtocolError`, except a `RametError`.
    """

    __slots__ = (
        "_builders",
        "_classes",
        "_depth",
        "_export",
        "_forms",
        "_hook",
        "_level",
        "_packs",
        "_pickles",
        "_resolve",
    )

    def __init__(
        self,
        *,
        allow_pickle: bool = False,
        classes: Mapping[str, type] | None = None,
        export: Export | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        self._pickles = allow_pickle
        self._classes: Mapping[str, type] = {} if classes is None else classes
        self._export = export
        self._resolve = resolve
        self._depth = 0
        self._level = 0
        self._packs: list[Callable[[object], bytes]] = []
        self._forms: dict[type, Callable[[Any], object]] = {}
        self._builders: dict[int, Callable[[bytes], object]] = self._all_builders()
        self._hook = self._build

    def exporting(self, export: Export) -> Codec:
        """A codec like this one, with another `export`."""
        return Codec(allow_pickle=self._pickles, classes=self._classes, export=export, resolve=self._resolve)

    def encode(self, value: object) -> bytes:
        """The value as bytes.

        Raises:
            EncodeError: something in it cannot cross; the error names the path to it.
        """
        try:
            data = self._pack(value)
        except Exception as error:
            self._packs = []  # whatever was in their buffers
            raise _explain(value, error) from error.__cause__
        if len(data) > _KEEP:
            self._packs = []
        return data

    def decode(self, data: bytes | bytearray | memoryview) -> Any:
        """The value that `encode` was given, as far as this process knows its classes.

        Raises:
            ProtocolError: the bytes are malformed, or hold a pickle or a handle that is not expected here.
        """
        try:
            return self._unpack(data)
        except RametError:
            raise
        except Exception as error:
            raise ProtocolError(f"malformed message: {_text_of(error)}") from error

    # --- encoding --------------------------------------------------------------------------------------

    def _pack(self, value: object) -> bytes:
        # msgpack calls _default in the middle of its own buffer: every depth has a packer of its own
        depth = self._depth
        if depth >= len(self._packs):
            self._add_packers(depth)
        self._depth = depth + 1
        try:
            try:
                return self._packs[depth](value)
            except UnicodeEncodeError:
                return self._packer(depth, _SURROGATES)(value)
        except _PACKER_ERRORS as error:
            raise _Refused(None, _packer_reason(error)) from error
        finally:
            self._depth = depth

    def _add_packers(self, depth: int) -> None:
        if depth >= MAX_DEPTH:
            raise _Refused(None, "recursion limit")
        while depth >= len(self._packs):
            self._packs.append(self._packer(len(self._packs), None))

    def _packer(self, depth: int, errors: str | None) -> Callable[[object], bytes]:
        kind = msgpack.Packer if depth < _C_DEPTH else fallback.Packer
        packer = kind(default=self._default, strict_types=True, unicode_errors=errors, buf_size=1024)
        return packer.pack  # type: ignore[no-any-return]

    def _default(self, obj: object) -> object:
        try:
            form = self._forms.get(type(obj))
            if form is None:
                form = self._learn(type(obj))
            return form(obj)
        except (_Refused, RametError):
            raise
        except RecursionError as error:
            raise _Refused(None, "recursion limit") from error
        except Exception as error:
            raise _Refused(obj, f"reading it raised {_text_of(error)}") from error

    def _learn(self, cls: type) -> Callable[[Any], object]:
        if len(self._forms) >= 1024:
            self._forms.clear()  # classes made on the fly must not pile up
        form = self._forms[cls] = self._form_of(cls)
        return form

    def _form_of(self, cls: type) -> Callable[[Any], object]:
        if cls is Record:
            return self._encode_record
        if (reader := reader_of(cls)) is not None:
            return partial(self._encode_fields, reader[0], name_of(cls), reader[1])
        if (kind := arrays.kind_of(cls)) is not None:
            return partial(self._encode_array, kind)
        for base in type.__getattribute__(cls, "__mro__"):
            if base is int:
                return self._encode_int
            if base in BASES:
                return BASES[base]
            if base in _FORMS:
                encode = self._encode_set if base in (set, frozenset) else self._encode_form
                return partial(encode, _FORMS[base])
        return self._encode_other

    def _encode_form(self, form: Form, obj: object) -> ExtType:
        return _ext_type(form.code, self._pack(form.plain(obj)))

    def _encode_set(self, form: Form, obj: object) -> ExtType:
        # in the order of their bytes: equal sets give equal bytes, whatever their history and hash seed
        items: Any = form.plain(obj)
        packed = sorted(map(self._pack, items))
        header: bytes = msgpack.Packer(buf_size=16).pack_array_header(len(packed))
        return _ext_type(form.code, b"".join((header, *packed)))

    def _encode_int(self, obj: int) -> object:
        number = int.__int__(obj)
        if -(1 << 63) <= number < 1 << 64:
            return number
        return _ext_type(INTEGER, self._pack(integer_bytes(number)))

    def _encode_fields(self, code: int, name: str, read: Callable[[Any], object], obj: object) -> ExtType:
        return _ext_type(code, self._pack([name, read(obj)]))

    def _encode_record(self, obj: Record) -> ExtType:
        if obj.code in (arrays.ARRAY, arrays.SCALAR):
            return _ext_type(obj.code, arrays.join(obj.fields))
        return _ext_type(obj.code, self._pack([obj.type_name, dict(obj.fields)]))

    def _encode_array(self, code: int, obj: object) -> object:
        try:
            return _ext_type(code, arrays.pack(obj))
        except ValueError as error:
            return self._encode_last(obj, str(error))

    def _encode_other(self, obj: object) -> object:
        reason = "it has no form"
        try:
            array = arrays.array_of(obj)
            if array is not None:
                return _ext_type(arrays.ARRAY, arrays.pack(array))
        except Exception as error:
            reason = f"its __array__ raised {_text_of(error)}"
        return self._encode_last(obj, reason)

    def _encode_last(self, obj: object, reason: str) -> ExtType:
        if self._pickles and (pickled := _pickled(obj)) is not None:
            return _ext_type(PICKLE, pickled)
        handle = self._export(obj) if self._export is not None else None
        if handle is None:
            advice = "make it a dataclass or a plain value, or allow pickle on both sides"
            raise _Refused(obj, f"{name_of(type(obj))}: {reason}; {advice}")
        return _ext_type(HANDLE, self._pack(list(handle)))

    # --- decoding --------------------------------------------------------------------------------------

    def _unpack(self, data: bytes | bytearray | memoryview) -> Any:
        hook = self._hook
        if self._level >= _C_DEPTH:
            return fallback.unpackb(data, ext_hook=hook, strict_map_key=False, unicode_errors=_SURROGATES)
        if len(data) > _LARGE:
            _check_lengths(data)
        # spelled out: a partial would cost as much again as the call
        return msgpack.unpackb(data, ext_hook=hook, strict_map_key=False, unicode_errors=_SURROGATES)

    def _build(self, code: int, data: bytes) -> object:
        build = self._builders.get(code)
        if build is None:
            raise ProtocolError(f"malformed message: there is no extension type {code}")
        if self._level >= MAX_DEPTH:
            raise ProtocolError(f"malformed message: nested deeper than {MAX_DEPTH} levels")
        self._level += 1
        try:
            return build(data)
        finally:
            self._level -= 1

    def _all_builders(self) -> dict[int, Callable[[bytes], object]]:
        builders: dict[int, Callable[[bytes], object]] = {
            arrays.ARRAY: partial(arrays.unpack, arrays.ARRAY),
            arrays.SCALAR: partial(arrays.unpack, arrays.SCALAR),
            PICKLE: self._build_pickle,
            HANDLE: self._build_handle,
        }
        builders |= {form.code: partial(self._build_form, form) for form in FORMS}
        builders |= {code: partial(self._build_fields, code) for code in REBUILD}
        return builders

    def _build_form(self, form: Form, data: bytes) -> object:
        plain = self._unpack(data)
        if type(plain) is not form.wire:
            raise ProtocolError(f"malformed message: {form.base.__name__} made of {type(plain).__name__}")
        return form.build(plain)

    def _build_fields(self, code: int, data: bytes) -> object:
        name, fields = _typed(self._unpack(data), str, dict)
        cls = find(name, self._classes)
        value = None if cls is None else REBUILD[code](cls, fields)
        return _record(name, fields, code) if value is None else value

    def _build_pickle(self, data: bytes) -> object:
        if not self._pickles:
            raise ProtocolError("a pickle arrived and is not allowed here: allow pickle on both sides")
        return pickle.loads(data)

    def _build_handle(self, data: bytes) -> object:
        ident, type_name, text = _typed(self._unpack(data), int, str, str)
        if self._resolve is None:
            raise ProtocolError(f"a handle of {type_name[:100]} arrived and nothing here resolves handles")
        return self._resolve(ident, type_name, text)


_FORMS = {form.base: form for form in FORMS}


def _ext_type(code: int, data: bytes) -> ExtType:
    return tuple.__new__(ExtType, (code, data))  # its own __new__ checks in Python, at twice the cost


def _pickled(obj: object) -> bytes | None:
    try:
        return pickle.dumps(obj, protocol=5)
    except Exception:
        return None


def _typed(plain: Any, *types: type) -> Any:
    if type(plain) is not list or [type(item) for item in plain] != list(types):
        raise ProtocolError("malformed message: an extension type with a wrong payload")
    return plain


def _record(name: str, fields: dict[Any, Any], code: int) -> Record:
    if not all(type(key) is str for key in fields):
        raise ProtocolError("malformed message: a field without a name")
    return Record(name, fields, code)


def _check_lengths(data: bytes | bytearray | memoryview) -> None:
    """Refuse a message that promises more items than it has, before lists of that length are made.

    msgpack bounds each length by the size of the message, but makes each list before it reads the next
    length: a message of 1 MB could ask for 1024 lists of 8 MB.
    """
    reader = msgpack.Unpacker(max_buffer_size=len(data), read_size=len(data))
    reader.feed(data)
    reader.skip()


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error!s:.300}" if str(error) else type(error).__name__
    except Exception:
        return type(error).__name__


def _packer_reason(error: BaseException) -> str:
    return "recursion limit" if isinstance(error, RecursionError) else str(error) or type(error).__name__


def _explain(value: object, error: Exception) -> RametError:
    if isinstance(error, RametError):
        return error
    refused = error if isinstance(error, _Refused) else _Refused(None, _text_of(error))
    reason = refused.reason
    if reason.startswith("recursion limit"):
        reason = f"it contains itself, or is nested deeper than {MAX_DEPTH} levels: send it in parts"
    return EncodeError(locate(value, refused.culprit), reason)
