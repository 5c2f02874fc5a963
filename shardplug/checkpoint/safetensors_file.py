"""The safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.

Written here and read here, a piece at a time, so that neither a file nor a tensor needs to be in
memory as a whole. Every number in the format is little-endian.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shardplug.errors import CheckpointError

__all__ = ["Entry", "code_of", "header_bytes", "is_own_file", "num_bytes", "read_header"]

_WRITER = "shardplug"

_CODES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        start: Where its bytes start in the file.
        size_bytes: How many they are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size_bytes: int


def num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def code_of(name: str, dtype: torch.dtype) -> str:
    """Return the format's name of a dtype.

    Raises:
        CheckpointError: For a dtype that the format lacks, naming the tensor.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"Expected tensors of a dtype that safetensors files can hold, but {name} is {dtype}. "
            "Export in another dtype."
        )
    return _NAMES[dtype]


def header_bytes(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """Return all bytes of a file that come before the tensors'.

    Args:
        tensors: dtype and shape by name, in the order in which their bytes follow. Readers want
            each aligned to its own size, so wider dtypes come first.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", "written_by": _WRITER}}
    start = 0
    for name, (dtype, shape) in tensors.items():
        end = start + num_bytes(shape, dtype)
        header[name] = {
            "dtype": code_of(name, dtype),
            "shape": list(shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return struct.pack("<Q", len(text)) + text


def is_own_file(path: Path) -> bool:
    """Whether a file was written here: its header says so."""
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LARGEST_HEADER + 1
        if length > _LARGEST_HEADER:
            return False
        try:
            header = json.loads(file.read(length))
        except ValueError:
            return False
    said = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(said, dict) and said.get("written_by") == _WRITER


def read_header(path: Path) -> dict[str, Entry]:
    """Return where each tensor of a file is.

    Raises:
        CheckpointError: When it is no safetensors file, or is shorter than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LARGEST_HEADER + 1
        if length > min(_LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{path} is damaged, or no safetensors file.")
        try:
            header = json.loads(file.read(length))
            entries = {
                name: _entry(value, 8 + length)
                for name, value in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"The header of {path} cannot be read: {error!r}.") from error
    end = max((entry.start + entry.size_bytes for entry in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, its header says {end}.")
    for name, entry in entries.items():
        if entry.size_bytes != num_bytes(entry.shape, entry.dtype):
            raise CheckpointError(f"The header of {path} is damaged at {name}.")
    return entries


def _entry(value: Mapping[str, object], offset: int) -> Entry:
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(code, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("dtype, shape and data_offsets are a string and two lists")
    if code not in _CODES:
        raise ValueError(f"dtype {code} is not known")
    start, end = offsets
    return Entry(_CODES[code], tuple(shape), offset + start, end - start)
