"""Tensors in safetensors files, read by rows through a small buffer.

Not through a memory map: its pages would count as this process's memory until the kernel takes
them back, and a file that is cut short would end the process.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardplug.checkpoint.format.safetensors_file import Entry
from shardplug.errors import CheckpointError

__all__ = ["ConvertedTensor", "FileTensor", "same_values"]

_PIECE_BYTES = 8 * 2**20
"""Bytes read at a time."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file.

    Attributes:
        path: The file.
        name: The tensor's name in it.
        entry: Where it is in the file, its shape and its dtype.
        rounded_to: dtype of the parameter it is for: values pass through it, as they would if
            the whole model were loaded, before they are cast to what the engine keeps.
    """

    path: Path
    name: str
    entry: Entry
    rounded_to: torch.dtype | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return self.entry.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the file."""
        return self.entry.dtype

    def read_into(self, out: torch.Tensor, first_row: int) -> None:
        """Fill `out` with rows of the tensor, piece by piece.

        Args:
            out: Contiguous, of shape (rows, *shape[1:]), of any dtype, on any device.
            first_row: Where its rows start.

        Raises:
            CheckpointError: When the file cannot be read.
        """
        flat = out.view(-1)
        size = self.dtype.itemsize
        row_elements = flat.numel() // out.shape[0] if out.ndim else 1
        start = self.entry.start + first_row * row_elements * size
        step = min(_PIECE_BYTES // size, flat.numel())
        buffer = bytearray(step * size)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(start)
                for first in range(0, flat.numel(), step):
                    count = min(step, flat.numel() - first)
                    self._read(file, memoryview(buffer)[: count * size])
                    piece = torch.frombuffer(buffer, dtype=self.dtype, count=count)
                    if self.rounded_to not in (None, self.dtype, out.dtype):
                        piece = piece.to(self.rounded_to)
                    flat[first : first + count].copy_(piece)
        except OSError as error:
            raise CheckpointError(
                f"{self.name} cannot be read from {self.path}: {error.strerror or error}."
            ) from error

    def _read(self, file: Any, view: memoryview) -> None:
        while view:
            count = file.readinto(view)
            if not count:
                raise CheckpointError(
                    f"{self.path} is damaged: it ends within {self.name}. Copy or download it "
                    "again."
                )
            view = view[count:]

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all of it on the CPU."""
        out = torch.empty(self.shape, dtype=dtype)
        if out.numel():
            self.read_into(out, 0)
        return out


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """A parameter that transformers makes of several tensors, such as the weights of all experts.

    Attributes:
        converter: The conversion, an entry of transformers' own table.
        name: The parameter's full name.
        first_name: Full name of the conversion's first result.
        parts: The files' tensors by the conversion's pattern, in its order.
        shape: The parameter's shape.
        by_row: Whether each tensor of a pattern becomes one row, so that rows need their own
            tensors only.
        rounded_to: dtype of the parameter.
        config: The model's config, which some conversions read.
    """

    converter: Any
    name: str
    first_name: str
    parts: dict[str, list[FileTensor]]
    shape: tuple[int, ...]
    by_row: bool
    rounded_to: torch.dtype
    config: Any

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the files."""
        return next(part.dtype for parts in self.parts.values() for part in parts)

    def read_into(self, out: torch.Tensor, first_row: int) -> None:
        """Fill `out` with rows of the converted tensor.

        Raises:
            CheckpointError: When a file cannot be read.
        """
        chosen = self.parts
        if self.by_row:
            rows = slice(first_row, first_row + out.shape[0])
            chosen = {pattern: parts[rows] for pattern, parts in self.parts.items()}
        made = convert(
            self, {p: [t.whole(self.rounded_to) for t in ts] for p, ts in chosen.items()}
        )
        out.copy_(made if self.by_row else made[first_row : first_row + out.shape[0]])


def convert(stored: ConvertedTensor, tensors: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    """Run a conversion on tensors, which may be on meta."""
    converter = copy.deepcopy(stored.converter)
    for pattern, values in tensors.items():
        for value in values:
            converter.add_tensor(stored.first_name, pattern, pattern, value)
    made = converter.convert(stored.first_name, config=stored.config)
    value = made[stored.name]
    found = value[0] if isinstance(value, list) else value
    assert isinstance(found, torch.Tensor)
    return found


def same_values(first: FileTensor, second: FileTensor) -> bool:
    """Whether two tensors of one shape hold the same values, NaN included."""
    if first.shape != second.shape:
        return False
    rows = first.shape[0] if first.shape else 1
    row_bytes = max(1, first.entry.size_bytes // max(1, rows))
    step = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, rows, step):
        shape: Sequence[int] = (min(step, rows - start), *first.shape[1:]) if first.shape else ()
        one, other = torch.empty(shape, dtype=first.dtype), torch.empty(shape, dtype=first.dtype)
        if one.numel():
            first.read_into(one, start)
            second.read_into(other, start)
        if not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
            return False
    return True
