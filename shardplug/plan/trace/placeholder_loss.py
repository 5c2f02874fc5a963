"""The loss in what a model returned, or one made up where the training loop computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from shardplug.core._torch.tensors import tree_leaves
from shardplug.errors import ModelError
from shardplug.plan.trace.trace import loss_or_outputs

__all__ = ["FoundLoss", "loss_of"]


@dataclass(frozen=True, slots=True)
class FoundLoss:
    """A loss to trace a backward from."""

    value: torch.Tensor
    made_up_of: int = 0
    """Bytes of the outputs that it was made up of, or 0 where it is the model's own."""


def loss_of(output: Any, batch: Any) -> FoundLoss:
    """Find the loss in what a model returned, or make one up that holds as much.

    A loss that the training loop computes is not seen here. Outputs of two or more dimensions, the
    last taken to be that of classes, get a cross entropy; single numbers count as they are.

    Args:
        output: What the model returned.
        batch: What it was called with: token ids in it are the labels of logits that fit them.

    Raises:
        ModelError: When nothing in the output depends on the parameters.
    """
    loss, tensors = loss_or_outputs(output)
    if loss is not None:
        return FoundLoss(loss)
    if not tensors:
        raise ModelError(
            f"Expected an output that depends on the parameters, got {type(output).__name__} "
            "without one."
        )
    if len(tensors) == 1 and tensors[0].ndim == 0:
        return FoundLoss(tensors[0])
    tokens = [t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and _is_ids(t)]
    value = torch.stack([_cross_entropy(tensor, tokens) for tensor in tensors]).sum()
    return FoundLoss(value, made_up_of=sum(tensor.nbytes for tensor in tensors))


def _cross_entropy(output: torch.Tensor, tokens: list[torch.Tensor]) -> torch.Tensor:
    if output.ndim < 2:
        return output.float().sum()
    labels = next((t for t in tokens if t.shape == output.shape[:-1]), None)
    logits = output.flatten(0, -2).float()
    if labels is None:
        return F.log_softmax(logits, -1).sum()
    return F.cross_entropy(logits, labels.flatten())


def _is_ids(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.ndim > 0
