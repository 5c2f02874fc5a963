"""Keeps what is passed into a unit as it would be without sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.calls import register_extra_outputs
from shardplug.core._torch.tensors import (
    base_of,
    share_memory,
    take_history,
    tree_leaves,
    tree_map,
    version_of,
)
from shardplug.core.hooks import outside_of_graphs

__all__ = ["UnitArguments"]


class UnitArguments:
    """Undoes the side effects of other tensors in the place of those that enter a unit.

    FSDP2 rebuilds the arguments around tensors of its own. A list or dictionary that the forward
    fills (router logits of each layer, say) would be a copy, and the caller's would stay as it
    was: what the forward changed is carried over to the caller's. A tensor that the forward
    changes in place shares the memory of the caller's, which gets its history. Where the unit
    returns a tensor that it was given, or a view of it, the caller gets its own.

    Args:
        units: The sharded modules.
        resharded: Whether units are gathered again in the backward, which may then enter them
            through the tensors put into a container.
    """

    def __init__(self, units: Iterable[nn.Module], *, resharded: bool) -> None:
        for unit in units:
            calls: list[_Call] = []
            unit.register_forward_pre_hook(_before(calls), prepend=True, with_kwargs=True)
            unit.register_forward_pre_hook(_inside(calls), with_kwargs=True)
            unit.register_forward_hook(_after(calls, resharded), always_call=True)


class _Call:
    """The containers of one call: the caller's, the unit's, and the unit's contents at entry."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.given = (args, kwargs)
        self.containers: list[tuple[Any, Any, dict[int, tuple[Any, Any]]]] = []
        self.tensors: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        """By id of the unit's tensor: the caller's, the unit's, and its version at entry."""

    def pair(self, old: Any, new: Any) -> None:
        """Note what stands in the unit for what the caller gave."""
        if old is new and not torch.is_grad_enabled():
            return
        if isinstance(old, torch.Tensor):
            if old is not new and new.requires_grad and share_memory(old, new):
                self.tensors[id(new)] = (old, new, version_of(new))
            return
        if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
            items = list(zip(old, new, strict=True))
        elif isinstance(old, dict) and isinstance(new, dict):
            items = [(old[key], new[key]) for key in old]
        elif hasattr(old, "__dataclass_fields__") and hasattr(old, "__dict__"):
            return self.pair(vars(old), vars(new))
        else:
            return
        if not isinstance(old, tuple):
            self.containers.append(
                (old, new, {id(inner): (inner, outer) for outer, inner in items})
            )
        for outer, inner in items:
            self.pair(outer, inner)

    def given_back(self, output: Any) -> Any:
        """Return the output with the caller's tensors in the place of the unit's."""
        for old, new, version in self.tensors.values():
            if version_of(new) != version:
                take_history(old, new)
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        if not any(id(t) in self.tensors or id(base_of(t)) in self.tensors for t in leaves):
            return output
        return tree_map(self._own, output)

    def _own(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self.tensors:
            return self.tensors[id(value)][0]
        if id(base_of(value)) in self.tensors:
            old = self.tensors[id(base_of(value))][0]
            return old.as_strided(value.shape, value.stride(), value.storage_offset())
        return value


def _before(calls: list[_Call]) -> Callable[..., None]:
    return outside_of_graphs(lambda _, args, kwargs: calls.append(_Call(args, kwargs)))


def _inside(calls: list[_Call]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = calls[-1]
        for old, new in zip(call.given[0], args, strict=True):
            call.pair(old, new)
        for name, old in call.given[1].items():
            call.pair(old, kwargs[name])
        call.given = ((), {})

    return outside_of_graphs(hook)


def _after(calls: list[_Call], resharded: bool) -> Callable[..., Any]:
    def hook(unit: nn.Module, args: Any, output: Any) -> Any:
        if not calls:  # the call was refused before it began
            return output
        call = calls.pop()
        added: list[torch.Tensor] = []

        def carry(value: Any, entered: dict[int, tuple[Any, Any]]) -> Any:
            if id(value) in entered:
                return entered[id(value)][1]
            if isinstance(value, torch.Tensor) and value.requires_grad:
                added.append(value)
            return value

        for old, new, entered in call.containers:
            if isinstance(old, list):
                old[:] = [carry(value, entered) for value in new]
                continue
            for key in [key for key in old if key not in new]:
                del old[key]
            for key, value in new.items():
                value = carry(value, entered)
                if key not in old or old[key] is not value:
                    old[key] = value
        if resharded and torch.is_grad_enabled():
            register_extra_outputs(unit, added)
        return call.given_back(output) if call.tensors else output

    return outside_of_graphs(hook)
