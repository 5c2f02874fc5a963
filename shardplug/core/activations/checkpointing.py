"""Activation checkpointing of the repeated blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplug.core._torch.tensors import tree_leaves, version_of
from shardplug.core.gathered.whole_parameters import is_whole
from shardplug.errors import ModelError

__all__ = ["checkpoint_activations"]


def checkpoint_activations(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Recompute each block's activations in the backward.

    Hugging Face models switch on their own implementation, which also turns the key-value cache
    off in training; other blocks have their forward wrapped. Either way the gather hooks stay
    outside, so the backward gathers once.

    Raises:
        ModelError: When the model has no repeated blocks.
    """
    blocks = list(blocks)
    if not blocks:
        raise ModelError(
            "Expected repeated blocks to checkpoint the activations of, found none in "
            f"{type(model).__name__}. Name their class in `units`."
        )
    covered: set[nn.Module] = set()
    for module in model.modules():
        if module not in covered and getattr(module, "supports_gradient_checkpointing", False):
            _enable_own(module)
            covered.update(module.modules())
    for block in blocks:
        if block not in covered:
            block.forward = _recomputed(block, block.forward)


def _enable_own(model: nn.Module) -> None:
    # transformers 5.24 renamed it, and warns about the old name.
    for kind in ("activation", "gradient"):
        enable = getattr(model, f"{kind}_checkpointing_enable", None)
        if callable(enable):
            enable(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
            return
    raise ModelError(
        f"Expected {type(model).__name__} to have activation_checkpointing_enable(), as it says "
        "that it supports checkpointing."
    )


def _recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The backward may run after whole parameters are gone, and nothing gathers in here.
        if not torch.is_grad_enabled() or is_whole(block):
            return forward(*args, **kwargs)
        given = [(v, version_of(v)) for v in tree_leaves((args, kwargs)) if torch.is_tensor(v)]
        output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
        if any(version_of(tensor) != version for tensor, version in given):
            raise ModelError(
                f"Expected {type(block).__name__} to leave its inputs as they are, as it is "
                "computed again from them, but its forward changes one in place. Change a copy, "
                "or leave activation_checkpointing out."
            )
        return output

    return call
