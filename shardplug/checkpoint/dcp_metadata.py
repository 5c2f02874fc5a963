"""Reads the `.metadata` of torch.distributed.checkpoint (DCP) without running what it says.

The file is a pickle. Its operations are interpreted here, for the few classes that DCP itself
keeps in it, and none of these is made before its fields were checked: a pickle that names anything
else is refused. What it says of tensors is held against the sizes of the files.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

from shardplug.checkpoint.paths import shown
from shardplug.checkpoint.schema import DTYPES

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
    """Interpret a pickle of DCP's metadata.

    Args:
        data: The file's content.

    Returns:
        Dictionaries, lists, tuples and plain values; in place of objects a `Record` of each;
        dtypes; sizes of tensors as tuples; paths and memory formats as they were written.

    Raises:
        ValueError: For a class or an operation that DCP's metadata does not have; or another of
            `UNDECODABLE`, for a file that is no pickle, or is cut short.
    """
    machine = _Machine(data)
    at = 0
    while data[at] != _STOP:
        operation = _OPERATIONS.get(data[at])
        if operation is None:
            raise ValueError(
                f"has the pickle operation {data[at : at + 1]!r}, which "
                "torch.distributed.checkpoint does not use"
            )
        at = operation(machine, at + 1)
    (result,) = machine.stack
    return result


class _Machine:
    """Pickle's stack machine. Memory and time are bounded by the size of the data."""

    __slots__ = ("below", "data", "memo", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def bytes_at(self, at: int, count: int) -> bytes:
        found = self.data[at : at + count]
        if len(found) < count:
            raise ValueError("is cut short")
        return found

    def number(self, at: int, count: int) -> int:
        if count == 1:
            return self.data[at]
        return int.from_bytes(self.bytes_at(at, count), "little")

    def pop_mark(self) -> list[Any]:
        values, self.stack = self.stack, self.below.pop()
        return values


_Operation = Callable[[_Machine, int], int]
"""Does one operation whose arguments are at a place of the data; returns where they end."""


def _skips(count: int) -> _Operation:
    return lambda machine, at: at + count


def _pushes(make: Callable[[], Any]) -> _Operation:
    def operation(machine: _Machine, at: int) -> int:
        machine.stack.append(make())
        return at

    return operation


def _pushes_int(count: int, signed: bool = False) -> _Operation:
    def operation(machine: _Machine, at: int) -> int:
        if signed:
            found = int.from_bytes(machine.bytes_at(at, count), "little", signed=True)
        else:
            found = machine.number(at, count)
        machine.stack.append(found)
        return at + count

    return operation


def _push_long(machine: _Machine, at: int) -> int:
    count = machine.number(at, 1)
    found = int.from_bytes(machine.bytes_at(at + 1, count), "little", signed=True)
    machine.stack.append(found)
    return at + 1 + count


def _push_float(machine: _Machine, at: int) -> int:
    machine.stack.append(struct.unpack(">d", machine.bytes_at(at, 8))[0])
    return at + 8


def _pushes_text(count: int) -> _Operation:
    def operation(machine: _Machine, at: int) -> int:
        length = machine.number(at, count)
        machine.stack.append(str(machine.bytes_at(at + count, length), "utf-8"))
        return at + count + length

    return operation


def _gets(count: int) -> _Operation:
    def operation(machine: _Machine, at: int) -> int:
        machine.stack.append(machine.memo[machine.number(at, count)])
        return at + count

    return operation


def _puts(count: int) -> _Operation:
    def operation(machine: _Machine, at: int) -> int:
        index = machine.number(at, count) if count else len(machine.memo)
        machine.memo[index] = machine.stack[-1]
        return at + count

    return operation


def _replaces(count: int, make: Callable[..., Any]) -> _Operation:
    """Replace the last values of the stack by what is made of them."""

    def operation(machine: _Machine, at: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise ValueError("is no pickle")
        stack[-count:] = [make(*stack[-count:])]
        return at

    return operation


def _mark(machine: _Machine, at: int) -> int:
    machine.below.append(machine.stack)
    machine.stack = []
    return at


def _push_tuple(machine: _Machine, at: int) -> int:
    values = tuple(machine.pop_mark())
    machine.stack.append(values)
    return at


def _push_global(machine: _Machine, at: int) -> int:
    middle = machine.data.index(b"\n", at)
    end = machine.data.index(b"\n", middle + 1)
    module, name = (
        str(machine.data[at:middle], "utf-8"),
        str(machine.data[middle + 1 : end], "utf-8"),
    )
    machine.stack.append(_find(module, name))
    return end + 1


def _append(machine: _Machine, at: int) -> int:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])
    return at


def _appends(machine: _Machine, at: int) -> int:
    values = machine.pop_mark()
    _extend(machine.stack[-1], values)
    return at


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) is not list:
        raise ValueError("is no pickle")
    target.extend(values)


def _set_item(machine: _Machine, at: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])
    return at


def _set_items(machine: _Machine, at: int) -> int:
    items = machine.pop_mark()
    _update(machine.stack[-1], items)
    return at


def _update(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or len(items) % 2:
        raise ValueError("is no pickle")
    target.update(zip(items[::2], items[1::2], strict=True))


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


_STOP = pickle.STOP[0]

_OPERATIONS: Mapping[int, _Operation] = {
    code[0]: operation
    for code, operation in (
        (pickle.PROTO, _skips(1)),
        (pickle.FRAME, _skips(8)),
        (pickle.NONE, _pushes(lambda: None)),
        (pickle.NEWTRUE, _pushes(lambda: True)),
        (pickle.NEWFALSE, _pushes(lambda: False)),
        (pickle.EMPTY_TUPLE, _pushes(tuple)),
        (pickle.EMPTY_LIST, _pushes(list)),
        (pickle.EMPTY_DICT, _pushes(dict)),
        (pickle.BININT, _pushes_int(4, signed=True)),
        (pickle.BININT1, _pushes_int(1)),
        (pickle.BININT2, _pushes_int(2)),
        (pickle.LONG1, _push_long),
        (pickle.BINFLOAT, _push_float),
        (pickle.SHORT_BINUNICODE, _pushes_text(1)),
        (pickle.BINUNICODE, _pushes_text(4)),
        (pickle.BINUNICODE8, _pushes_text(8)),
        (pickle.BINGET, _gets(1)),
        (pickle.LONG_BINGET, _gets(4)),
        (pickle.BINPUT, _puts(1)),
        (pickle.LONG_BINPUT, _puts(4)),
        (pickle.MEMOIZE, _puts(0)),
        (pickle.MARK, _mark),
        (pickle.TUPLE, _push_tuple),
        (pickle.TUPLE1, _replaces(1, lambda *values: values)),
        (pickle.TUPLE2, _replaces(2, lambda *values: values)),
        (pickle.TUPLE3, _replaces(3, lambda *values: values)),
        (pickle.GLOBAL, _push_global),
        (pickle.STACK_GLOBAL, _replaces(2, _find)),
        (pickle.REDUCE, _replaces(2, _call)),
        (pickle.NEWOBJ, _replaces(2, _new)),
        (pickle.BUILD, _replaces(2, _build)),
        (pickle.APPEND, _append),
        (pickle.APPENDS, _appends),
        (pickle.SETITEM, _set_item),
        (pickle.SETITEMS, _set_items),
    )
}
"""The operations that DCP's metadata is written with, by their codes."""
