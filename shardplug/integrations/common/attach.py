"""Remembers which engine shards which module, across strategies."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.config import ZeroConfig
from shardplug.core.mesh import build_mesh
from shardplug.engine import ZeroEngine
from shardplug.errors import ConfigError, ModelError
from shardplug.listeners import default_listeners
from shardplug.plan.auto import AutoBudget

__all__ = [
    "config_for",
    "engine_for",
    "new_engine",
    "require_trainable",
    "require_unchanged",
    "shard",
]

# Kept on the module itself: a module sharded by one Trainer may be handed to the next, which
# makes a strategy of its own; and module and engine must be collected together.
_ATTRIBUTE = "_shardplug_engine"
_NAMES = "_shardplug_names"


def engine_for(module: nn.Module, config: ZeroConfig) -> ZeroEngine | None:
    """Return the engine that shards `module` already, if any.

    Raises:
        ConfigError: When it was sharded with other options.
    """
    engine: ZeroEngine | None = vars(module).get(_ATTRIBUTE)
    if engine is not None and engine.config != config:
        raise ConfigError(
            f"Expected {type(module).__name__} to be used with the options it was sharded with "
            f"({engine.config}), got {config}. Build the module anew, or use the same options."
        )
    if engine is not None:
        engine.reshard()
        require_unchanged(module)
    return engine


def config_for(module: nn.Module, config: ZeroConfig, budget: AutoBudget | None) -> ZeroConfig:
    """Return the configuration of a module that zero_auto has sharded already, or the one given."""
    engine: ZeroEngine | None = vars(module).get(_ATTRIBUTE)
    return config if budget is None or engine is None else engine.config


def shard(
    engine: ZeroEngine,
    module: nn.Module,
    *,
    cast_inputs: bool,
    forward_methods: Sequence[str],
    child_units: bool = False,
) -> None:
    """Shard a module and remember its engine. Collective."""
    engine.shard(
        module, cast_inputs=cast_inputs, forward_methods=forward_methods, child_units=child_units
    )
    _move_metrics(module, engine.device)
    vars(module)[_ATTRIBUTE] = engine
    vars(module)[_NAMES] = _names(module)


def new_engine(
    config: ZeroConfig, device: torch.device, folder: str | os.PathLike[str] | None = None
) -> ZeroEngine:
    """Make an engine on the framework's device, which may be the CPU of a machine with GPUs.

    Args:
        config: The options.
        device: The framework's device.
        folder: Where a report of an out-of-memory error goes.
    """
    mesh = build_mesh(config.replicate_size, device.type)
    return ZeroEngine(config, mesh, listeners=default_listeners("lightning", folder))


def _move_metrics(module: nn.Module, device: torch.device) -> None:
    """Move torchmetrics: their states are neither parameters nor buffers."""
    for part in module.modules():
        kinds = {kind.__module__.partition(".")[0] for kind in type(part).__mro__}
        if "torchmetrics" in kinds and next(part.parameters(), None) is None:
            part.to(device)


def require_trainable(module: nn.Module) -> None:
    """Refuse to train a model in which nothing can be trained.

    Raises:
        ModelError: When no parameter requires a gradient.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            f"Expected {type(module).__name__} to have parameters that require gradients, found "
            "none: there is nothing to train. Unfreeze some, or use an evaluation entry point."
        )


def _names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


def require_unchanged(module: nn.Module) -> None:
    """Refuse a module whose parameters were added, removed or replaced after it was sharded.

    Raises:
        ModelError: Naming the first parameter.
    """
    kind = type(module).__name__
    changed = sorted(_names(module) ^ vars(module)[_NAMES])
    if changed:
        raise ModelError(
            f"Expected {kind} to keep the parameters it was sharded with, but {changed[0]!r} was "
            "added or removed afterwards (in on_load_checkpoint?). Build all of the model in "
            "__init__, setup or configure_model."
        )
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor) and parameter.numel() and parameter.ndim:
            raise ModelError(
                f"Expected {kind} to keep the parameters it was sharded with, but {name!r} was "
                "replaced. Build layers once: `if self.net is None:` in configure_model and setup, "
                "which run again for every fit, validate, test and predict."
            )
