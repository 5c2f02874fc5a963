"""Parameter groups: which saved group is which, and what may be taken from it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from shardplug.checkpoint.format.safe_names import shown
from shardplug.checkpoint.state.tensor_names import listed
from shardplug.errors import CheckpointError

__all__ = ["OWN_OPTIONS", "check_class", "check_option", "fitted_option", "match_groups"]

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
    *,
    strict: bool = True,
) -> list[Mapping[str, Any] | None]:
    """Find the saved group for each group of the optimizer; None for groups added since.

    Groups are matched by the parameters they hold: first those that hold the same, then those that
    share some, in the same place before others; empty groups by their place.

    Args:
        optimizer: The optimizer.
        names: Its parameters' names.
        saved: The checkpoint's groups, with the names used here.
        strict: Refuse saved groups that match none; False leaves them out.

    Raises:
        CheckpointError: With `strict`, when the optimizer has fewer groups, or groups of other
            parameters.
    """
    held = [{names[p] for p in group["params"]} for group in optimizer.param_groups]
    theirs = [set(group["params"]) for group in saved]
    found = _pair_groups(held, theirs)
    left = [number for number in range(len(saved)) if number not in found.values()]
    if strict and left:
        _refuse(type(optimizer).__name__, held, theirs, left[0])
    return [saved[found[index]] if index in found else None for index in range(len(held))]


def _pair_groups(held: Sequence[set[str]], theirs: Sequence[set[str]]) -> dict[int, int]:
    """Return the number of the saved group for each of the optimizer's that has one."""
    found: dict[int, int] = {}

    def free() -> list[int]:
        return [number for number in range(len(theirs)) if number not in found.values()]

    def same(index: int) -> list[int]:
        alike = [n for n in free() if theirs[n] == held[index]]
        # Empty groups, and groups that hold the same, are told apart by their places alone.
        return [index] if index in alike else alike if held[index] and len(alike) == 1 else []

    def sharing_in_place(index: int) -> list[int]:
        return [n for n in free() if n == index and held[index] & theirs[n]]

    def sharing(index: int) -> list[int]:
        sizes = {n: len(held[index] & theirs[n]) for n in free()}
        most = max(sizes.values(), default=0)
        best = [n for n, size in sizes.items() if size == most]
        return best if most and len(best) == 1 else []

    def empty_in_place(index: int) -> list[int]:
        return [n for n in free() if n == index and not (held[index] and theirs[n])]

    for choose in (same, sharing_in_place, sharing, empty_in_place):
        for index in range(len(held)):
            if index not in found:
                found.update((index, number) for number in choose(index))
    return found


def _refuse(
    kind: str, held: Sequence[set[str]], theirs: Sequence[set[str]], number: int
) -> NoReturn:
    leave_out = "use strict=False to leave out those that it lacks"
    if len(theirs) > len(held):
        raise CheckpointError(
            f"Expected at most {len(held)} parameter groups, as {kind} has, got {len(theirs)} in "
            "the checkpoint: add the groups that were added during training before loading, or "
            f"{leave_out}."
        )
    raise CheckpointError(
        f"Expected parameter group {number} to hold the parameters it was saved with, but the "
        f"checkpoint has {listed(sorted(theirs[number]), 3)} there and the optimizer "
        f"{listed(sorted(held[number]), 3)}: build the groups that were saved, or {leave_out}."
    )


def check_option(key: str, current: Any, value: Any) -> None:
    """Refuse what `fitted_option` could not put in the place of a number or a tensor.

    Raises:
        CheckpointError: For text, containers, and tensors of another size.
    """
    if not isinstance(current, (int, float, torch.Tensor)):
        return
    fits = isinstance(value, (int, float)) or (value is None and not torch.is_tensor(current))
    if isinstance(value, torch.Tensor):
        fits = not isinstance(current, torch.Tensor) or value.shape in (current.shape, ())
    if not fits:
        raise CheckpointError(
            f"Expected option {key} of the optimizer to be like {shown(current)}, which it has "
            f"here, but the checkpoint has {shown(value)}."
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
