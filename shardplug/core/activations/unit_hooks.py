"""Tells an offload of activations which unit of a model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.held_tensors import gathered_storages
from shardplug.core.activations.activation_offload import ActivationOffload
from shardplug.core.hooks import outside_of_graphs
from shardplug.errors import ModelError

__all__ = ["follow_model"]


def follow_model(
    offload: ActivationOffload, units: Iterable[nn.Module], blocks: Sequence[nn.Module]
) -> None:
    """Tell an offload of a model's units as they run.

    Args:
        offload: What is told.
        units: Sharded modules, whose gathered parameters stay.
        blocks: The repeated ones, in forward order.

    Raises:
        ModelError: When the model has no repeated blocks.
    """
    if not blocks:
        raise ModelError(
            "Expected repeated blocks to offload the activations of, found none. Name their class "
            "in `units`, or leave offload_activations out."
        )
    repeated, gathered = set(blocks), set(units)
    for unit in gathered | repeated:
        if unit in repeated:
            unit.register_forward_hook(_leaving(offload, unit is blocks[-1]))
        entering = _entering(offload, is_block=unit in repeated, is_gathered=unit in gathered)
        unit.register_forward_pre_hook(entering)


def _entering(
    offload: ActivationOffload, *, is_block: bool, is_gathered: bool
) -> Callable[..., None]:
    def hook(unit: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if is_gathered:
            offload.keep(gathered_storages(unit))
        if is_block:
            offload.enter_block()

    return outside_of_graphs(hook)


def _leaving(offload: ActivationOffload, is_last: bool) -> Callable[..., None]:
    def hook(unit: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            offload.leave_block(is_last)

    return outside_of_graphs(hook)
