"""A parameter's shard that rests on a drive: master weights, copy to compute with, gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardplug.core._torch.tensors import multiply_all
from shardplug.core.tier_tensor import TierTensor
from shardplug.errors import StorageError
from shardplug.params.pieces import Pieces, PiecewiseHolder, Reading, elements
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.protocol import Region

__all__ = ["GradientHolder", "GradientTensor", "ShardHolder", "ShardTensor"]


class GradientHolder(PiecewiseHolder):
    """The gradient of a shard. Scaling it is remembered, and done when it is read.

    Args:
        pieces: As the shard's.
    """

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        self.places: list[Region] = []
        self.factors: list[float] = []
        self.is_zero = False
        self._norm: torch.Tensor | None = None

    def regions(self) -> Sequence[Region]:
        """Return where the pieces are; reserved at the first use."""
        if not self.places and self.pieces.bounds:
            self.places = self.pieces.allocate(self.dtype)
        return self.places

    @property
    def num_bytes(self) -> int:
        """Bytes on the drive."""
        return sum(region.num_bytes for region in self.places)

    def read(self) -> torch.Tensor:
        """Return a copy of the values."""
        if self.is_zero:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.scaled(super().read())

    def scaled(self, values: torch.Tensor) -> torch.Tensor:
        """Apply the factors so far to a part of what is on the drive, in place."""
        for factor in self.factors:
            multiply_all([values], factor)  # the kernel that clips in memory: the last bits count
        return values

    def write(self, values: torch.Tensor) -> None:
        """Replace the values. They are on their way when this returns; see `Tier.flush`."""
        self.factors.clear()
        self.is_zero = False
        flat = values.detach().reshape(-1)
        self._norm = torch.linalg.vector_norm(flat, dtype=torch.float64) if flat.numel() else None
        self.begin_write(flat)

    def add(self, values: torch.Tensor) -> None:
        """Add a later micro-batch's gradient, whose memory is used for it."""
        flat = values.view(-1)
        if not self.is_zero:
            for region, (low, high) in zip(self.regions(), self.pieces.bounds, strict=True):
                memory = self.pieces.tier.get(region)
                part = elements(memory, high - low, self.dtype)
                flat[low:high].add_(self.scaled(part).to(flat.device))
                self.pieces.tier.put_back(region, changed=False)
        self.write(flat)

    def multiply(self, factor: float) -> None:
        """Scale the gradient."""
        self.factors.append(factor)
        self._norm = None

    def zero(self) -> None:
        """Make it a gradient of zeros, which takes no writing."""
        self.is_zero = True
        self.factors.clear()
        self._norm = None

    @property
    def norm(self) -> torch.Tensor | None:
        """2-norm, float64, taken when the values came; None when they were changed since."""
        return self._norm


