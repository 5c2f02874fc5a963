"""Reused page-aligned buffers with a hard limit."""

from __future__ import annotations

import mmap

import torch

from shardplug.errors import StorageError
from shardplug.tiers.protocol import BLOCK_BYTES

__all__ = ["STAGING_BYTES", "Buffer", "Staging", "page_aligned"]

STAGING_BYTES = 16 * BLOCK_BYTES
"""Default limit: with Adam, whose blocks take two buffers, eight blocks are on their way."""

_HUGE_FROM_BYTES = 2 * 2**20


def page_aligned(num_bytes: int, *, pinned: bool = False) -> torch.Tensor:
    """Return uint8 memory of shape (num_bytes,) that direct I/O can use; it reads as zeros.

    Pages that were never written take no memory, unless they are pinned.

    Args:
        num_bytes: Size, above 0.
        pinned: Lock it in memory, so that a GPU can copy from and to it on its own.

    Raises:
        OSError: When the system has no room for it.
    """
    if pinned:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Buffer:
    """One staging buffer, as a tensor and as what the system's calls take."""

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        self.tensor = page_aligned(num_bytes, pinned=pinned)
        self.bytes = memoryview(self.tensor.numpy())  # type: ignore[arg-type]


class Staging:
    """Lends buffers of one size, never more of them than the limit allows.

    Args:
        limit_bytes: Host memory that all buffers together may take.
        buffer_bytes: Size of each.
        pinned: See `page_aligned`.
    """

    def __init__(
        self,
        limit_bytes: int = STAGING_BYTES,
        buffer_bytes: int = BLOCK_BYTES,
        *,
        pinned: bool = False,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.buffer_bytes = buffer_bytes
        self._pinned = pinned
        self._made = 0
        self._free: list[Buffer] = []

    @property
    def held_bytes(self) -> int:
        """Memory of the buffers made so far, lent or not."""
        return self._made * self.buffer_bytes

    def take(self) -> Buffer | None:
        """Return a free buffer, or None when all that may exist are lent.

        Raises:
            StorageError: When the system refuses the memory of one that may exist.
        """
        if self._free:
            return self._free.pop()
        if (self._made + 1) * self.buffer_bytes > self.limit_bytes:
            return None
        try:
            buffer = Buffer(self.buffer_bytes, pinned=self._pinned)
        except (OSError, RuntimeError) as error:
            kind = "pinned memory" if self._pinned else "memory"
            raise StorageError(
                f"Expected {self.buffer_bytes} bytes of {kind} for a staging buffer, beside "
                f"{self.held_bytes} that are there, but the system refused them: {error}. "
                "`shardplug doctor` says what may be pinned and locked here; raise that limit "
                "(ulimit -l), or free memory."
            ) from error
        self._made += 1
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Take a buffer back."""
        self._free.append(buffer)
