"""Optimizers whose update is not that of a rank's rows alone.

What can be made right is (`torch.optim.Muon`); what cannot is refused by name, as are optimizers
whose kernels take no sharded parameters.
"""

from __future__ import annotations

import torch

from shardplug.errors import OptimizerError

__all__ = ["refuse_matrix_optimizer"]

_FACTORED = frozenset({"transformers.optimization.Adafactor"})
"""Classes outside torch that keep means over rows and columns; named, as they are not imported."""

_REFUSED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: (
        "it works with the gradients of all parameters as one long vector, whose parts are spread "
        "over the ranks here, and calls the model an unknown number of times in a step"
    ),
    torch.optim.SparseAdam: (
        "it takes sparse gradients only, and gradients that are reduced over the ranks are dense"
    ),
}
"""Classes of torch that would fail in the first step, with the reason."""

_NEVER: dict[str, tuple[str, str]] = {
    "bitsandbytes.": (
        "its kernels take ordinary tensors, and sharded parameters are none",
        "Use AdamW8bit of torchao.optim, whose state takes a byte per value too, or "
        "torch.optim.AdamW.",
    ),
    "torchao.optim.cpu_offload.": (
        "it steps parameters during the backward, before their gradients are reduced",
        'Use torch.optim.AdamW with offload_optimizer="cpu".',
    ),
}
"""Beginnings of modules with such classes outside torch: the reason, and what to do."""


def refuse_matrix_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot train parameters whose rows are spread over the ranks.

    Args:
        optimizer: The user's.

    Raises:
        OptimizerError: When its update needs means over whole matrices, all gradients as one
            vector, or sparse gradients, its kernels take no sharded parameters, or its steps are
            to be differentiated.
    """
    kind = type(optimizer)
    owner = next(c for c in kind.__mro__ if "step" in vars(c))
    for front, (reason, advice) in _NEVER.items():
        if _full_name(owner).startswith(front):
            raise OptimizerError(
                f"Expected an optimizer that can train parameters whose rows are spread over the "
                f"ranks, got {kind.__name__} of {kind.__module__}: {reason}. {advice}"
            )
    if owner is torch.optim.Adafactor or _full_name(owner) in _FACTORED:
        raise OptimizerError(
            "Expected an optimizer whose state has one element for each of the parameter's, got "
            f"{kind.__name__} of {kind.__module__}: it keeps means over the rows and columns of "
            "whole matrices, whose rows are spread over the ranks here. Use torch.optim.AdamW, "
            "torch.optim.SGD or torch.optim.Muon."
        )
    if owner in _REFUSED:
        raise OptimizerError(
            f"Expected an optimizer that can train parameters whose rows are spread over the "
            f"ranks, got {kind.__name__}: {_REFUSED[owner]}. Use torch.optim.AdamW or "
            "torch.optim.SGD."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise OptimizerError(
            f"Expected an optimizer whose step records no gradients, got {kind.__name__} with "
            "differentiable=True: steps on sharded parameters cannot be differentiated. Leave the "
            "option out."
        )


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
