"""How a shard is cut into regions on a drive, and read and written in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from shardplug.errors import StorageError
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.protocol import ALIGNMENT, Region, aligned
from shardplug.tiers.staging import page_aligned

__all__ = ["PiecewiseHolder", "Pieces", "Reading", "elements"]

_CUT_ELEMENTS = 4096
_LEAST_ELEMENT_BYTES = 4  # of optimizer state beside the weights, whose blocks are cut alike


def elements(memory: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first `count` elements in a region's bytes; a view."""
    return memory[: count * dtype.itemsize].view(dtype)


class Pieces:
    """Where a flat tensor's elements are: pieces of equal size, one region each."""

    def __init__(
        self, tier: DiskTier, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.tier = tier
        self.device = device
        self.shape = shape
        self.dtype = dtype
        width = max(dtype.itemsize, _LEAST_ELEMENT_BYTES)
        self.elements = tier.block_bytes // width // _CUT_ELEMENTS * _CUT_ELEMENTS
        numel = shape.numel()
        self.bounds = [(b, min(b + self.elements, numel)) for b in range(0, numel, self.elements)]

    def allocate(self, dtype: torch.dtype) -> list[Region]:
        """Reserve one region for each piece."""
        return self.tier.allocate([(high - low) * dtype.itemsize for low, high in self.bounds])


class Reading:
    """A shard on its way from the drive into memory of its own.

    Args:
        tier: Where it is read.
        shape: Shape of the result.
        dtype: dtype of the result.
        num_elements: How many of its elements are read; zeros follow.
    """

    def __init__(
        self, tier: DiskTier, shape: torch.Size, dtype: torch.dtype, num_elements: int
    ) -> None:
        self._tier = tier
        self._parts: list[tuple[Region, Future[None]]] = []
        self._memory = _page_aligned_tensor(aligned(max(shape.numel(), 1) * dtype.itemsize))
        self._flat = self._memory[: shape.numel() * dtype.itemsize].view(dtype)
        self._flat[num_elements:].zero_()
        self._shape = shape

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        return self._memory.nbytes

    def straight(self, region: Region, low: int) -> None:
        """Read a region of the result's dtype to where element `low` is."""
        begin = low * self._flat.element_size()
        memory = memoryview(self._memory[begin : begin + region.num_bytes].numpy())  # type: ignore[arg-type]
        file = self._tier.file
        self._begin(region, lambda: file.read(memory, region.offset))

    def cast(self, region: Region, low: int, high: int, dtype: torch.dtype) -> None:
        """Read a region of elements of another dtype, `low` to `high` of the result."""
        file = self._tier.file
        target = self._flat[low:high]

        def deliver() -> None:
            memory = page_aligned(region.num_bytes)
            file.read(memoryview(memory.numpy()), region.offset)  # type: ignore[arg-type]
            target.copy_(elements(memory, high - low, dtype))

        self._begin(region, deliver)

    def _begin(self, region: Region, deliver: Callable[[], None]) -> None:
        self._parts.append((region, self._tier.begin(region, deliver)))

    def wait(self) -> torch.Tensor:
        """Return the result.

        Raises:
            StorageError: When a part could not be read; all have ended then.
        """
        failure = self.end()
        if failure is not None:
            raise failure
        return self._flat.view(self._shape)

    def end(self) -> StorageError | None:
        """Wait for all parts; return the first failure."""
        failure: StorageError | None = None
        for region, future in self._parts:
            try:
                self._tier.end(region, future)
            except StorageError as error:
                failure = failure or error
        self._parts.clear()
        return failure


def _page_aligned_tensor(num_bytes: int) -> torch.Tensor:
    """Return uint8 memory that direct I/O can use and that torch can give back."""
    slack = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    begin = -slack.data_ptr() % ALIGNMENT
    return slack[begin : begin + num_bytes]


class PiecewiseHolder(ABC):
    """Reads and writes a tensor piece by piece."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self.device = pieces.device
        self.shape = pieces.shape
        self.dtype = pieces.dtype

    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """Return where the pieces are."""

    def read(self) -> torch.Tensor:
        """Return a copy of the values."""
        reading = Reading(self.pieces.tier, self.shape, self.dtype, self.shape.numel())
        for region, (low, _) in zip(self.regions(), self.pieces.bounds, strict=True):
            reading.straight(region, low)
        return reading.wait().to(self.device)

    def write(self, values: torch.Tensor) -> None:
        """Replace the values."""
        self.begin_write(values.detach().reshape(-1))
        self.pieces.tier.flush()

    def begin_write(self, flat: torch.Tensor) -> None:
        """Put all values on their way, in one dimension; `Tier.flush` waits for them."""
        for region, (low, high) in zip(self.regions(), self.pieces.bounds, strict=True):
            self.put(region, flat[low:high], self.dtype)

    def write_rows(self, first: int, values: torch.Tensor) -> None:
        """Replace the rows from `first` on."""
        if not values.numel():
            return
        width = self.shape.numel() // self.shape[0]
        begin, flat = first * width, values.detach().reshape(-1)
        end = begin + flat.numel()
        for region, (low, high) in zip(self.regions(), self.pieces.bounds, strict=True):
            if low >= end or high <= begin:
                continue
            inner = slice(max(low, begin) - low, min(high, end) - low)
            part = flat[max(low, begin) - begin : min(high, end) - begin]
            whole = part.numel() == high - low
            memory = self.pieces.tier.get(region, fresh=whole)
            elements(memory, high - low, self.dtype)[inner].copy_(part)
            self.pieces.tier.put_back(region, changed=True)
        self.pieces.tier.flush()

    def put(self, region: Region, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Begin to write one piece, in the region's dtype."""
        memory = self.pieces.tier.get(region, fresh=True)
        elements(memory, values.numel(), dtype).copy_(values)
        self.pieces.tier.put_back(region, changed=True)
