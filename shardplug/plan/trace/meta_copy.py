"""A model's structure without its weights, kept to be traced when the model itself is sharded."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.tensors import TorchDispatchMode

__all__ = ["NoCollectives", "shapes_of", "meta_copy"]

_PLAIN = (int, float, str, bool, complex, type(None), torch.dtype, torch.device)
_FROM_A_TRAINER = ("_trainer", "_fabric")  # what logs and steps in a training_step
_SAYING = ("log", "log_dict", "print")


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where an operation would talk to other ranks, who are not listening."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of this rank alone."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError(f"{func} would wait for other ranks")
        return func(*args, **(kwargs or {}))


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model's modules; their parameters and buffers are on meta, all else is shared.

    Takes milliseconds and next to no memory, and leaves the model as it is. The copy is for
    traces only.

    Args:
        model: The model, before it is sharded.
    """
    return _Copier().copy(model)


class _Copier:
    def __init__(self) -> None:
        self._modules: dict[int, nn.Module] = {}
        self._tensors: dict[int, torch.Tensor] = {}

    def copy(self, module: nn.Module) -> nn.Module:
        known = self._modules.get(id(module))
        if known is not None:
            return known
        kind = type(module)
        new = self._modules[id(module)] = kind.__new__(kind)
        attributes = dict(vars(module))
        for name in ("_parameters", "_buffers"):
            attributes[name] = {
                key: None if tensor is None else self._on_meta(tensor)
                for key, tensor in attributes[name].items()
            }
        attributes["_modules"] = {
            key: None if child is None else self.copy(child)
            for key, child in attributes["_modules"].items()
        }
        vars(new).update(attributes)
        for key, value in attributes.items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            vars(new)[key] = None if key in _FROM_A_TRAINER else self._followed(value, module, new)
        if not vars(new).keys().isdisjoint(_FROM_A_TRAINER):  # they would warn that it is gone
            vars(new).update(dict.fromkeys(_SAYING, _nothing))
        return new

    def _followed(self, value: Any, module: nn.Module, new: nn.Module) -> Any:
        """Let what points into the model point into its copy."""
        if isinstance(value, types.MethodType) and value.__self__ is module:
            return types.MethodType(value.__func__, new)
        if isinstance(value, nn.Module):
            return self.copy(value)
        if isinstance(value, torch.Tensor):
            return self._tensors.get(id(value), value)
        if type(value) in (list, tuple) and len(value) < 4096:
            return type(value)(
                self._followed(item, module, new)
                if isinstance(item, (nn.Module, torch.Tensor))
                else item
                for item in value
            )
        return value.copy() if isinstance(value, dict) else value  # registries of hooks

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self._tensors.get(id(tensor))
        if made is None:
            with torch.no_grad():
                made = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._tensors[id(tensor)] = made
        return made


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def shapes_of(value: Any) -> Any:
    """Replace tensors by tensors of the same shape without memory, and drop what is unknown.

    Attention masks become masks of ones: what a trace takes an unpadded batch to be.
    """
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {
            key: torch.ones(item.shape, dtype=item.dtype)
            if key == "attention_mask" and isinstance(item, torch.Tensor)
            else shapes_of(item)
            for key, item in value.items()
        }
    if isinstance(value, tuple) and type(value) not in (tuple, torch.Size):  # a named one
        return type(value)(*map(shapes_of, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(shapes_of, value))
    return value if isinstance(value, _PLAIN) else None
