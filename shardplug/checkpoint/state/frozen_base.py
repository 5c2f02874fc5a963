"""A frozen base under adapters: left out of a checkpoint, and recognised when it is read.

A run that trains adapters loads its base from elsewhere, whole, each time it starts; to write it
into every checkpoint would cost gigabytes for nothing. What is written is a sum of the bits of
each tensor, which does not depend on how the tensor is sharded, so that another base is refused
by name. A base tensor that has changed since the run was set up is written like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.format.schema import OLD_SUM, SUM
from shardplug.checkpoint.state.hugging_face import adapter_tensors
from shardplug.checkpoint.state.model_state import state_of_model
from shardplug.checkpoint.state.tensor_names import clean_name, listed
from shardplug.collective import gather
from shardplug.core._torch.tensors import local_tensor
from shardplug.core.tier_tensor import in_tier
from shardplug.errors import CheckpointError

__all__ = ["check_base", "describe_base", "frozen_base", "note_base", "unchanged_base"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PIECE = 2**20
"""Elements that are added up at a time."""

_AT_SETUP: WeakKeyDictionary[nn.Module, dict[str, dict[str, Any]]] = WeakKeyDictionary()
"""What `describe_base` said of each model's base when the model was set up."""

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


def note_base(model: nn.Module) -> None:
    """Remember the base that a sharded model starts with, the first time only. Collective."""
    if model not in _AT_SETUP:
        _AT_SETUP[model] = describe_base(frozen_base(model, state_of_model(model)))


def unchanged_base(
    model: nn.Module, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what a checkpoint can leave out: what is as it was at `note_base`. Collective.

    Adapters may have been merged into the base, or parts of it been trained for a while: what
    differs from the base that is loaded again belongs into the checkpoint.

    Args:
        model: The model.
        state: Its state by name; see `state_of_model`.

    Returns:
        What `describe_base` says of the tensors to leave out, and the names of frozen tensors
        that have changed.
    """
    at_setup = _AT_SETUP.get(model, {})
    now = describe_base(frozen_base(model, state))
    unchanged = {name: entry for name, entry in now.items() if at_setup.get(name) == entry}
    changed = [name for name in now if name not in unchanged]
    return unchanged, changed


def describe_base(base: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Return shape, dtype and sum of bits by name, for a manifest. Collective."""
    sums = _sums(base.values())
    return {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            SUM: total,
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
    by_place = [SUM in saved[name] for name in here]
    for (name, tensor), total in zip(here.items(), _sums(here.values(), by_place), strict=True):
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != saved[name]["dtype"]:
            wrong.append(f"{name} ({dtype} here, {saved[name]['dtype']} there)")
        elif total != saved[name].get(SUM, saved[name].get(OLD_SUM)):
            wrong.append(name)
    if wrong:
        raise CheckpointError(
            f"Expected the base that the adapters of {path} were trained on, which is not in it, "
            f"but {len(wrong)} of its {len(here)} tensors differ here: {listed(wrong)}. Load the "
            "base from where it came from then, in the same dtype. A run that has changed its base "
            "itself, by merging adapters into it, loads such a checkpoint in a new process only."
        )


def _sums(tensors: Iterable[torch.Tensor], by_place: Iterable[bool] | None = None) -> list[int]:
    """Add up the bits of each whole tensor, modulo 2**64: exact in any order.

    Args:
        tensors: The tensors, the same on every rank.
        by_place: For each, whether bits are weighed by their place; None: all are.
    """
    tensors = list(tensors)
    weighed = [True] * len(tensors) if by_place is None else by_place
    own = [_sum_here(*each) for each in zip(tensors, weighed, strict=True)]
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


def _sum_here(tensor: torch.Tensor, by_place: bool) -> int:
    """Add up this rank's bits, each times a weight of its row and one of its column.

    Without weights, as in older checkpoints, rows that have changed places are not noticed.
    """
    local = local_tensor(tensor)
    resting = in_tier(local)
    values = (local if resting is None else resting.holder.read()).detach()
    if not values.numel():
        return 0
    if not by_place:
        plain = values.contiguous().flatten().view(_BITS[min(8, values.element_size())])
        return int(plain.sum(dtype=torch.int64).item()) % 2**64
    if values.is_complex():
        values = torch.view_as_real(values)
    rows = values.reshape(values.shape[0] if tensor.ndim else 1, -1).contiguous()
    bits = rows.view(_BITS[rows.element_size()])
    first, (count, width) = _first_row(tensor), bits.shape
    columns = _weights(1, width, bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    step = max(1, _PIECE // width)
    for start in range(0, count, step):
        piece = bits[start : start + step].to(torch.int64)
        places = _weights(2 * (first + start), len(piece), bits.device)
        total += (piece.sum(1) * places).sum() + (piece.sum(0) * columns).sum()
    return int(total.item()) % 2**64


def _first_row(tensor: torch.Tensor) -> int:
    """Return the number of the first row that this rank has of a tensor."""
    if not isinstance(tensor, DTensor):
        return 0
    mesh = tensor.device_mesh
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    return min(rank * -(-tensor.size(0) // size), tensor.size(0))


def _weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return numbers without a pattern for every other place from `first` on."""
    places = torch.arange(first, first + 2 * count, 2, dtype=torch.int64, device=device)
    mixed = (places + 1) * -0x61C8864680B583EB
    return (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
