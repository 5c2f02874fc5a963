"""Model state by name: out of a sharded (or plain) model, and back in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.state.extra_state import (
    decode,
    encode,
    is_extra,
    modules_with_extra_state,
)
from shardplug.checkpoint.state.tensor_names import clean_name, listed, pair
from shardplug.core._torch.resharding import reshard_all
from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import CheckpointError

__all__ = [
    "check_fits",
    "load_model",
    "local_rows",
    "restore_extra_state",
    "state_and_aliases",
    "state_of_model",
]


def state_of_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, persistent buffers and extra state by name; tied tensors once.

    Sharded parameters come as DTensors; all tensors share memory with the model. What a module
    returns from `get_extra_state` comes packed as bytes under its key.

    Raises:
        CheckpointError: For entries of the state dict that could not be restored by name.
    """
    return state_and_aliases(model)[0]


def state_and_aliases(
    model: nn.Module, *, pack: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, set[str]]]:
    """Return the state, and for each of its names all names of the same tensor.

    Args:
        model: The model.
        pack: Pack extra state; False leaves empty tensors there, where only names count.
    """
    if isinstance(model, FSDPModule):
        reshard_all(model)
    held: dict[str, torch.Tensor] = {
        clean_name(name): tensor
        for name, tensor in chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    }
    ids = {id(tensor) for tensor in held.values()}
    state: dict[str, torch.Tensor] = {}
    aliases: dict[str, set[str]] = {}
    first: dict[int, str] = {}
    for raw, value in model.state_dict(keep_vars=True).items():
        name = clean_name(raw)
        if is_extra(name) and name not in held:
            state[name] = encode(name, value) if pack else torch.empty(0, dtype=torch.uint8)
            aliases[name] = {name}
            continue
        # A state_dict() of the user's own may hand out other tensors than the module's.
        own = value if id(value) in ids else held.get(name)
        if own is None:
            raise CheckpointError(
                f"Expected the model's state dict to hold its parameters and buffers, but {name} "
                f"({type(value).__name__}) is neither: a state_dict hook makes it, and loading "
                "could not restore it. Register it as a buffer, or return it from "
                "get_extra_state()."
            )
        kept = first.setdefault(id(own), name)
        aliases.setdefault(kept, set()).add(name)
        if kept == name:
            state[name] = own.detach()
    return state, aliases


def local_rows(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Cut this rank's rows out of a whole tensor, the way `like` is sharded on dim 0."""
    mesh = like.device_mesh
    size = mesh.size(mesh.ndim - 1)
    rank = mesh.get_local_rank(mesh.ndim - 1)
    rows = -(-whole.size(0) // size)
    start = min(rank * rows, whole.size(0))
    return whole[start : start + rows]


def check_fits(
    pairs: Iterable[tuple[str, torch.Tensor, tuple[int, ...], torch.dtype]],
) -> None:
    """Refuse tensors that cannot be copied into the model's.

    Args:
        pairs: Name, tensor here, and the shape and dtype in the checkpoint.

    Raises:
        CheckpointError: Naming every tensor whose shape differs, or that is of another kind
            (integer for floating point, or the other way round).
    """
    wrong = []
    for name, own, shape, dtype in pairs:
        if is_extra(name):
            continue
        if tuple(own.shape) != shape:
            wrong.append(f"{name}: {shape} in the checkpoint, {tuple(own.shape)} here")
        elif _kind(own.dtype) != _kind(dtype):
            wrong.append(f"{name}: {dtype} in the checkpoint, {own.dtype} here")
    if wrong:
        raise CheckpointError(
            "Expected tensors of the model's shapes and kinds, got " + "; ".join(wrong) + ". "
            "Load into the model that was saved; or leave them as they are here, with strict=False "
            "and a rename to a name that the model has not: rename={'head': 'unused.head'}."
        )


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def load_model(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Copy tensors into a sharded or plain model. Nothing is changed if a check fails.

    Args:
        model: The model.
        state: DTensors sharded like the model's, or whole tensors, by name. A tied tensor may
            come under any of its names, or all of them.
        strict: Refuse missing and unexpected names.

    Returns:
        Names that the model has and `state` lacks, and the other way round.

    Raises:
        CheckpointError: For a shape that differs; with `strict`, for names that differ.
    """
    own, aliases = state_and_aliases(model, pack=False)
    paired = pair(aliases, state)
    missing = list(paired.missing)
    unexpected = [name for name in paired.unexpected if name not in paired.repeated]
    if strict and (missing or unexpected):
        raise CheckpointError(
            "Expected the checkpoint's names to be the model's. "
            f"Missing in the checkpoint: {listed(missing)}. "
            f"Not in the model: {listed(unexpected)}. Use strict=False to load the others."
        )
    found = {name: state[theirs] for name, theirs in paired.saved.items()}
    check_fits(
        (name, own[name], tuple(value.shape), value.dtype)
        for name, value in found.items()
        if isinstance(value, torch.Tensor)
    )
    extra = {name: decode(name, value) for name, value in found.items() if is_extra(name)}
    with torch.no_grad():
        for name, value in found.items():
            if name not in extra:
                _copy_into(own[name], value)
    restore_extra_state(model, extra)
    return missing, unexpected


def restore_extra_state(model: nn.Module, extra: Mapping[str, Any]) -> None:
    """Hand each module the extra state that is under its name."""
    for raw, module in modules_with_extra_state(model).items():
        name = clean_name(raw)
        if name in extra:
            module.set_extra_state(extra[name])


def _copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a DTensor or whole tensor into a DTensor or plain tensor of the same shape."""
    if isinstance(source, DTensor) and not (
        isinstance(target, DTensor)
        and source.placements == target.placements
        and source.device_mesh == target.device_mesh
    ):
        source = source.full_tensor()
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        source = local_rows(source, target)
    local_tensor(target).copy_(local_tensor(source))
