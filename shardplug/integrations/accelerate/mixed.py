"""Mixed precision around a sharded model: autocast, fp32 outputs, and the fp16 scaler."""

from __future__ import annotations

import functools
from typing import Any

import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn

from shardplug.core.precision import PLAIN_FORWARD, GradScaler

__all__ = ["add_autocast", "grad_scaler", "remove_autocast"]


def add_autocast(model: nn.Module, context: Any) -> None:
    """Run the model's forward under autocast and return its floats in fp32.

    The wrapper sits inside the module's hooks, so the gather of the parameters comes first.

    Args:
        model: The sharded model; nothing happens to one that is wrapped already.
        context: An autocast context that can also decorate.
    """
    if PLAIN_FORWARD in model.__dict__:
        return
    forward = model.forward
    wrapped = convert_outputs_to_fp32(context(forward))
    model.__dict__[PLAIN_FORWARD] = model.__dict__.get("forward")
    # wraps: libraries read the signature of forward to see which columns a model takes.
    model.forward = functools.wraps(forward)(wrapped)


def remove_autocast(model: nn.Module) -> None:
    """Take the wrapper of `add_autocast` off again."""
    if PLAIN_FORWARD not in model.__dict__:
        return
    original = model.__dict__.pop(PLAIN_FORWARD)
    if original is None:
        del model.__dict__["forward"]
    else:
        model.forward = original


def grad_scaler(device: torch.device, handler: Any) -> GradScaler:
    """Return the loss scaler for fp16, with the settings of `GradScalerKwargs` if given."""
    settings = handler.to_kwargs() if handler is not None else {}
    return GradScaler(device.type, **settings)
