"""What a Trainer's first micro-batch runs, for the plan of the run.

The module's own `training_step` is traced on tensors without memory. Meanwhile it has no Trainer
but plain facts of it, and what it logs goes nowhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardplug.errors import ModelError
from shardplug.integrations.common.precision_option import autocasts
from shardplug.plan.run.run_plan import FirstStep

__all__ = ["first_step"]

_PLAIN = (bool, int, float, str, type(None))
_SILENT = ("log", "log_dict", "print")


def first_step(trainer: Any, module: Any, batch: Any, batch_idx: int) -> FirstStep:
    """Describe the micro-batch that is about to run.

    Args:
        trainer: The Trainer.
        module: Its LightningModule, sharded.
        batch: The batch, as `training_step` will get it.
        batch_idx: Its number.
    """
    facts = _Facts(trainer)

    def loss(model: nn.Module, inputs: Any) -> torch.Tensor:
        _detach(model, facts)
        step: Any = model.training_step
        takes = len(inspect.signature(step).parameters)
        output = step(inputs, batch_idx) if takes > 1 else step(inputs)
        output = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(output, torch.Tensor):
            raise ModelError(f"training_step returned {type(output).__name__} for a loss")
        return output

    by_hand = not getattr(module, "automatic_optimization", True)
    return FirstStep(
        model=module,
        batch=batch,
        loss=loss,
        autocast=autocasts(trainer.precision_plugin),
        grads_kept_through_forward=not by_hand,
        accumulate=1 if by_hand else int(trainer.accumulate_grad_batches),
        untraceable="training_step calls optimizers itself (manual optimization)"
        if by_hand
        else "",
    )


def _detach(root: nn.Module, facts: _Facts) -> None:
    """Cut the module off from the Trainer; the caller puts its attributes back."""
    for module in root.modules():
        own = vars(module)
        if "_trainer" in own:
            own["_trainer"], own["_device"] = facts, torch.device("meta")
            own.update(dict.fromkeys(_SILENT, _nothing))
        kinds = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
        if "torchmetrics" in kinds and next(module.parameters(), None) is None:
            own.update({"forward": _zero, "update": _zero, "compute": _zero})


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _zero(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros((), device="meta")


class _Facts:
    """Numbers, words and flags of a Trainer, and nothing that can be called."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.logger = None
        self.loggers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if isinstance(value, _PLAIN):
            return value
        raise AttributeError(f"trainer.{name} is not to be had in a trace of training_step")
