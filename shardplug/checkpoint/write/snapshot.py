"""Copies of the shards in CPU memory, to be written while training goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

__all__ = ["Snapshot", "SnapshotMemory", "SnapshotPlanner"]

_ALIGNMENT = 64


class SnapshotMemory:
    """One block of CPU memory that is used again by every snapshot.

    A fresh page costs several times the copy into it.

    Attributes:
        num_bytes: Size of the block that is held now.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._block: torch.Tensor | None = None

    def block(self, num_bytes: int) -> torch.Tensor:
        """Return a tensor of at least `num_bytes` bytes, uint8."""
        if self._block is None or self.num_bytes < num_bytes:
            self.release()
            pinned = torch.accelerator.is_available()
            self._block = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            self.num_bytes = num_bytes
        return self._block

    def release(self) -> None:
        """Give the memory back."""
        self._block, self.num_bytes = None, 0


class Snapshot:
    """This rank's part of every tensor, copied into one block of CPU memory.

    Args:
        tensors: Nested dictionaries of DTensors and whole tensors, as they are given to DCP.
        memory: Where the copies are kept; it holds one snapshot at a time.
    """

    def __init__(self, tensors: Mapping[str, Any], memory: SnapshotMemory) -> None:
        locals_ = {name: _local(value).detach() for name, value in _flat(tensors)}
        block = memory.block(max(1, sum(_padded(local) for local in locals_.values())))
        self._copies: dict[str, torch.Tensor] = {}
        offset = 0
        for name, local in locals_.items():
            size = local.numel() * local.element_size()
            copy = block[offset : offset + size].view(local.dtype).view(local.shape)
            self._copies[name] = copy.copy_(local, non_blocking=True)
            offset += _padded(local)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._copies[name]


class SnapshotPlanner(DefaultSavePlanner):
    """Lays a save out by the live tensors' shapes, and writes the snapshot's bytes.

    Args:
        snapshot: The snapshot of what is saved.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor to write; see the base class."""
        return self._snapshot[index.fqn]


def _flat(tensors: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors under the names that DCP gives them: the keys joined by dots."""
    for key, value in tensors.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _padded(local: torch.Tensor) -> int:
    size = local.numel() * local.element_size()
    return -(-size // _ALIGNMENT) * _ALIGNMENT
