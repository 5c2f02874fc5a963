"""Optimizers whose update looks at a whole matrix, of which a rank has only some rows.

What can be made right is (`torch.optim.Muon`); what cannot is refused by name.
"""

from __future__ import annotations

import torch

from shardplug.core import _torch
from shardplug.errors import OptimizerError

__all__ = ["settle_matrix_optimizer"]

_FACTORED = frozenset({"transformers.optimization.Adafactor"})
"""Classes outside torch that keep means over rows and columns; named, as they are not imported."""


def settle_matrix_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer right for parameters whose rows are spread over the ranks, or refuse it.

    Args:
        optimizer: The user's; all optimizers of its class are changed.

    Raises:
        OptimizerError: When its update needs means over whole matrices.
    """
    kind = type(optimizer)
    owner = next(c for c in kind.__mro__ if "step" in vars(c))
    if owner is torch.optim.Adafactor or _full_name(owner) in _FACTORED:
        raise OptimizerError(
            "Expected an optimizer whose state has one element for each of the parameter's, got "
            f"{kind.__name__} of {kind.__module__}: it keeps means over the rows and columns of "
            "whole matrices, whose rows are spread over the ranks here. Use torch.optim.AdamW, "
            "torch.optim.SGD or torch.optim.Muon."
        )
    if isinstance(optimizer, torch.optim.Muon):
        _torch.orthogonalise_whole_matrices()


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
