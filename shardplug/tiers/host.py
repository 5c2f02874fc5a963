"""CPU memory as a tier."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardplug.errors import StorageError
from shardplug.tiers.protocol import BLOCK_BYTES, Region, Traffic, aligned
from shardplug.tiers.staging import page_aligned

__all__ = ["HOST_BLOCK_BYTES", "HostTier"]

HOST_BLOCK_BYTES = 8 * BLOCK_BYTES
"""Largest region: no buffer has this size, and larger blocks cost fewer calls."""


class HostTier:
    """Keeps regions in the memory of this process.

    `get` returns the memory itself, so there is nothing to read or to write, and bytes that are
    only ever zero take no memory.

    Args:
        pinned: Lock the memory, so that a GPU can copy from and to it on its own.
        block_bytes: Largest region.
    """

    name = "cpu"
    can_fail = False
    staging_bytes = 0

    def __init__(self, *, pinned: bool = False, block_bytes: int = HOST_BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.traffic = Traffic()
        self._pinned = pinned
        self._end = 0
        self._memory: dict[int, torch.Tensor] = {}
        self.held_bytes = 0
        """Memory of all regions; as long as they are zero and not pinned they take less."""

    def cost_bytes(self, num_bytes: int) -> int:
        """Return the memory that a region of this size takes."""
        size = aligned(max(num_bytes, 1))  # an empty one has a place too
        return 1 << (size - 1).bit_length() if self._pinned else size  # torch rounds pinned memory

    def tier_of(self, region: Region) -> str:
        """Return where a region is."""
        return self.name

    def uses(self, other: object) -> bool:
        """Return whether `other` is this tier; see `Tier.uses`."""
        return other is self

    def allocate(self, sizes: Sequence[int]) -> list[Region]:
        """Reserve regions of these sizes; see `Tier.allocate`."""
        made: list[Region] = []
        for num_bytes in sizes:
            region = Region(self._end, aligned(max(num_bytes, 1)))
            try:
                self._memory[region.offset] = page_aligned(region.num_bytes, pinned=self._pinned)
            except (OSError, RuntimeError) as error:
                self.free(made)
                raise StorageError(
                    f"Expected room for {sum(map(aligned, sizes))} bytes of optimizer state in CPU "
                    f"memory, but the system refused {region.num_bytes} bytes: {error}. Use more "
                    'ranks, or offload_optimizer="nvme".'
                ) from error
            self._end += region.num_bytes
            self.held_bytes += self.cost_bytes(region.num_bytes)
            made.append(region)
        return made

    def free(self, regions: Sequence[Region]) -> None:
        """Give the memory back to the system."""
        for region in regions:
            if self._memory.pop(region.offset, None) is not None:
                self.held_bytes -= self.cost_bytes(region.num_bytes)

    def read_ahead(self, region: Region) -> bool:
        """Nothing is to be read."""
        return True

    def get(self, region: Region, *, fresh: bool = False) -> torch.Tensor:
        """Return the region's memory."""
        return self._memory[region.offset]

    def put_back(self, region: Region, *, changed: bool) -> None:
        """Nothing is to be written."""

    def flush(self) -> None:
        """Nothing is under way."""

    def drop(self) -> None:
        """Nothing is under way."""

    def check(self) -> None:
        """Memory does not go away."""

    def remove_files(self) -> None:
        """Memory goes with its process."""

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.clear()
        self.held_bytes = 0
