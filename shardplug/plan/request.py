"""What a plan is asked for, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError
from shardplug.plan.choices import MemoryBudget
from shardplug.plan.lora import Lora

__all__ = ["Loop", "Request"]

Loop = Literal["lightning", "accelerate", "pytorch"]

PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    # name: (param_dtype of the configuration, dtype the whole module is converted to)
    "32-true": (None, None),
    "bf16-mixed": (torch.bfloat16, None),
    "16-mixed": (torch.float16, None),
    "bf16-true": (None, torch.bfloat16),
    "16-true": (None, torch.float16),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for."""

    model: str
    model_class: str
    devices: int
    nodes: int
    device: str
    room: MemoryBudget
    seq_length: int | None
    micro_batch: int
    accumulate: int
    precision: str
    lora: Lora | None
    optimizer: str
    loop: str
    replicate_size: int
    prefetch: int
    offload_cpu_gib: float | None = None
    length_assumed: bool = False
    """Whether nobody gave seq_length."""

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.devices * self.nodes


def check_ranks(devices: int, nodes: int, replicate_size: int) -> int:
    for name, value in (
        ("devices", devices),
        ("nodes", nodes),
        ("replicate_size", replicate_size),
    ):
        _require_count(name, value)
    if (devices * nodes) % replicate_size:
        raise ConfigError(
            f"Expected a number of ranks that replicate_size={replicate_size} divides, got "
            f"{devices * nodes}."
        )
    return devices * nodes


def cpu_budget(gib: float | None) -> int:
    """Return a budget of CPU memory before files in bytes, checked as the configuration does."""
    ZeroConfig(offload_optimizer="nvme", nvme_path="swap", offload_cpu_gib=gib)
    return int((gib or 0) * 2**30)


def _require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"Expected {name} to be an integer above 0, got {value!r}.")


def accumulation(
    world: int, micro_batch: int, accumulate: int | None, global_batch: int | None
) -> int:
    _require_count("micro_batch", micro_batch)
    if global_batch is None:
        _require_count("accumulate", 1 if accumulate is None else accumulate)
        return accumulate or 1
    _require_count("global_batch", global_batch)
    if accumulate is not None:
        raise ConfigError("Expected accumulate or global_batch, got both: leave one out.")
    if global_batch % (world * micro_batch):
        fitting = world * micro_batch
        raise ConfigError(
            f"A global batch of {global_batch} cannot be split into micro-batches of "
            f"{micro_batch} on {world} devices: give a multiple of {fitting}."
        )
    return global_batch // (world * micro_batch)


def room_of(device: float, host: float | None, nvme: float | None, reserve: float) -> MemoryBudget:
    for name, value in (
        ("device_memory_gib", device),
        ("host_memory_gib", host),
        ("nvme_gib", nvme),
    ):
        wrong = isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0
        if value is not None and wrong:
            raise ConfigError(f"Expected {name} above 0, got {value!r}.")
    if not 0 <= reserve < device:
        raise ConfigError(
            f"Expected reserve_gib from 0 to below the {device:g} GiB of a device, got {reserve!r}."
        )
    return MemoryBudget(device_gib=device, host_gib=host, nvme_gib=nvme, reserve_gib=reserve)
