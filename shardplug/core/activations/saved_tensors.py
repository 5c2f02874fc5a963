"""What stands for a tensor that autograd saved and whose memory is in CPU memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Group", "Leaving", "Record", "Saved", "stretch_of"]


class Record:
    """A stretch of one storage that is, or was, in CPU memory."""

    __slots__ = ("__weakref__", "begin", "changed", "device", "host", "num_bytes", "used", "wait")

    def __init__(self, host: torch.Tensor, begin: int) -> None:
        self.host: torch.Tensor | None = host
        self.device: torch.Tensor | None = None
        self.wait: Callable[[], None] | None = None
        self.used = False
        self.begin = begin
        self.num_bytes = host.numel()
        self.changed = False

    def __del__(self) -> None:
        # What is computed next may get its memory, which is perhaps still being written to.
        if self.wait is not None and not self.used:
            self.wait()


class Group:
    """What was saved between the ends of two blocks: it comes back together."""

    __slots__ = ("entered", "previous", "records")

    def __init__(self, previous: Group | None) -> None:
        self.records: list[weakref.ref[Record]] = []
        self.previous = previous
        self.entered = False

    def alive(self) -> list[Record]:
        """The records that a graph still holds; autograd lets go of them as it uses them."""
        found = [record for ref in self.records if (record := ref()) is not None]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd keeps in the place of a tensor."""

    record: Record
    group: Group
    dtype: torch.dtype
    offset: int
    """Elements from the beginning of the record."""
    size: torch.Size
    stride: tuple[int, ...]

    def view_of(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the tensor in memory that has come back."""
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True)
class Leaving:
    """Originals whose copies may be under way."""

    token: Any = None
    originals: list[tuple[Record, torch.Tensor, int]] = field(default_factory=list)


def stretch_of(tensor: torch.Tensor, whole: int) -> tuple[int, int]:
    """The bytes of a storage to move for a view of it.

    All of it as a rule, since other operations save other views. A view of a small part is moved
    alone: the rest may be a large tensor that stays where it is.
    """
    reach = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.itemsize
    end = begin + (reach + 1) * tensor.itemsize
    return (0, whole) if 2 * (end - begin) >= whole else (begin, end)
