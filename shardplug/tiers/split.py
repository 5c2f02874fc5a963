"""Two tiers as one: the faster one is filled up to a budget before the slower one is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardplug.tiers.disk import DiskTier
from shardplug.tiers.host import HostTier
from shardplug.tiers.protocol import Region, aligned

__all__ = ["SplitTier"]


class SplitTier:
    """Keeps regions in CPU memory until a budget is used up, and the others in a swap file.

    A region is in one of the two as a whole, from when it is reserved to when it is freed. Room in
    memory that was freed is used again by the next region that fits.

    Args:
        near: CPU memory, with blocks no larger than the file's.
        far: The swap file.
        near_bytes: Budget: bytes that `near` holds at most.
    """

    name = "nvme"
    can_fail = True

    def __init__(self, near: HostTier, far: DiskTier, near_bytes: int) -> None:
        self.traffic = near.traffic = far.traffic  # one count for both
        self._near = near
        self._far = far
        self._near_bytes = near_bytes
        self._places: dict[Region, tuple[HostTier | DiskTier, Region]] = {}
        self._end = 0

    @property
    def block_bytes(self) -> int:
        """Largest region that fits both."""
        return min(self._near.block_bytes, self._far.block_bytes)

    @property
    def staging_bytes(self) -> int:
        """Host memory of the file's buffers; state in CPU memory passes through none."""
        return self._near.staging_bytes + self._far.staging_bytes

    @property
    def near_bytes(self) -> int:
        """Bytes that are held in CPU memory now."""
        return self._near.held_bytes

    @property
    def far(self) -> DiskTier:
        """The swap file."""
        return self._far

    def tier_of(self, region: Region) -> str:
        """Return "cpu" or "nvme": where a region is."""
        return self._places[region][0].name

    def uses(self, other: object) -> bool:
        """Return whether `other` is this tier or one of the two."""
        return other in (self, self._near, self._far)

    def allocate(self, sizes: Sequence[int]) -> list[Region]:
        """Reserve regions, in CPU memory where they fit; see `Tier.allocate`."""
        room = self._near_bytes - self._near.held_bytes
        is_near: list[bool] = []
        for size in sizes:
            needed = self._near.cost_bytes(size)
            is_near.append(needed <= room)
            room -= needed if needed <= room else 0
        near = self._near.allocate([s for s, here in zip(sizes, is_near, strict=True) if here])
        try:
            far = self._far.allocate(
                [s for s, here in zip(sizes, is_near, strict=True) if not here]
            )
        except BaseException:
            self._near.free(near)
            raise
        inner = {True: iter(near), False: iter(far)}
        return [self._add(here, next(inner[here])) for here in is_near]

    def _add(self, is_near: bool, inner: Region) -> Region:
        # Offsets of its own, since those of the two tiers may be equal.
        region = Region(self._end, aligned(inner.num_bytes))
        self._end += region.num_bytes
        self._places[region] = (self._near if is_near else self._far, inner)
        return region

    def free(self, regions: Sequence[Region]) -> None:
        """Free each region where it is."""
        for region in regions:
            place = self._places.pop(region, None)
            if place is not None:
                place[0].free([place[1]])

    def read_ahead(self, region: Region) -> bool:
        """Begin to read a region that is in the file; see `Tier.read_ahead`."""
        tier, inner = self._places[region]
        return tier.read_ahead(inner)

    def get(self, region: Region, *, fresh: bool = False) -> torch.Tensor:
        """Return the region's bytes; see `Tier.get`."""
        tier, inner = self._places[region]
        return tier.get(inner, fresh=fresh)

    def put_back(self, region: Region, *, changed: bool) -> None:
        """End the use of a region; see `Tier.put_back`."""
        tier, inner = self._places[region]
        tier.put_back(inner, changed=changed)

    def flush(self) -> None:
        """Wait for the file's writes; see `Tier.flush`."""
        self._far.flush()

    def drop(self) -> None:
        """Give all buffers back; see `Tier.drop`."""
        self._far.drop()

    def check(self) -> None:
        """Look whether the swap file is still there; see `Tier.check`."""
        self._far.check()

    def remove_files(self) -> None:
        """Remove the swap file's folder."""
        self._far.remove_files()

    def close(self) -> None:
        """Remove the swap file, and let go of the memory."""
        self._places.clear()
        self._near.close()
        self._far.close()
