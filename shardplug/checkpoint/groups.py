"""Parameter groups: which saved group is which, and what may be taken from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardplug.checkpoint.names import listed
from shardplug.errors import CheckpointError

__all__ = ["OWN_OPTIONS", "check_class", "fitted_option", "match_groups"]

OWN_OPTIONS = ("params", "param_names")
"""Options of a group that belong to the optimizer at hand, not to the checkpoint."""


def check_class(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Refuse the state of an optimizer of another class, unless it has all options of this one.

    Raises:
        CheckpointError: Naming both classes.
    """
    saved, kind = state.get("class"), type(optimizer).__name__
    if saved is None or saved == kind:
        return
    lacking = sorted(
        {key for group in state["param_groups"] for key in optimizer.defaults if key not in group}
    )
    if lacking:
        raise CheckpointError(
            f"Expected state of {kind}, got that of {saved}, which has no {listed(lacking)}. Build "
            f"the optimizer that was saved, or load the weights alone."
        )
    warnings.warn(
        f"The checkpoint's optimizer is {saved}; its state and options go into {kind}.",
        UserWarning,
        stacklevel=3,
    )


def match_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Sequence[Mapping[str, Any]],
) -> list[Mapping[str, Any] | None]:
    """Find the saved group for each group of the optimizer; None for groups added since.

    Raises:
        CheckpointError: When the optimizer has fewer groups, or groups of other parameters.
    """
    if len(saved) > len(optimizer.param_groups):
        raise CheckpointError(
            f"Expected at most {len(optimizer.param_groups)} parameter groups, as "
            f"{type(optimizer).__name__} has, got {len(saved)} in the checkpoint: add the groups "
            "that were added during training before loading."
        )
    return [
        _matching(index, {names[p] for p in group["params"]}, saved)
        for index, group in enumerate(optimizer.param_groups)
    ]


def _matching(
    index: int, held: set[str], saved: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    if index < len(saved) and set(saved[index]["params"]) == held:
        return saved[index]
    same = [group for group in saved if held and set(group["params"]) == held]
    if len(same) == 1:
        return same[0]
    if index >= len(saved):
        return None  # a group added since: it keeps its own options
    theirs = set(saved[index]["params"])
    if not held or not theirs or held & theirs:
        return saved[index]
    raise CheckpointError(
        f"Expected parameter group {index} to hold the parameters it was saved with, but the "
        f"checkpoint has {listed(sorted(theirs), 3)} there and the optimizer "
        f"{listed(sorted(held), 3)}."
    )


def fitted_option(current: Any, value: Any) -> Any:
    """Return a group option for the optimizer at hand; a tensor it holds stays the same tensor."""
    if isinstance(current, torch.Tensor):
        return current.copy_(torch.as_tensor(value))
    if isinstance(value, torch.Tensor):
        if isinstance(current, (int, float)) and value.numel() == 1:
            return type(current)(value.item())
        return value.detach().clone()
    return value
