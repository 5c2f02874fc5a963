"""Models that `device_map` has spread, or was to spread, over devices."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardplug.errors import ModelError

__all__ = ["SPREAD", "SPREADING", "refuse_spread"]

SPREADING = ("auto", "balanced", "balanced_low_0", "sequential")
"""What `from_pretrained(device_map=...)` takes to choose devices by itself."""

SPREAD = "_shardplug_device_map"
"""Attribute of a model that was loaded with one of them."""


def refuse_spread(accelerator: Any, model: nn.Module) -> None:
    """Refuse a model that Accelerate has put on several devices, or that chose its device itself.

    One process with one device keeps what it has: there the two are the same.

    Args:
        accelerator: The Accelerator that is to prepare it.
        model: The model, not sharded yet.

    Raises:
        ModelError: When it was.
    """
    if accelerator.verify_device_map(model):
        raise ModelError(
            f"Expected a model on one device, got {type(model).__name__} loaded with "
            "device_map over several. Load it without device_map; every rank gets its shard."
        )
    if accelerator.num_processes == 1:
        return
    for module in model.modules():
        value = getattr(module, SPREAD, None)
        if value is not None:
            raise ModelError(
                f"Expected a model that shardplug places, got {type(module).__name__} loaded with "
                f"device_map={value!r} on {accelerator.num_processes} ranks, which all take the "
                "same devices. Load it without device_map; every rank gets its shard."
            )
