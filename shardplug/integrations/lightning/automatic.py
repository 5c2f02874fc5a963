"""What zero_auto plans for in a Trainer: its data, its step, its optimizer."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError
from shardplug.integrations.data.example import example_batch
from shardplug.plan.auto import AutoBudget, auto_config
from shardplug.plan.trace.meta_copy import meta_copy

__all__ = ["decide"]


def decide(
    module: nn.Module, budget: AutoBudget, base: ZeroConfig, device: torch.device
) -> ZeroConfig:
    """Choose the configuration of a LightningModule that is about to be sharded. Collective.

    Args:
        module: The module, connected to its Trainer.
        budget: What may be used.
        base: The fields that are not chosen.
        device: Device of this rank.

    Raises:
        ConfigError: On every rank, when nothing fits, or there is no batch to plan for.
    """
    trainer: Any = module.trainer
    batch = budget.example_batch
    if batch is None:
        batch = _first_batch(trainer)
    if batch is None:
        raise ConfigError(
            "zero_auto found no batch to plan for: the training data cannot be read without using "
            "samples up. Pass ZeroStrategy(budget=AutoBudget(example_batch=...))."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a step without a Trainer cannot log, and says so
        return auto_config(
            module,
            budget,
            batch=batch,
            optimizer=_optimizer(module),
            accumulate=int(trainer.accumulate_grad_batches),
            base=base,
            loop="lightning",
            method="training_step",
            device=device,
        )


def _first_batch(trainer: Any) -> Any:
    """Collate the first samples of the training data; None where that is not possible."""
    source = getattr(trainer.fit_loop, "_data_source", None)
    if source is None or not source.is_defined():
        return None
    return example_batch(source.dataloader())


def _optimizer(module: nn.Module) -> torch.optim.Optimizer | None:
    """Ask the module for its optimizer, on a meta copy; None where it needs weights."""
    try:
        made: Any = meta_copy(module).configure_optimizers()  # type: ignore[operator]
    except Exception:
        # Anything: it is the user's code. AdamW is planned for.
        return None
    if isinstance(made, dict):
        made = made.get("optimizer")
    while isinstance(made, (list, tuple)) and made:
        made = made[0]
    if isinstance(made, dict):
        made = made.get("optimizer")
    return made if isinstance(made, torch.optim.Optimizer) else None
