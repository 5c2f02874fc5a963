"""What this rank holds and moves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from shardplug.core._torch.held_tensors import model_state_tensors
from shardplug.core._torch.tensors import storage_bytes
from shardplug.engine.models import ShardedModels
from shardplug.engine.offload import Offload

__all__ = ["held_bytes", "moved_bytes"]


def held_bytes(
    models: ShardedModels,
    optimizers: Iterable[torch.optim.Optimizer],
    offload: Offload,
    *,
    params_on_cpu: bool,
    snapshot_bytes: int,
) -> dict[str, int]:
    """Return the bytes that this rank holds, by kind: see `ZeroEngine.memory`.

    Args:
        models: The sharded models.
        optimizers: The prepared optimizers.
        offload: The tiers.
        params_on_cpu: Whether shards are in CPU memory beside another device.
        snapshot_bytes: What the snapshot of a save in the background holds.
    """
    kinds: dict[str, list[torch.Tensor]] = {
        "master_shards": [],
        "gathered": [],
        "gradients": [],
        "optimizer_state": [],
    }
    for sharded in models:
        for kind, tensors in model_state_tensors(sharded.model).items():
            kinds[kind] += tensors
        kinds["master_shards"] += [p.data for p in sharded.replicated]
        kinds["gradients"] += [p.grad for p in sharded.replicated if p.grad is not None]
    elsewhere = {"optimizer_state_cpu": 0, "optimizer_state_nvme": 0, "staging": 0}
    for optimizer in optimizers:
        streamed = offload.streamed(optimizer)
        if streamed is not None:
            kinds["optimizer_state"] += streamed.device_tensors
            for tier, num_bytes in streamed.state_bytes.items():
                elsewhere[f"optimizer_state_{tier}"] += num_bytes
            elsewhere["staging"] += streamed.work_bytes
            continue
        for state in optimizer.state.values():
            kinds["optimizer_state"] += [v for v in state.values() if isinstance(v, torch.Tensor)]
    held = {kind: storage_bytes(tensors) for kind, tensors in kinds.items()}
    if params_on_cpu:
        held.update(_split_off_cpu(models, held))
    if models.activations:
        held["activations_cpu"] = sum(a.held_bytes for a in models.activations)
    held["snapshot"] = snapshot_bytes
    if offload.optimizer_tier is None:
        return held
    elsewhere["staging"] += sum(tier.staging_bytes for tier in offload.tiers)
    if offload.parameter_tier is None:
        return {**held, **elsewhere}
    elsewhere["staging"] += offload.parameter_tier.staging_bytes
    return {**held, **elsewhere, **offload.parameter_tier.held_bytes(kinds["gradients"])}


def _split_off_cpu(models: ShardedModels, held: dict[str, int]) -> dict[str, int]:
    """Tell shards and gradients in CPU memory from those on the device."""
    on_device = storage_bytes(p.data for sharded in models for p in sharded.replicated)
    grads = [p.grad for p in models.resting_parameters if p.grad is not None]
    gradients_cpu = storage_bytes(grad for grad in grads if isinstance(grad, DTensor))
    return {
        "master_shards": on_device,
        "master_shards_cpu": held["master_shards"] - on_device,
        "gradients": held["gradients"] - gradients_cpu,
        "gradients_cpu": gradients_cpu,
    }


def moved_bytes(models: ShardedModels, offload: Offload) -> dict[str, float]:
    """Return what the latest step moved between memory and tiers: see `ZeroEngine.traffic`."""
    moved = [streamed.last_step for streamed in offload.all_streamed()]
    if offload.parameter_tier is not None:
        moved.append(offload.parameter_tier.last_step)
    activations = [offloaded.last_step for offloaded in models.activations]  # (written, read)
    return {
        "bytes_read": sum(step.bytes_read for step in moved) + sum(read for _, read in activations),
        "bytes_written": sum(step.bytes_written for step in moved)
        + sum(written for written, _ in activations),
        "waited_seconds": sum(step.waited_seconds for step in moved),
    }
