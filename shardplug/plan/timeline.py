"""What a walk is asked for, and the curve it gives."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardplug.config import Tier
from shardplug.core.stage import Stage
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind

__all__ = ["RESIDENT_KINDS", "PLAN_KINDS", "Moved", "Point", "Setup", "MemoryTimeline"]

PLAN_KINDS = (
    "master_shards",
    "gathered",
    "gradients",
    "optimizer_state",
    "master_shards_cpu",
    "gradients_cpu",
    "optimizer_state_cpu",
    "staging",
    "activations_cpu",
    "activations",
    "logits_and_loss",
    "communication",
    "optimizer_work",
    "buffers",
)
"""Kinds of tensors in the device's memory. On GPUs those in "_cpu" are 0 and "staging" has one
block's gradients: the rest of them is host memory. On CPU ranks all of it is counted."""

RESIDENT_KINDS = PLAN_KINDS[:9]
"""Those that the engine accounts for."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a walk depends on besides the model and its trace."""

    stage: Stage
    shards: int
    replicas: int = 1
    shard: int = 0
    """Which shard: the first is never smaller than another."""
    accumulate: int = 1
    prefetch: int = 1
    device: str = "cuda"
    optimizer: OptimizerKind = OptimizerKind()
    grads_kept_through_forward: bool = False
    """Whether `zero_grad` comes between forward and backward, as in Lightning."""
    state_tier: Tier = "none"
    """Where optimizer state lives, as in `ZeroConfig.offload_optimizer`."""
    state_cpu_bytes: int = 0
    """CPU memory that is filled before files, as in `ZeroConfig.offload_cpu_gib`, in bytes."""
    params_tier: Tier = "none"
    """Where master shards and reduced gradients live, as in `ZeroConfig.offload_params`."""

    @property
    def params_on_nvme(self) -> bool:
        """Whether master shards are in files, and are read for each gather."""
        return self.params_tier == "nvme"

    @property
    def masters_on_host(self) -> bool:
        """Whether master shards are in the memory of a GPU's host, where the step runs too."""
        return self.params_tier == "cpu" and self.device != "cpu"


@dataclass(frozen=True, slots=True)
class Point:
    """The most that was held between two events of the schedule."""

    phase: str
    """"forward", "backward", "step" or "rest"."""
    unit: str
    """The unit whose event ended the stretch."""
    micro_batch: int
    held: dict[str, int]
    """Bytes by kind, of `PLAN_KINDS`, at the moment of the stretch's largest total."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one rank sends per optimizer step, as section 7 of the ZeRO paper counts."""

    gathers: int
    reductions: int
    replicas: int
    """All-reduces of gradient shards between replicas."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.gathers + self.reductions + self.replicas


@dataclass(frozen=True)
class MemoryTimeline:
    """The predicted curve of one optimizer step in steady state."""

    points: tuple[Point, ...]
    phases: dict[str, dict[str, int]]
    """Bytes by kind at the ends of the phases: "after_forward" of the first micro-batch and
    "after_forward_later" of the last; "after_backward_between" micro-batches and "after_backward"
    of the last; "after_step", "at_rest"."""
    moved: Moved
    activations_out: int = 0
    """Bytes of activations that leave for CPU memory in a step; as many come back."""
    activations_host: int = 0
    """The most that they take of CPU memory, where it is not the device's."""

    @cached_property
    def peak(self) -> Point:
        """The largest point."""
        return max(self.points, key=lambda point: point.total)
