"""Parameters and gradients of sharded models that rest on a drive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shardplug.collective import raise_together
from shardplug.core._torch.gradients import after_gradient
from shardplug.core._torch.groups import own_groups
from shardplug.core._torch.offloaded import keep_shard_elsewhere, layout_of_shard
from shardplug.core._torch.resharding import reset_sharded_param
from shardplug.core._torch.tensors import laid_out_like, local_tensor
from shardplug.core.tier_tensor import in_tier
from shardplug.errors import StorageError
from shardplug.params.allocator import return_freed_memory
from shardplug.params.read_ahead import ReadAhead
from shardplug.params.stored_shard import GradientTensor, ShardHolder, ShardTensor
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.protocol import Traffic

__all__ = ["ParameterTier"]


class ParameterTier:
    """Moves the shards of units to a drive, and brings them to the gathers.

    Gradients go to the drive as they are reduced. What fails on the way is kept until the ranks
    meet (`raise_failure`), since a rank that raises alone leaves the others waiting: until then a
    gather that could not be read gives NaN.

    Args:
        tier: Where they rest.
        prefetch: Units read ahead of their gather.
        group: All ranks, with messages on the CPU.
    """

    def __init__(self, tier: DiskTier, prefetch: int, group: dist.ProcessGroup) -> None:
        self.tier = tier
        self.last_step = Traffic()
        """What gathers and gradients moved since the step before the latest one."""
        return_freed_memory()
        self._group = group
        self._ahead = ReadAhead(prefetch)
        self._shards: list[ShardHolder] = []
        self._adopted: weakref.WeakSet[object] = weakref.WeakSet()
        self._failure: StorageError | None = None
        self._mark = tier.traffic.copy()

    # ---------------------------------------------------------------- moving in

    def offload_unit(self, unit: nn.Module, device: torch.device) -> None:
        """Move the shards of a unit out of memory, as far as they have values.

        A failure is kept until `raise_failure`; the shards that could not be moved stay.
        """
        for group in own_groups(unit):
            moved = []
            for param in group.fsdp_params:
                if param in self._adopted or self._failure is not None:
                    continue
                reset_sharded_param(param)
                if param.sharded_param.is_meta:
                    continue
                try:
                    moved.append(self._move(param, device))
                except StorageError as error:
                    self._failure = error
                    continue
                self._adopted.add(param)
            if moved:
                self._ahead.add_unit(moved)
                self._shards += moved

    def _move(self, param: object, device: torch.device) -> ShardHolder:
        parameter, padded, compute = layout_of_shard(param)
        local = local_tensor(parameter)
        holder = ShardHolder(self.tier, local.shape, padded, local.dtype, compute, device)
        if parameter.requires_grad:
            holder.make_trainable()
        holder.write(local)
        holder.gather = functools.partial(self._gather, holder)
        holder.on_change = lambda: self._ahead.drop(holder.unit)
        holder.on_failure = self._note_failure
        keep_shard_elsewhere(param, ShardTensor(holder))
        if parameter.is_floating_point():
            after_gradient(parameter, functools.partial(self._gradient_arrives, holder))
        return holder

    # ---------------------------------------------------------------- in a step

    def _gather(self, holder: ShardHolder) -> torch.Tensor:
        try:
            return self._ahead.acquire(holder).to(holder.device)
        except StorageError as error:
            self._failure = self._failure or error
        return torch.full(
            holder.padded_shape, float("nan"), dtype=holder.compute_dtype, device=holder.device
        )

    def _gradient_arrives(self, holder: ShardHolder, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        arrived = local_tensor(parameter.grad)
        if in_tier(arrived) is not None:
            return  # a later micro-batch's: it was added to what is there
        try:
            holder.gradient.write(arrived)
        except StorageError as error:
            self._failure = self._failure or error
        tensor = GradientTensor(holder.gradient)
        parameter.grad = laid_out_like(tensor, parameter)

    def _note_failure(self, error: StorageError) -> None:
        self._failure = self._failure or error

    def raise_failure(self, doing: str) -> None:
        """Raise on every rank what has failed on one since the last call. Collective.

        Args:
            doing: What a message says has failed.

        Raises:
            StorageError: With the path and the bytes.
        """
        failure, self._failure = self._failure, None
        raise_together(failure, StorageError, doing, self._group)

    def reset(self) -> None:
        """Forget what is under way and what has failed."""
        self._ahead.drop_all()
        self.tier.drop()
        self._failure = None

    def before_step(self) -> None:
        """Make way for a step that changes the weights.

        Raises:
            StorageError: When a gradient could not be written.
        """
        self._ahead.drop_all()
        self.tier.flush()

    def after_step(self, optimizers: Traffic) -> None:
        """Begin to read what the next forward gathers first.

        Args:
            optimizers: What the optimizer step has moved on this tier.
        """
        moved = self.tier.traffic.since(self._mark)
        self.last_step = moved.since(optimizers)
        self._mark = self.tier.traffic.copy()
        self._ahead.foresee()

    # ---------------------------------------------------------------- accounts

    @property
    def staging_bytes(self) -> int:
        """Memory of what was read ahead."""
        return self._ahead.held_bytes

    def held_bytes(self, gradients: Iterable[torch.Tensor]) -> dict[str, int]:
        """Return the bytes on the drive, by kind.

        Args:
            gradients: The gradients that parameters have now.
        """
        return {
            "master_shards_nvme": sum(shard.num_bytes for shard in self._shards),
            "compute_copies_nvme": sum(shard.copy_bytes for shard in self._shards),
            "gradients_nvme": sum(
                tensor.holder.num_bytes
                for tensor in map(local_tensor, gradients)
                if isinstance(tensor, GradientTensor)
            ),
        }
