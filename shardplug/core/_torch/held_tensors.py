"""What a sharded model holds, by kind."""

from __future__ import annotations

import torch
from torch import nn

from shardplug.core._torch.gradients import unreduced
from shardplug.core._torch.groups import own_groups, param_groups
from shardplug.core._torch.tensors import TensorWithoutMemory, local_tensor

__all__ = ["gathered_storages", "model_state_tensors"]


def model_state_tensors(root: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return what the parameters of a model hold, by kind, in one walk over its units.

    Returns:
        "master_shards": the flat, padded shards that parameters are kept in at rest. "gathered":
        the gathered copies; those not gathered at the moment have empty storages. "gradients":
        sharded ones, and full ones that have not been reduced yet.
    """
    masters: list[torch.Tensor] = []
    gathered: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []
    for group in param_groups(root):
        if group._all_gather_result is not None:
            gathered.append(group._all_gather_result.all_gather_output)
        gradients.append(group._partial_reduce_output)
        for param in group.fsdp_params:
            masters.append(param._sharded_param_data)
            gathered += param.all_gather_outputs
            gathered += getattr(param, "_unsharded_inner_tensors", [])
            gradients.append(param.sharded_param.grad)
            gradients += unreduced(param)
    return {
        "master_shards": masters,
        "gathered": gathered,
        "gradients": [local_tensor(grad) for grad in gradients if grad is not None],
    }


def gathered_storages(unit: nn.Module) -> list[torch.UntypedStorage]:
    """Return the storages that one unit's parameters are whole in while they are gathered."""
    tensors: list[torch.Tensor] = []
    for group in own_groups(unit):
        for param in group.fsdp_params:
            tensors += param.all_gather_outputs
            tensors += getattr(param, "_unsharded_inner_tensors", [])
            if hasattr(param, "_unsharded_param"):
                tensors.append(local_tensor(param._unsharded_param))
    return [t.untyped_storage() for t in tensors if not isinstance(t, TensorWithoutMemory)]
