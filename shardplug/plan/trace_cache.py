"""The model of a plan with everything that its choices share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplug.errors import ModelError
from shardplug.plan.sizes.activation_formula import estimated_trace
from shardplug.plan.sizes.layout import Placed
from shardplug.plan.timeline import Setup
from shardplug.plan.trace.repeated_blocks import trace_model
from shardplug.plan.trace.trace import Trace, TraceSettings

__all__ = ["TraceCache"]


@dataclass
class TraceCache:
    """The model, its batch, and how its steps will run."""

    model: nn.Module
    placed: Placed
    batch: Any
    loss: Callable[[nn.Module, Any], torch.Tensor] | None
    settings: TraceSettings
    """Checkpointing and offloading are filled in for each trace."""
    setup: Setup
    """Stage and tiers are filled in for each choice."""
    failure: str = ""
    """Why the model could not be traced, or nothing."""

    def trace(self, checkpointing: bool, offload_activations: bool = False) -> Trace:
        """Trace the model, or estimate where that is not possible.

        Raises:
            ModelError: For a loss that trains nothing, or blocks that cannot be checkpointed.
        """
        settings = dataclasses.replace(
            self.settings, checkpointing=checkpointing, offload_activations=offload_activations
        )
        if not self.failure:
            try:
                return trace_model(self.placed, self.model, self.batch, self.loss, settings)
            except ModelError:
                raise
            except Exception as error:
                # Anything: it is the user's model that raised, on tensors without values.
                self.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return estimated_trace(self.placed.layout, self.model, self.batch, settings)
