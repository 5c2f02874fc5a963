"""Optimizer state in 8 or 4 bits, with a scale for each block of values, as torchao keeps it.

A checkpoint holds such state as it is. What reads one has to give it back in the same form: as
ordinary tensors it would train on, in four times the memory and with other roundings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardplug.core._torch import local_tensor

__all__ = ["own_form", "quantised_like"]

_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""State that torchao's optimizers quantise: whether its values have a sign."""


def quantised_like(
    optimizer: torch.optim.Optimizer | None, parameter: torch.Tensor, key: str
) -> torch.Tensor | None:
    """Make zeros in the form in which the optimizer keeps a value, if that is a quantised one.

    Args:
        optimizer: Any optimizer.
        parameter: A parameter of its own.
        key: Name of the value.

    Returns:
        A tensor laid out like the parameter; None for values that are ordinary tensors.
    """
    make: Callable[..., torch.Tensor] | None = getattr(optimizer, "_new_buffer", None)
    by_torchao = any(c.__module__.startswith("torchao.optim.") for c in type(optimizer).__mro__)
    if make is None or not by_torchao or key not in _SIGNED:
        return None
    made = make(parameter.detach(), _SIGNED[key])
    return made if _is_quantised(made) else None


def own_form(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, key: str, value: Any
) -> Any:
    """Return a loaded value in the form in which the optimizer keeps it."""
    if not isinstance(value, torch.Tensor) or _is_quantised(value):
        return value
    made = quantised_like(optimizer, parameter, key)
    if made is None:
        return value
    with torch.no_grad():
        local_tensor(made).copy_(local_tensor(value))
    return made


def _is_quantised(value: torch.Tensor) -> bool:
    return hasattr(local_tensor(value), "__tensor_flatten__")
