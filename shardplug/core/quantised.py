"""Optimizer state in 8 or 4 bits, with a scale for each block of values, as torchao keeps it.

A checkpoint holds such state as it is. What reads one has to give it back in the same form: as
ordinary tensors it would train on, in four times the memory and with other roundings.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from shardplug.core._torch.tensors import local_tensor

__all__ = ["own_form", "quantised_like", "patch_compiled_step"]

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
    if make is None or not _by_torchao(optimizer) or key not in _SIGNED:
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


def patch_compiled_step(optimizer: torch.optim.Optimizer) -> None:
    """Run the step of torchao's optimizers uncompiled where ranks hold unlike numbers of rows.

    torchao compiles its step. What torch then caches on disk goes by the shapes of whole tensors,
    so a rank can be given the code of another, whose part has other rows, and fail on its sizes.

    Args:
        optimizer: Any optimizer, over sharded parameters; others than torchao's stay as they are.
    """
    if not _by_torchao(optimizer):
        return
    inner = optimizer.step

    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not any(_is_uneven(p) for group in self.param_groups for p in group["params"]):
            return inner(*args, **kwargs)
        with torch.compiler.set_stance("force_eager"):
            return inner(*args, **kwargs)

    functools.update_wrapper(step, inner)  # the mark of a scheduler made before comes along
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _by_torchao(optimizer: torch.optim.Optimizer | None) -> bool:
    return any(c.__module__.startswith("torchao.optim.") for c in type(optimizer).__mro__)


def _is_uneven(parameter: torch.Tensor) -> bool:
    return isinstance(parameter, DTensor) and any(
        parameter.shape[placement.dim] % parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, Shard)
    )


def _is_quantised(value: torch.Tensor) -> bool:
    return hasattr(local_tensor(value), "__tensor_flatten__")
