"""The dtype that each parameter came in, before it was made an fp32 master."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

__all__ = ["note_source_dtypes", "source_dtypes"]

_NOTED: WeakKeyDictionary[nn.Module, dict[str, torch.dtype]] = WeakKeyDictionary()


def note_source_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None) -> None:
    """Remember the dtypes of a model's parameters and buffers; names known already keep theirs.

    Args:
        model: The model, before its parameters are cast.
        dtypes: dtype by name, where the weights were read from files of another dtype than the
            model's own; None takes the model's.
    """
    known = _NOTED.setdefault(model, {})
    if dtypes is None:
        dtypes = {
            name: tensor.dtype
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
    for name, dtype in dtypes.items():
        known.setdefault(name, dtype)


def source_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes noted for a model and the modules inside it, by the model's names."""
    found: dict[str, torch.dtype] = {}
    for prefix, module in model.named_modules():
        for name, dtype in _NOTED.get(module, {}).items():
            # What an inner model was read from counts more than what the outer one saw.
            found[f"{prefix}.{name}" if prefix else name] = dtype
    return found
