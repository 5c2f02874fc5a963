"""Reads the `.metadata` of torch.distributed.checkpoint (DCP) without running what it says.

The file is a pickle. It is read by a restricted unpickler, which knows the few classes that DCP
itself keeps in it, and imports none of them: a pickle that names anything else is refused. What it
says of tensors is held against the sizes of the files.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

from shardplug.checkpoint.format.safe_names import shown
from shardplug.checkpoint.format.schema import DTYPES

__all__ = ["METADATA", "UNDECODABLE", "Record", "decode"]

METADATA = ".metadata"

UNDECODABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
    EOFError,
    pickle.UnpicklingError,
    struct.error,
)
"""What `decode` raises for anything but DCP's own metadata."""

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "TensorProperties"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "StorageMeta"),
    (_OLD_MODULE, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ENCODINGS = {(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (_OLD_MODULE, "MEM_FORMAT_ENCODING")}
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
}


class Record:
    """What a pickle says of an object: the name of its class, and its fields."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fields: Any = {}

    def __repr__(self) -> str:
        return f"a {self.kind}"


class _Name:
    """A class or function that a pickle refers to; nothing is imported."""

    __slots__ = ("name",)

    def __init__(self, name: tuple[str, str]) -> None:
        self.name = name

    def __repr__(self) -> str:
        return ".".join(self.name)


def decode(data: bytes) -> Any:
    """Read a pickle of DCP's metadata.

    Args:
        data: The file's content.

    Returns:
        Dictionaries, lists, tuples and plain values; in place of objects a `Record` of each;
        dtypes; sizes of tensors as tuples; paths and memory formats as they were written.

    Raises:
        ValueError: For a class or an operation that DCP's metadata does not have; or another of
            `UNDECODABLE`, for a file that is no pickle, or is cut short.
    """
    return _Reader(data).load()


class _Reader(pickle._Unpickler):  # type: ignore[misc,name-defined,unused-ignore]
    """Python's own reader of pickles, with the operations and the classes of DCP's metadata alone.

    It is the one written in Python, whose memory is bounded by the size of the data.
    """

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        return _find(module, name)

    def _replace_last_two(self, make: Callable[[Any, Any], Any]) -> None:
        last = self.stack.pop()
        self.stack.append(make(self.stack.pop(), last))


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise ValueError(
            f"has the pickle operation {bytes([code])!r}, which torch.distributed.checkpoint does "
            "not use"
        )


def _build(target: Any, fields: Any) -> Any:
    if type(target) is not Record or not isinstance(fields, (dict, tuple)):
        raise ValueError(f"sets the fields of {shown(target)}")
    target.fields = fields
    return target


def _find(module: Any, name: Any) -> Any:
    if module == "torch" and name in DTYPES:
        return DTYPES[name]
    if (module, name) not in _KNOWN:
        raise ValueError(
            f"holds {shown(f'{module}.{name}')}, which is no class of "
            "torch.distributed.checkpoint's metadata: it could run code, and is not loaded"
        )
    return _Name((module, name))


def _new(cls: Any, args: Any) -> Record:
    if not isinstance(cls, _Name) or cls.name not in _RECORDS or args != ():
        raise ValueError(f"makes an object of {shown(cls)}, with {shown(args)}")
    return Record(cls.name[1])


def _call(function: Any, args: Any) -> Any:
    known = _CALLS.get(function.name) if isinstance(function, _Name) else None
    if known is None or not isinstance(args, tuple):
        raise ValueError(f"calls {shown(function)}, with {shown(args)}")
    return known(*args)


def _member(cls: Any, name: Any) -> Any:
    """Return the member of an enumeration, as Python 3.11 writes it."""
    if not isinstance(cls, _Name) or cls.name not in _ENCODINGS:
        raise ValueError(f"asks for {shown(name)} of {shown(cls)}")
    return name


def _same(value: Any) -> Any:
    return value


def _joined(*parts: str) -> str:
    return "/".join(parts)


_CALLS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _same,
    ("builtins", "getattr"): _member,
    ("collections", "OrderedDict"): dict,
    **dict.fromkeys(_ENCODINGS, _same),
    **dict.fromkeys(_PATHS, _joined),
}
"""What the calls in such a pickle do here."""

_KNOWN = _RECORDS | _CALLS.keys()


_AS_PICKLE_DOES = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE MARK EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST "
    "APPEND APPENDS EMPTY_DICT SETITEM SETITEMS BININT BININT1 BININT2 LONG1 BINFLOAT "
    "SHORT_BINUNICODE BINUNICODE BINUNICODE8 BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL "
    "STACK_GLOBAL"
)
"""The operations that DCP's metadata is written with and that make plain values."""

_Reader.dispatch = _Operations(
    {
        code: _Reader.dispatch[code]
        for name in _AS_PICKLE_DOES.split()
        for code in getattr(pickle, name)
    }
)
for _code, _make in ((pickle.REDUCE, _call), (pickle.NEWOBJ, _new), (pickle.BUILD, _build)):
    _Reader.dispatch[_code[0]] = functools.partial(_Reader._replace_last_two, make=_make)
