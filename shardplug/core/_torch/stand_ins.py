"""Other tensors in the place of FSDP2's parameters."""

from __future__ import annotations

from typing import Any

import torch

from shardplug.core._torch.gradients import current_backward
from shardplug.core._torch.tensors import local_tensor, share_memory

__all__ = ["stand_in", "step_back", "whole_values"]


def whole_values(group: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return each of FSDP2's parameters with a whole copy in the dtype it rests in. Collective.

    The group is gathered, or not, afterwards as it was before.
    """
    was_sharded = not group.is_unsharded
    params = group.fsdp_params
    casts = any(param.param_dtype is not None for param in params)
    # FSDP2 reduces no gradient of a parameter that it has never gathered.
    if not casts or not all(hasattr(param, "_unsharded_param") for param in params):
        group.unshard()
        group.wait_for_unshard()
    values = []
    for param in params:
        if casts:
            full = param.sharded_param.detach().full_tensor()
            own = share_memory(full, local_tensor(param.sharded_param))
            values.append((param, full.clone() if own else full))
        else:
            values.append((param, param._unsharded_param.detach().clone()))
    if was_sharded:
        group._to_sharded()
    return values


def stand_in(param: Any, tensor: torch.Tensor) -> None:
    """Put `tensor` on the modules in the place of one of FSDP2's parameters, until `step_back`.

    FSDP2 goes on as always; only within a backward, whose forward may have run before, do its own
    tensors stand on the modules again (see `end_of_backward`).
    """
    _place(param, tensor)

    def in_backward(own: torch.Tensor) -> None:
        if current_backward() != -1:
            _place(param, own)

    param._setattr_on_modules = in_backward


def _place(param: Any, tensor: torch.Tensor) -> None:
    info = param._module_info
    places = [(info.module, info.param_name)]
    places += zip(info.shared_modules, info.shared_param_names, strict=True)
    for module, name in places:
        module._parameters[name] = tensor  # of the computation's dtype it is no Parameter


def step_back(param: Any) -> None:
    """Put what FSDP2 would have there now on the modules."""
    vars(param).pop("_setattr_on_modules", None)
    sharded = param.sharded_state is type(param.sharded_state).SHARDED
    param._setattr_on_modules(param.sharded_param if sharded else param._unsharded_param)
