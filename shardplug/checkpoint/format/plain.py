"""Values that can be read back without running code from the file."""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import IO, Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from shardplug.checkpoint.format.schema import check_depth

__all__ = ["UNREADABLE", "culprit", "innermost", "load_plain", "load_tensor", "why", "with_tensors"]

UNREADABLE = (
    pickle.PickleError,
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What `load_plain` raises for a file that is damaged or holds other objects."""

_VALUES_PER_BYTE = 20
_VALUES = 100_000
"""Values that a file may hold, in all and for each byte: a few bytes can hold many by reference."""

_TENSOR_BYTES = 2**28
"""Bytes that a file's tensors may take beyond `_VALUES_PER_BYTE` for each that it has."""


def load_plain(file: str | PathLike[str] | IO[bytes]) -> Any:
    """Load plain types and tensors onto the CPU; anything else in the file raises.

    Memory and time are bounded by the file's size.

    Raises:
        Exception: One of `UNREADABLE`.
    """
    if isinstance(file, (str, PathLike)):
        with open(file, "rb") as opened:
            return load_plain(opened)
    size, archive = _repacked(file)
    # torch writes empty bytes as a call of `bytes`, and does not read it back by itself.
    with torch.serialization.safe_globals([(_empty_bytes, "builtins.bytes")]):
        value = load_tensor(archive)
    reached = _VALUES_PER_BYTE * size
    check_depth(value, most=_VALUES + reached, most_bytes=_TENSOR_BYTES + reached)
    return value


def load_tensor(file: IO[bytes]) -> Any:
    """Load what `torch.save` wrote onto the CPU, without running code in it.

    Raises:
        Exception: One of `UNREADABLE`.
    """
    return torch.load(file, map_location="cpu", weights_only=True)


def why(error: BaseException) -> str:
    """Say in one line why a file could not be loaded; torch gives pages of advice besides."""
    error = innermost(error)
    found = re.search(r"(?:WeightsUnpickler error:\s*|(?=Trying to load ))([^\n]+)", str(error))
    text = found[1].split(". Please use", 1)[0] if found else str(error).strip().split("\n", 1)[0]
    text = "".join(char if char.isprintable() else "?" for char in text)
    return (text if len(text) <= 300 else f"{text[:297]}...") or type(error).__name__


def innermost(error: BaseException) -> BaseException:
    """Return the error of the first rank that DCP has put into one of its own."""
    if isinstance(error, CheckpointException) and error.failures:
        return error.failures[min(error.failures)][0]
    return error


def _empty_bytes() -> bytes:
    return b""


def _repacked(file: IO[bytes]) -> tuple[int, IO[bytes]]:
    """Return the size of an archive of `torch.save`, and one with the same parts.

    torch believes what an archive says of itself, and may return memory that was never written.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    target = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(target, "w") as new:
        entries = old.infolist()
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
        if not stored or sum(entry.file_size for entry in entries) > size:
            raise ValueError("it is a compressed archive, which torch.save does not write")
        if len({entry.filename for entry in entries}) < len(entries):
            raise ValueError("it has two parts of one name")
        for entry in entries:
            new.writestr(zipfile.ZipInfo(entry.filename), old.read(entry))
    target.seek(0)
    return size, target


def culprit(where: str, value: Any) -> tuple[str, Any] | None:
    """Find the innermost part of a value that would not be read back.

    Args:
        where: What the message calls the value.
        value: Anything.

    Returns:
        The part and where it is, or None when all reads back.
    """
    if _reads_back(value):
        return None
    items: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, Mapping):
        items = iter(value.items())
    elif isinstance(value, (list, tuple)):
        items = iter(enumerate(value))
    for key, item in items:
        found = culprit(f"{where}[{key!r}]", item)
        if found is not None:
            return found
    return where, value


def _reads_back(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(with_tensors(value, lambda _: None), buffer)  # those read back, and may be large
        buffer.seek(0)
        load_plain(buffer)
    except UNREADABLE:
        return False
    return True


def with_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with each tensor in its containers replaced by what `change` makes of it."""
    if type(value) is torch.Tensor:
        return change(value)
    if type(value) is dict:
        return {key: with_tensors(item, change) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(with_tensors(item, change) for item in value)
    return value
