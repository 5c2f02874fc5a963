"""The plan of a run under way: what the engine has seen of it, turned into a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from shardplug.config import ZeroConfig
from shardplug.core._torch.tensors import tree_leaves, tree_map
from shardplug.plan.choices import Choice, MemoryBudget, Setting
from shardplug.plan.plan import Plan, plan
from shardplug.plan.request import Loop
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind
from shardplug.plan.trace.meta_copy import NoCollectives
from shardplug.plan.trace.placeholder_loss import loss_of

__all__ = ["Call", "Running", "batch_size", "settings_of"]

_PRECISIONS = {torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}


@dataclass(frozen=True, slots=True)
class Call:
    """The latest call into a model, without its values."""

    method: str
    """"forward", or another method that computes with the parameters."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything the model was called with."""
        return {"args": self.args, "kwargs": self.kwargs}


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """What the engine knows of a run."""

    config: ZeroConfig
    meta_model: nn.Module
    """The model's structure, on meta."""
    call: Call
    devices: int
    """Ranks on one node."""
    nodes: int
    device: str
    """"cuda" or "cpu"."""
    optimizer: OptimizerKind
    accumulate: int
    loop: Loop

    def plan(
        self,
        *,
        divided: int = 1,
        optimizer: OptimizerKind | None = None,
        prefetch: int | None = None,
        alone: bool = False,
        room: MemoryBudget | None = None,
        offload_activations: bool = False,
    ) -> Plan:
        """Plan the run as it is, or with one thing changed.

        Args:
            divided: By what the micro-batch is divided, and the accumulation multiplied.
            optimizer: Another optimizer.
            prefetch: Another number of units gathered ahead.
            alone: Look at the stage and the checkpointing that run only.
            offload_activations: Move activations to CPU memory, where the run does not.
            room: What may be used; left out, whether a choice fits means nothing.

        Raises:
            Exception: Whatever planning raises.
        """
        config = self.config
        size = batch_size(self.call.inputs)
        assert isinstance(config.param_dtype, (torch.dtype, type(None)))
        precision = _PRECISIONS.get(config.param_dtype or torch.float32, "32-true")
        assert isinstance(config.reduce_dtype, (torch.dtype, type(None)))
        if room is None:
            room = MemoryBudget(device_gib=1.0, reserve_gib=0.0)
        fixed = alone or config.activation_checkpointing
        with NoCollectives(), torch.enable_grad():  # type: ignore[no-untyped-call]
            return plan(
                self.meta_model,
                devices=self.devices,
                nodes=self.nodes,
                device_memory_gib=room.device_gib,
                host_memory_gib=room.host_gib,
                nvme_gib=room.nvme_gib,
                micro_batch=max(1, size // divided),
                accumulate=self.accumulate * divided,
                precision=precision,
                reduce_dtype=config.reduce_dtype,
                optimizer=optimizer or self.optimizer,
                activation_checkpointing=config.activation_checkpointing if fixed else None,
                offload_activations="cpu" if offload_activations else config.offload_activations,
                stage=config.stage if alone else None,
                replicate_size=config.replicate_size,
                prefetch=config.prefetch if prefetch is None else prefetch,
                units=config.units,
                device="cpu" if self.device == "cpu" else "cuda",
                loop=self.loop,
                batch=_divide(self.call.inputs, size, divided),
                loss=self._loss,
                reserve_gib=room.reserve_gib,
            )

    def choice(self, found: Plan) -> Choice | None:
        """Return the choice of a plan that runs, or None where the plan does not have it."""
        wanted = settings_of(self.config)
        return next((choice for choice in found.choices if settings_of(choice) == wanted), None)

    def _loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        output = getattr(model, self.call.method)(*batch["args"], **batch["kwargs"])
        return loss_of(output, batch).value


def settings_of(chosen: Choice | ZeroConfig) -> tuple[Any, ...]:
    """Return what a plan chooses: stage, the two tiers, checkpointing, activations' place."""
    return tuple(getattr(chosen, field.name) for field in fields(Setting))


def batch_size(inputs: Any) -> int:
    """Return the samples of a micro-batch: the first dimension that most tensors have."""
    sizes = [t.shape[0] for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.ndim]
    return Counter(sizes).most_common(1)[0][0] if sizes else 1


def _divide(inputs: Any, size: int, divided: int) -> Any:
    """Shorten every tensor of a batch in its first dimension."""

    def shorter(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim or value.shape[0] != size:
            return value
        return value[: max(1, size // divided)]

    return tree_map(shorter, inputs) if divided > 1 else inputs
