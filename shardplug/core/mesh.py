"""The mesh of data-parallel ranks that parameters are sharded over."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardplug.errors import ConfigError

__all__ = ["SHARD_AXIS", "build_mesh", "current_device"]

REPLICATE_AXIS = "replicate"
SHARD_AXIS = "shard"


def current_device() -> torch.device:
    """Return this rank's accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def build_mesh(replicate_size: int, device_type: str) -> DeviceMesh:
    """Lay all ranks of the default process group out for sharding.

    Args:
        replicate_size: Number of replicas (HSDP); 1 shards over every rank.
        device_type: "cpu" or the accelerator's type.

    Returns:
        A mesh of shape (world size,), or (replicate_size, world size // replicate_size) whose
        last axis is the one parameters are sharded over.

    Raises:
        ConfigError: When no process group is up, or the sizes do not divide.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "Expected an initialised process group (world size 1 too), found none: call "
            "torch.distributed.init_process_group() first, or launch with torchrun."
        )
    world_size = dist.get_world_size()
    if world_size % replicate_size:
        raise ConfigError(
            f"Expected a world size that replicate_size={replicate_size} divides, "
            f"got world size {world_size}."
        )
    if replicate_size == 1:
        return init_device_mesh(device_type, (world_size,), mesh_dim_names=(SHARD_AXIS,))
    return init_device_mesh(
        device_type,
        (replicate_size, world_size // replicate_size),
        mesh_dim_names=(REPLICATE_AXIS, SHARD_AXIS),
    )


def check_mesh(mesh: DeviceMesh, replicate_size: int) -> None:
    """Refuse a mesh of the caller's that contradicts the configuration.

    Raises:
        ConfigError: For a mesh of more than two axes, or with another number of replicas.
    """
    if mesh.ndim not in (1, 2):
        raise ConfigError(
            "Expected a mesh of one axis (shards) or two (replicas, shards), "
            f"got {mesh.ndim} axes {mesh.mesh_dim_names}."
        )
    replicas = mesh.size(0) if mesh.ndim == 2 else 1
    if replicas != replicate_size:
        raise ConfigError(
            f"Expected a mesh with replicate_size={replicate_size} replicas, "
            f"got one with {replicas}: make the two agree."
        )
