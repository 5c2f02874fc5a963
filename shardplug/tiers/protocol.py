"""What every tier can do, and how what it moves is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["ALIGNMENT", "BLOCK_BYTES", "Region", "Tier", "Traffic", "aligned"]

ALIGNMENT = 4096
"""Bytes that offsets and sizes of regions are multiples of: what direct I/O asks for."""

BLOCK_BYTES = 4 * 2**20
"""Largest region, and the size of one staging buffer, by default."""


def aligned(num_bytes: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of `to`."""
    return -(-num_bytes // to) * to


@dataclass(frozen=True, slots=True)
class Region:
    """A run of bytes within a tier."""

    offset: int
    """Where it begins, a multiple of `ALIGNMENT`."""

    num_bytes: int
    """Its size, a multiple of `ALIGNMENT` and at most the tier's `block_bytes`."""


@dataclass(slots=True)
class Traffic:
    """What a tier has moved since it was made."""

    bytes_read: int = 0
    """Bytes that came from the tier's storage."""

    bytes_written: int = 0
    """Bytes that went to it."""

    waited_seconds: float = 0.0
    """Time in which the training thread stood still for them."""

    def since(self, before: Traffic) -> Traffic:
        """Return what was moved after `before`, an earlier copy."""
        return Traffic(
            self.bytes_read - before.bytes_read,
            self.bytes_written - before.bytes_written,
            self.waited_seconds - before.waited_seconds,
        )

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum."""
        return Traffic(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.waited_seconds + other.waited_seconds,
        )

    def copy(self) -> Traffic:
        """Return the numbers as they are now."""
        return Traffic(self.bytes_read, self.bytes_written, self.waited_seconds)


class Tier(Protocol):
    """Keeps regions of bytes somewhere.

    A region is used by `get`, then `put_back`; between the two its bytes may be changed in place.
    All calls come from one thread.
    """

    name: str
    """What `ZeroConfig` calls the tier, "cpu" or "nvme"."""

    can_fail: bool
    """Whether reading or writing can fail in the middle of a step, as a disk can."""

    traffic: Traffic
    """What was moved so far."""

    @property
    def block_bytes(self) -> int:
        """Largest region that can be used."""

    @property
    def staging_bytes(self) -> int:
        """Host memory that the tier holds to move regions through."""

    def tier_of(self, region: Region) -> str:
        """Return "cpu" or "nvme": where a region is, should the tier have several places."""

    def uses(self, other: object) -> bool:
        """Return whether `other` is this tier, or one that it keeps regions in."""

    def allocate(self, sizes: Sequence[int]) -> list[Region]:
        """Reserve regions of these sizes in bytes.

        Those that were not freed before read as zeros until they are written.

        Raises:
            StorageError: When there is too little room, with the bytes needed and free; nothing is
                reserved then.
        """

    def free(self, regions: Sequence[Region]) -> None:
        """Let others have the room of regions that nobody uses any more."""

    def read_ahead(self, region: Region) -> bool:
        """Begin to read a region, if a buffer is free; return whether it was begun."""

    def get(self, region: Region, *, fresh: bool = False) -> torch.Tensor:
        """Return the region's bytes, uint8 of shape (num_bytes,), on the CPU.

        Args:
            region: A region that is not in use.
            fresh: Its old bytes do not matter, so that nothing has to be read.

        Raises:
            StorageError: When it cannot be read, or more is in use than the buffers hold.
        """

    def put_back(self, region: Region, *, changed: bool) -> None:
        """End the use of a region; what was changed is written before `flush` returns."""

    def flush(self) -> None:
        """Wait until everything put back is written.

        Raises:
            StorageError: For the first write that failed.
        """

    def drop(self) -> None:
        """Give all buffers back after an error, waiting for what is under way."""

    def check(self) -> None:
        """Look whether the storage is still there.

        Raises:
            StorageError: When it is not.
        """

    def remove_files(self) -> None:
        """Remove what would outlive a process that is about to be ended, from any thread."""

    def close(self) -> None:
        """Give the storage back; may be called twice."""
