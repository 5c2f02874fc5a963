"""Keeps what is passed into a unit as it would be without sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shardplug.core._torch import leave_unused_inputs_alone, register_extra_outputs
from shardplug.core.hooks import outside_of_graphs

__all__ = ["UnitArguments"]


class UnitArguments:
    """Undoes two side effects of FSDP2's hook on the tensors that enter a unit.

    FSDP2 rebuilds the arguments around its own tensors. A list or dictionary that the forward
    fills (router logits of each layer, say) would be a copy, and the caller's would stay as it
    was: what the forward changed is carried over to the caller's. And an input that the unit
    does not use would get a gradient of zeros where it should get none.

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


def _before(calls: list[_Call]) -> Callable[..., None]:
    return outside_of_graphs(lambda _, args, kwargs: calls.append(_Call(args, kwargs)))


def _inside(calls: list[_Call]) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = calls[-1]
        for old, new in zip(call.given[0], args, strict=True):
            _pair(old, new, call.containers)
        for name, old in call.given[1].items():
            _pair(old, kwargs[name], call.containers)
        call.given = ((), {})
        if torch.is_grad_enabled():
            leave_unused_inputs_alone(args, kwargs)

    return outside_of_graphs(hook)


def _pair(old: Any, new: Any, found: list[tuple[Any, Any, dict[int, tuple[Any, Any]]]]) -> None:
    if old is new and not torch.is_grad_enabled():
        return
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        items = list(zip(old, new, strict=True))
    elif isinstance(old, dict) and isinstance(new, dict):
        items = [(old[key], new[key]) for key in old]
    elif hasattr(old, "__dataclass_fields__") and hasattr(old, "__dict__"):
        return _pair(vars(old), vars(new), found)
    else:
        return
    if not isinstance(old, tuple):
        found.append((old, new, {id(inner): (inner, outer) for outer, inner in items}))
    for outer, inner in items:
        _pair(outer, inner, found)


def _after(calls: list[_Call], resharded: bool) -> Callable[..., None]:
    def hook(unit: nn.Module, *_: Any) -> None:
        if not calls:  # the call was refused before it began
            return
        added: list[torch.Tensor] = []

        def carry(value: Any, entered: dict[int, tuple[Any, Any]]) -> Any:
            if id(value) in entered:
                return entered[id(value)][1]
            if isinstance(value, torch.Tensor) and value.requires_grad:
                added.append(value)
            return value

        for old, new, entered in calls.pop().containers:
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

    return outside_of_graphs(hook)
