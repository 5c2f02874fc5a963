"""Shards whose values rest outside the device."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.groups import CONVERT_BEFORE, label_of
from shardplug.core._torch.tensors import TensorWithoutMemory
from shardplug.errors import ModelError

__all__ = ["keep_shard_elsewhere", "layout_of_shard"]


def layout_of_shard(param: Any) -> tuple[nn.Parameter, torch.Size, torch.dtype]:
    """Return the sharded parameter, the padded shape of its part, and the dtype gathers have."""
    parameter: nn.Parameter = param.sharded_param
    low = param.mp_policy.param_dtype
    compute = low if low is not None and parameter.is_floating_point() else parameter.dtype
    return parameter, param.padded_sharded_param_size, compute


def keep_shard_elsewhere(param: Any, tensor: torch.Tensor) -> None:
    """Let a tensor with FSDP2's extension hooks stand for a parameter's part of the shard.

    Args:
        param: FSDP2's parameter.
        tensor: Has the part's shape and dtype, and need not have memory.
    """
    param.sharded_param._local_tensor = tensor
    param._sharded_param_data = tensor
    # It would pad the part, and take its address.
    param.reset_sharded_param = functools.partial(_require_kept, param, tensor)
    param._init_extensions()


def _require_kept(param: Any, tensor: torch.Tensor) -> None:
    info = param._module_info
    now = getattr(info.module, info.param_name)
    if now is not param.sharded_param and now is not getattr(param, "_unsharded_param", None):
        raise ModelError(
            f"Expected {param._param_fqn or info.param_name} to be the parameter that was sharded, "
            "as its values rest in a tier, but it was replaced. Copy values into it (copy_, "
            "load_state_dict without assign=True), or change it before it is sharded."
        )
    if not isinstance(param.sharded_param._local_tensor, TensorWithoutMemory):
        raise ModelError(
            f"Expected {label_of(param)} to rest in a tier, but .to(...), .half() or the like has "
            f"made it a tensor in memory. {CONVERT_BEFORE}"
        )
