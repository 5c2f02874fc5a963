"""What optimizers keep for each parameter, and what they need for a moment in their step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardplug.errors import ConfigError

__all__ = ["OPTIMIZERS", "OptimizerKind", "fused_kind", "optimizer_kind"]


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """State and work space of an optimizer of `torch.optim`."""

    name: str = "adamw"
    tensors: int = 2
    """Tensors of the parameter's size that are kept, in its own dtype."""
    counters: int = 4
    """Bytes kept per parameter tensor: the number of steps."""
    work: int = 2
    """Tensors of a parameter's size that its update needs for a moment, one after another."""
    work_at_once: int = 1
    """The same where all parameters are updated at once (`foreach`, the default on a GPU)."""
    fused: bool = False

    def state_bytes(self, own_elements: int, master: torch.dtype) -> int:
        """Bytes kept for one parameter of which the rank has `own_elements`."""
        return self.tensors * own_elements * master.itemsize + self.counters

    def work_bytes(self, shards: Sequence[int], device: str) -> int:
        """Bytes needed for a moment in the step.

        Args:
            shards: Bytes of the rank's part of each trained parameter.
            device: "cuda", where torch updates all parameters at once, or "cpu".
        """
        if self.fused or not shards:
            return 0
        return self.work * max(shards) if device == "cpu" else self.work_at_once * sum(shards)


OPTIMIZERS: dict[str, OptimizerKind] = {
    "adamw": OptimizerKind("adamw"),
    "adamw_fused": OptimizerKind("adamw_fused", fused=True),
    "adam": OptimizerKind("adam"),
    "adam_fused": OptimizerKind("adam_fused", fused=True),
    "sgd": OptimizerKind("sgd", tensors=0, counters=0, work=0, work_at_once=0),
    "sgd_momentum": OptimizerKind("sgd_momentum", 1, 0, 0, 0),
    "adagrad": OptimizerKind("adagrad", tensors=1, work=2, work_at_once=1),
    "adagrad_fused": OptimizerKind("adagrad_fused", tensors=1, fused=True),
}
"""Optimizers a plan knows, by name."""


def optimizer_kind(value: str | OptimizerKind) -> OptimizerKind:
    """Look an optimizer up.

    Raises:
        ConfigError: For an unknown name.
    """
    if isinstance(value, OptimizerKind):
        return value
    found = OPTIMIZERS.get(value.lower())
    if found is None:
        raise ConfigError(
            f"Expected an optimizer out of {', '.join(OPTIMIZERS)}, got {value!r}; for another "
            "one give an OptimizerKind."
        )
    return found


def fused_kind(kind: OptimizerKind) -> OptimizerKind | None:
    """Return the fused variant of an optimizer that needs work space, or None without one."""
    return None if kind.fused else OPTIMIZERS.get(f"{kind.name}_fused")
