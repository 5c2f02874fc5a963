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

from shardplug.checkpoint.format.safe_names import shown
from shardplug.checkpoint.format.schema import check_depth, check_shape
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
    try:
        header = _header(path)[0]
    except CheckpointError:
        return False
    said = header.get("__metadata__")
    return isinstance(said, dict) and said.get("written_by") == _WRITER


def read_header(path: Path) -> dict[str, Entry]:
    """Return where each tensor of a file is.

    Raises:
        CheckpointError: When it is no safetensors file, is shorter than its header says, or the
            header does not describe tensors side by side.
    """
    header, start, size = _header(path)
    try:
        check_depth(header)
        entries = {
            name: _entry(name, value, start)
            for name, value in header.items()
            if name != "__metadata__"
        }
    except ValueError as error:
        raise CheckpointError(f"The header of {path} is damaged: {error}.") from error
    at = start
    for begin, name in sorted((e.start, n) for n, e in entries.items() if e.size_bytes):
        if begin != at:
            where = f"byte {at - start}, where the tensor before it ends"
            raise CheckpointError(
                f"The header of {path} is damaged: {shown(name)} begins at byte {begin - start} "
                f"of the data, expected {where if at > start else 'byte 0'}."
            )
        at += entries[name].size_bytes
    if at != size:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes, its header says {at}.")
    return entries


def _header(path: Path) -> tuple[dict[str, object], int, int]:
    """Return a file's header, where its tensors' bytes start, and its size.

    Raises:
        CheckpointError: When it is no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else _LARGEST_HEADER + 1
        if length > min(_LARGEST_HEADER, size - 8):
            raise CheckpointError(f"{path} is damaged, or no safetensors file.")
        data = file.read(length)
    try:
        header = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {path} cannot be read: {error!r}.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"The header of {path} is damaged: it is {shown(header)}.")
    return header, 8 + length, size


def _entry(name: str, value: object, start: int) -> Entry:
    """Return one tensor's place in the file.

    Raises:
        ValueError: For an entry that is none, or whose bytes are not as many as its shape has.
    """
    where = shown(name)
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown(value)}, expected dtype, shape and data_offsets")
    code = value.get("dtype")
    if not isinstance(code, str) or code not in _CODES:
        raise ValueError(f"the dtype of {where} is {shown(code)}, which is not known")
    dtype = _CODES[code]
    shape = check_shape(f"the shape of {where}", value.get("shape"))
    offsets = value.get("data_offsets")
    if not isinstance(offsets, list) or not all(type(at) is int for at in offsets):
        offsets = []
    if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] < 2**62:
        raise ValueError(f"the data_offsets of {where} are no two places in the file")
    begin, end = offsets
    if end - begin != num_bytes(shape, dtype):
        raise ValueError(
            f"{where} has {end - begin} bytes, expected {num_bytes(shape, dtype)} for shape "
            f"{shown(list(shape))} of {code}"
        )
    return Entry(dtype, shape, start + begin, end - begin)
