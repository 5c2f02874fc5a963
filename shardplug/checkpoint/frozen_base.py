"""A frozen base under adapters: left out of a checkpoint, and recognised when it is read.

A run that trains adapters loads its base from elsewhere, whole and unchanged, each time it starts;
to write it into every checkpoint would cost gigabytes for nothing. What is written is a sum of
the bits of each tensor, which does not depend on how the tensor is sharded, so that another base
is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.collective import gather
from shardplug.checkpoint.hugging_face import adapter_tensors
from shardplug.checkpoint.names import clean_name, listed
from shardplug.core._torch import local_tensor
from shardplug.core.tier_tensor import in_tier
from shardplug.errors import CheckpointError

__all__ = ["check_base", "describe_base", "frozen_base"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_CHANGES_NOTHING = (None, True, False, "eva", "gaussian", "orthogonal")
"""Values of LoRA's `init_lora_weights` that leave the base as it was loaded; "pissa" does not."""


def frozen_base(model: nn.Module, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what of a PEFT model's state comes again with the base that it is made of.

    Args:
        model: The model.
        state: Its state by name; see `state_of_model`.

    Returns:
        The frozen parameters of the base; nothing where the model is no PeftModel, where its base
        was not loaded from anywhere, or where an adapter has changed the base.
    """
    adapters = getattr(model, "peft_config", None)
    get_base = getattr(model, "get_base_model", None)
    if not isinstance(adapters, Mapping) or not callable(get_base):
        return {}
    if not getattr(get_base(), "name_or_path", None):
        return {}
    if any(
        getattr(config, "init_lora_weights", None) not in _CHANGES_NOTHING
        for config in adapters.values()
    ):
        return {}
    kept = adapter_tensors(model)
    if kept is None:
        return {}
    frozen = {
        clean_name(name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    }
    return {name: tensor for name, tensor in state.items() if name in frozen - kept}


def describe_base(base: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return shape, dtype and sum of bits by name, for a manifest. Collective."""
    sums = _sums(base.values())
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sum_of_bits": total,
        }
        for (name, tensor), total in zip(base.items(), sums, strict=True)
    }


def check_base(
    path: object, here: Mapping[str, torch.Tensor], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    """Compare the base of a model with the one that a checkpoint was written over. Collective.

    Args:
        path: The checkpoint.
        here: The model's tensors by name.
        saved: What `describe_base` gave, by the same names.

    Raises:
        CheckpointError: On every rank, naming tensors that differ.
    """
    wrong = []
    for (name, tensor), total in zip(here.items(), _sums(here.values()), strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != saved[name]["dtype"]:
            wrong.append(f"{name} ({dtype} here, {saved[name]['dtype']} there)")
        elif total != saved[name]["sum_of_bits"]:
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"Expected the base that the adapters of {path} were trained on, which is not in it, "
            f"but {len(wrong)} of its {len(here)} tensors differ here: {listed(wrong)}. Load the "
            "base from where it came from then, in the same dtype."
        )


def _sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Add up the bits of each whole tensor, modulo 2**64: exact in any order."""
    tensors = list(tensors)
    own = [_sum_here(tensor) for tensor in tensors]
    sharded = [isinstance(tensor, DTensor) for tensor in tensors]
    if not any(sharded):
        return own
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    replica = meshes[0].get_local_rank(0) if meshes[0].ndim > 1 else 0
    everyone = gather((replica, own), "Comparing the base")
    shards = [sums for number, sums in everyone if number == replica]
    return [
        sum(sums[index] for sums in shards) % 2**64 if is_sharded else own[index]
        for index, is_sharded in enumerate(sharded)
    ]


def _sum_here(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor)
    resting = in_tier(local)
    values = (local if resting is None else resting.holder.read()).detach().contiguous().flatten()
    return int(values.view(_BITS[values.element_size()]).sum(dtype=torch.int64).item()) % 2**64
