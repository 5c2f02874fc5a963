"""What modules keep through `get_extra_state`, carried as bytes among the tensors."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.format.plain import UNREADABLE, culprit, load_plain, why, with_tensors
from shardplug.errors import CheckpointError

__all__ = ["decode", "encode", "is_extra", "is_packed", "modules_with_extra_state"]

_SUFFIX = "_extra_state"
_MAGIC = b"shardplug extra state\n"  # tells our bytes from a module's own uint8 tensor


def is_extra(name: str) -> bool:
    """Whether a state dict's key is one that torch keeps for extra state."""
    return name == _SUFFIX or name.endswith("." + _SUFFIX)


def encode(name: str, value: Any) -> torch.Tensor:
    """Turn an extra state into a tensor of bytes.

    Raises:
        CheckpointError: For a state that cannot be read back without running code, or is sharded.
    """
    if _holds_dtensor(value):
        raise CheckpointError(
            f"Expected the extra state {name} to be whole, but it holds a sharded tensor (DTensor)."
        )
    found = culprit(name, value)
    if found is not None:
        raise CheckpointError(
            f"Expected the extra state {name} to be made of plain types and tensors, but "
            f"{found[0]} is a {type(found[1]).__name__}. Return plain types from "
            "get_extra_state()."
        )
    buffer = io.BytesIO()
    # Not where they are: the ranks' devices have different names, and bytes are compared.
    torch.save(with_tensors(value, torch.Tensor.cpu), buffer)
    return torch.frombuffer(bytearray(_MAGIC + buffer.getvalue()), dtype=torch.uint8)


def decode(name: str, value: Any) -> Any:
    """Return the extra state that `encode` packed; other values are returned as they are.

    Raises:
        CheckpointError: For bytes that cannot be read.
    """
    if not is_packed(value):
        return value
    try:
        return load_plain(io.BytesIO(bytes(value.tolist())[len(_MAGIC) :]))
    except UNREADABLE as error:
        raise CheckpointError(f"The extra state {name} is damaged: {why(error)}.") from error


def is_packed(value: Any) -> bool:
    """Whether a value is what `encode` returns."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        return False
    return bytes(value[: len(_MAGIC)].tolist()) == _MAGIC


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take an extra state, by the key it is under (not cleaned)."""
    return {
        f"{name}.{_SUFFIX}" if name else _SUFFIX: module
        for name, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }


def _holds_dtensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_dtensor(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_dtensor(item) for item in value)
    return isinstance(value, DTensor)