class GradientTensor(TierTensor):
    """A shard's gradient, as `parameter.grad` has it."""

    holder: GradientHolder

    def change_in_place(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Add and zero without a copy of the old values."""
        if func is torch.ops.aten.add_.Tensor and kwargs.get("alpha", 1) == 1:
            other = args[1]
            if type(other) is torch.Tensor and other.shape == self.shape:
                self.holder.add(other)
                return True
        if func is torch.ops.aten.zero_.default:
            self.holder.zero()
            return True
        return False

    def scale(self, factor: float) -> None:
        """Multiply the gradient when it is read."""
        self.holder.multiply(factor)

    def p_norm(self, norm_type: float) -> torch.Tensor:
        """Return the p-norm, float64 of shape (); the 2-norm is known already, as a rule."""
        norm = self.holder.norm if norm_type == 2.0 else None
        return super().p_norm(norm_type) if norm is None else norm


class ShardHolder(PiecewiseHolder):
    """One parameter's shard.

    Master weights have a region for each piece, and so has their gradient. An optimizer step
    writes the new weights over the gradient, which it has used up; when the step is known to be
    good the two change places. So a step that fails has the old weights still, and no byte more is
    written than the new ones.

    Where the computation has a lower precision, a copy of the weights in it is kept too, written
    by the step; as long as there is none, gathers read the master weights.

    Args:
        tier: Where it rests.
        shape: Shape of the shard.
        padded_shape: Shape that gathers want.
        dtype: dtype of the master weights.
        compute_dtype: dtype that gathers want.
        device: Where it is computed with.

    Raises:
        StorageError: When there is too little room.
    """

    def __init__(
        self,
        tier: DiskTier,
        shape: torch.Size,
        padded_shape: torch.Size,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(Pieces(tier, shape, dtype, device))
        self.tier = tier
        self.unit: int = -1
        """The unit that it is gathered with."""
        self.gradient = GradientHolder(self.pieces)
        self.master = self.pieces.allocate(dtype)
        self.compute_dtype = compute_dtype
        self.copies: list[Region] = []
        self.has_copy = False
        self.gather: Callable[[], torch.Tensor] = lambda: self.begin_gather().wait().to(device)
        self.on_change: Callable[[], None] = lambda: None
        self.on_failure: Callable[[StorageError], None] | None = None
        """Told what fails in the middle of a forward or backward, to be raised on every rank."""
        self.num_changes = 0
        """How often the weights were replaced."""
        self.padded_shape = padded_shape

    def make_trainable(self) -> None:
        """Reserve the room that training takes.

        Raises:
            StorageError: When there is too little.
        """
        self.gradient.regions()
        if self.compute_dtype != self.dtype and not self.copies and self.pieces.bounds:
            self.copies = self.pieces.allocate(self.compute_dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of master weights on the drive."""
        return sum(region.num_bytes for region in self.master)

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy to compute with."""
        return sum(region.num_bytes for region in self.copies)

    def regions(self) -> Sequence[Region]:
        """Return where the master weights are."""
        return self.master

    def write(self, values: torch.Tensor) -> None:
        """Replace the weights."""
        self._changed()
        super().write(values)

    def write_rows(self, first: int, values: torch.Tensor) -> None:
        """Replace the rows from `first` on."""
        self._changed()
        super().write_rows(first, values)

    def _changed(self) -> None:
        self.num_changes += 1
        self.on_change()  # what was read ahead is old
        self.has_copy = False

    def begin_gather(self) -> Reading:
        """Begin to read the padded shard in the dtype that gathers want."""
        reading = Reading(self.tier, self.padded_shape, self.compute_dtype, self.shape.numel())
        straight = self.has_copy or self.compute_dtype == self.dtype
        regions = self.copies if self.has_copy else self.master
        for region, (low, high) in zip(regions, self.pieces.bounds, strict=True):
            if straight:
                reading.straight(region, low)
            else:
                reading.cast(region, low, high, self.dtype)
        return reading

    # ---------------------------------------------------------------- the optimizer step

    def piece_at(self, low: int, high: int) -> int:
        """Return the number of the piece with these bounds."""
        index = low // self.pieces.elements
        assert self.pieces.bounds[index] == (low, high)
        return index

    def write_new(self, piece: int, weights: torch.Tensor) -> None:
        """Write a piece's new weights to where its gradient was, and to the copy."""
        self.put(self.gradient.places[piece], weights, self.dtype)
        if self.copies:
            self.put(self.copies[piece], weights, self.compute_dtype)

    def commit(self) -> None:
        """Make the new weights the weights; all pieces were written."""
        self.master, self.gradient.places = self.gradient.places, self.master
        self.num_changes += 1
        self.has_copy = bool(self.copies)

    def take_back(self) -> None:
        """Keep the old weights after a step that failed. The gradient is lost."""
        self.has_copy = False


class ShardTensor(TierTensor):
    """The local part of a sharded parameter, gathered by FSDP2 through its extension hooks."""

    holder: ShardHolder

    @property
    def changes(self) -> int:  # type: ignore[override]
        """How often the values were replaced so far."""
        return self.holder.num_changes

    def keep_rows(self, rows: torch.Tensor) -> None:
        """Replace the elements that are not `rows`; a failure is raised later, on every rank."""
        try:
            super().keep_rows(rows)
        except StorageError as error:
            if self.holder.on_failure is None:
                raise
            self.holder.on_failure(error)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """Return what this rank gives to the all-gather: its padded shard, to compute with."""
        return (self.holder.gather(),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        """Take the gathered memory as it is."""
        return None if out is not None else (outputs[0], ())
