"""Let checkpoints write and read tensors whose values rest in a tier, one at a time."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from shardplug.core.tier_tensor import TierTensor, in_tier
from shardplug.errors import CheckpointError

__all__ = ["LoadPlanner", "SavePlanner"]


class SavePlanner(DefaultSavePlanner):
    """Reads a tensor out of its tier when it is about to be written.

    For a writer with one thread: torch's keeps every tensor that it has written until its file is
    done, so the memory of the one before is given back when the next is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: torch.Tensor | None = None

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor to write; see the base class."""
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
            self._written = None
        found = super().lookup_object(index)
        stored = in_tier(found) if isinstance(found, torch.Tensor) else None
        if stored is None:
            return found
        # In a storage of just this size, or torch would copy it into one.
        self._written = torch.empty(stored.shape, dtype=stored.dtype).copy_(stored.holder.read())
        return self._written


class LoadPlanner(DefaultLoadPlanner):
    """Puts what was read of a tensor into its tier before the next one is read.

    It reads tensors alone: torch's own planner unpickles what is not one, which may run code.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._under_way: dict[int, TierTensor] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return memory to read into; see the base class."""
        whole = self.lookup_tensor(read_item.dest_index)
        stored = in_tier(whole)
        if stored is None:
            target: torch.Tensor = super().resolve_tensor(read_item)
            return target
        self._under_way[id(read_item)] = stored
        return torch.empty(tuple(read_item.lengths), dtype=stored.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Put the rows that were read where they belong; see the base class."""
        stored = self._under_way.pop(id(read_item), None)
        if stored is None:
            super().commit_tensor(read_item, tensor)
            return
        offsets, lengths = tuple(read_item.dest_offsets), tuple(read_item.lengths)
        if lengths[1:] == tuple(stored.shape[1:]):
            stored.holder.write_rows(offsets[0] if offsets else 0, tensor)
            return
        values = stored.holder.read()
        values[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] = tensor
        stored.holder.write(values)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Refuse an object in place of a tensor; see the base class."""
        raise CheckpointError(
            f"Expected {read_item.dest_index.fqn} to be a tensor in the checkpoint, got an object."
        )
