"""How the optimizer state of many parameters is cut into blocks that move as one.

A block is a run of elements out of one or several parameters. For each key of the state ("exp_avg",
say) it has one region in the tier, in which its pieces lie one after the other:

    block                       region of "exp_avg"              region of "exp_avg_sq"
    [a: 0..40][b: 0..7]   ->    [a 0..40|pad][b 0..7|pad]        [a 0..40|pad][b 0..7|pad]

Pieces begin at multiples of 64 bytes, regions at multiples of the tier's alignment. A parameter
larger than a block is cut at multiples of 4096 elements, which keeps its elements on the same
vector instructions, and so to the last bit the same, as if it had not been cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import OptimizerError
from shardplug.params.stored_shard import ShardTensor
from shardplug.tiers.protocol import Region, aligned

__all__ = ["Block", "Entry", "Piece", "lay_out"]

_PIECE_ALIGNMENT = 64
_CUT_ELEMENTS = 4096


@dataclass(eq=False, slots=True)
class Entry:
    """One parameter and the state that is kept for it."""

    parameter: torch.Tensor
    keys: dict[str, torch.dtype]
    """State with the parameter's shape, which lives in the tier."""

    scalars: dict[str, Any] = field(default_factory=dict)
    """State that is one number (or None) per parameter; it stays in memory."""

    has_state: bool = False
    """Whether the optimizer has made state for the parameter."""

    pieces: list[Piece] = field(default_factory=list)

    def holds(self, key: str) -> bool:
        """Whether the tier has a value for `key`."""
        return self.has_state and key in self.keys


@dataclass(eq=False, slots=True)
class Piece:
    """Elements `low` to `high` of this rank's part of a parameter."""

    entry: Entry
    block: Block
    low: int
    high: int

    @property
    def num_elements(self) -> int:
        """Elements of the piece."""
        return self.high - self.low

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements of the parameter, or of a contiguous tensor like it; a view.

        To be called without autograd.
        """
        local = local_tensor(tensor)
        if local.ndim == 0:
            return local.detach()
        flat = local.view(-1)
        return flat if self.num_elements == flat.numel() else flat[self.low : self.high]

    def view(self, key: str, memory: torch.Tensor) -> torch.Tensor:
        """Return the piece's part of the bytes of its block's region, as elements."""
        return self.block.views(key, memory)[self.block.pieces.index(self)]


@dataclass(eq=False, slots=True)
class Block:
    """Pieces whose state moves as one."""

    pieces: list[Piece] = field(default_factory=list)
    regions: dict[str, Region] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """dtype of each region's elements."""

    _sizes: dict[int, list[int]] = field(default_factory=dict)
    """Width of an element -> what a region of such elements is divided into."""

    def keys_without_region(self) -> list[str]:
        """Return the keys that a piece has and the block has no room for yet.

        Raises:
            OptimizerError: When two pieces want one key in different dtypes.
        """
        missing: dict[str, torch.dtype] = {}
        for piece in self.pieces:
            for key, dtype in piece.entry.keys.items():
                known = self.dtypes.get(key) or missing.setdefault(key, dtype)
                if known != dtype:
                    raise OptimizerError(
                        f"Expected optimizer state {key} in {known}, as for the parameters beside "
                        f"it, got {dtype}."
                    )
        return list(missing)

    def region_bytes(self, key: str) -> int:
        """Bytes that the region of a key needs; all pieces have a place in it."""
        dtype = next(p.entry.keys[key] for p in self.pieces if key in p.entry.keys)
        return sum(aligned(p.num_elements * dtype.itemsize, _PIECE_ALIGNMENT) for p in self.pieces)

    def add_region(self, key: str, region: Region) -> None:
        """Give a key its region."""
        self.dtypes[key] = next(p.entry.keys[key] for p in self.pieces if key in p.entry.keys)
        self.regions[key] = region

    def views(self, key: str, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return each piece's part of the region's bytes, as a tensor of its elements, in order."""
        dtype = self.dtypes[key]
        sizes = self._sizes.get(dtype.itemsize)
        if sizes is None:
            sizes = self._sizes[dtype.itemsize] = self._places(dtype.itemsize)
        parts: Sequence[torch.Tensor] = torch.split(memory.view(dtype)[: sum(sizes)], sizes)
        return parts if len(parts) == len(self.pieces) else parts[::2]

    def _places(self, width: int) -> list[int]:
        """Return each piece's elements; each with the padding after it, if there is any."""
        sizes: list[int] = []
        for piece in self.pieces:
            used = piece.num_elements * width
            sizes += [piece.num_elements, (aligned(used, _PIECE_ALIGNMENT) - used) // width]
        return sizes if any(sizes[1::2]) else sizes[::2]

    def holds(self, key: str) -> bool:
        """Whether the region of a key has anything in it that counts."""
        return any(piece.entry.holds(key) for piece in self.pieces)


def lay_out(entries: Iterable[Entry], block_bytes: int) -> list[Block]:
    """Cut parameters into blocks whose regions have at most `block_bytes`.

    Args:
        entries: Parameters in the order of the optimizer's groups; each gets its pieces.
        block_bytes: Largest region.

    Returns:
        Blocks without regions. The pieces of one block have equal keys and dtypes.
    """
    blocks: list[Block] = []
    filled, kind = block_bytes, None
    for entry in entries:
        parameter = local_tensor(entry.parameter)
        widths = [parameter.element_size(), *(d.itemsize for d in entry.keys.values())]
        most = max(block_bytes // max(widths) // _CUT_ELEMENTS, 1) * _CUT_ELEMENTS
        if isinstance(parameter, ShardTensor):
            most = parameter.holder.pieces.elements  # weights and state are cut alike
        own_kind = (parameter.dtype, parameter.device, tuple(sorted(map(str, entry.keys.items()))))
        low, end = 0, parameter.numel()
        while low < end or not entry.pieces:  # an empty part has its counters to keep too
            high = min(low + most, end)
            size = aligned((high - low) * max(widths), _PIECE_ALIGNMENT)
            if filled + size > block_bytes or kind != own_kind:
                blocks.append(Block())
                filled, kind = 0, own_kind
            piece = Piece(entry, blocks[-1], low, high)
            entry.pieces.append(piece)
            blocks[-1].pieces.append(piece)
            filled += size
            low = high
    return blocks
