"""Optimizer state by parameter name. Reading it never changes it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.state.model_state import local_rows
from shardplug.checkpoint.state.param_groups import (
    OWN_OPTIONS,
    check_class,
    check_option,
    fitted_option,
    match_groups,
)
from shardplug.checkpoint.state.tensor_names import clean_name, listed
from shardplug.core._torch.resharding import reshard_all
from shardplug.core.quantised import own_form
from shardplug.errors import CheckpointError

__all__ = [
    "load_optimizer",
    "models_of",
    "parameter_names",
    "state_of_optimizer",
    "warn_left_out",
]

_LIKE_PARAMETER = frozenset(
    "exp_avg exp_avg_sq max_exp_avg_sq momentum_buffer square_avg acc_delta grad_avg sum exp_inf "
    "prev ax".split()
)
"""State of torch's optimizers that always has its parameter's shape."""


def models_of(models: Any) -> list[nn.Module]:
    """Return the models of an engine, a model, or a sequence of models."""
    if isinstance(models, nn.Module):
        return [models]
    return list(getattr(models, "models", models))


def parameter_names(models: Any) -> dict[nn.Parameter, str]:
    """Name every parameter of one or several models.

    Args:
        models: An engine, a model, or a sequence of models. Names of the second and later models
            begin with "model<i>::".
    """
    names: dict[nn.Parameter, str] = {}
    for index, model in enumerate(models_of(models)):
        if isinstance(model, FSDPModule):
            reshard_all(model)
        for name, parameter in model.named_parameters():
            names.setdefault(parameter, (f"model{index}::" if index else "") + clean_name(name))
    return names


def state_of_optimizer(models: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's state and groups, keyed by parameter name.

    Parameters that have no state yet (before the first step, or never used) are left out.

    Args:
        models: The engine, model or models that own the parameters.
        optimizer: A torch optimizer over them.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{"params": [names], option: value}],
        "class": name of the optimizer's class}`; tensors share memory with the optimizer.

    Raises:
        CheckpointError: When the optimizer holds a parameter that no model owns, or state that
            belongs to no parameter.
    """
    kind = type(optimizer).__name__
    names = parameter_names(models)
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        held = []
        for parameter in group["params"]:
            if parameter not in names:
                raise CheckpointError(
                    f"Expected the optimizer's parameters to be the models', but group {index} of "
                    f"{kind} holds another one, of shape {tuple(parameter.shape)}."
                )
            held.append(names[parameter])
        options = {key: value for key, value in group.items() if key not in OWN_OPTIONS}
        groups.append({**options, "params": held})
    _refuse_what_has_no_name(optimizer, names)
    state = {
        names[parameter]: dict(values)  # type: ignore[index]  # a Parameter, just checked
        for parameter, values in optimizer.state.items()
    }
    return {"state": state, "param_groups": groups, "class": kind}


def _refuse_what_has_no_name(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]
) -> None:
    kind = type(optimizer).__name__
    for key in optimizer.state:
        if key not in names:
            what = f"a tensor of shape {tuple(key.shape)}" if hasattr(key, "shape") else repr(key)
            raise CheckpointError(
                f"Expected the state of {kind} to belong to the models' parameters, but some is "
                f"kept for {what}, which no model owns: it could not be restored by name."
            )
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        more = sorted(set(optimizer.state_dict()) - {"state", "param_groups"}, key=str)
        if more:
            raise CheckpointError(
                f"Expected the state of {kind} to be `state` and `param_groups`, but its "
                f"state_dict() also has {listed(map(str, more))}, which would be lost. Keep it in "
                "the parameters' state or in the groups' options."
            )


def load_optimizer(
    models: Any,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    copy: bool = True,
    strict: bool = True,
) -> None:
    """Give an optimizer the state and group options in `state`.

    Nothing is changed if a check fails.

    Args:
        models: The engine, model or models that own the parameters.
        optimizer: A torch optimizer over them.
        state: As returned by `state_of_optimizer`; tensors may be whole, and parameters may
            be numbered (as in `torch.optim.Optimizer.state_dict()`) instead of named.
        copy: False lets the optimizer keep tensors of `state` that fit as they are, which saves
            memory when nobody else uses them.
        strict: Refuse groups that the optimizer lacks; False leaves them out.

    Raises:
        CheckpointError: When groups or shapes do not match.
    """
    names = parameter_names(models)
    check_class(optimizer, state)
    state = _named(optimizer, names, state)
    matched = match_groups(optimizer, names, state["param_groups"], strict=strict)
    saved = dict(state["state"])
    if type(optimizer).__module__.startswith("torch.optim"):
        _check_shapes(names, saved)
    for group, found in zip(optimizer.param_groups, matched, strict=True):
        for key, value in (found or {}).items():
            check_option(key, group.get(key), value)
    placed: dict[torch.Tensor, dict[str, Any]] = {}
    for index, group in enumerate(optimizer.param_groups):
        options = {**group, **(matched[index] or {})}
        for parameter in group["params"]:
            values = saved.pop(names[parameter], None)
            if values is not None:
                placed[parameter] = {
                    key: own_form(
                        optimizer, parameter, key, _place(key, value, parameter, options, copy)
                    )
                    for key, value in values.items()
                }
    for group, found in zip(optimizer.param_groups, matched, strict=True):
        for key, value in (found or {}).items():
            if key not in OWN_OPTIONS:
                group[key] = fitted_option(group.get(key), value)
    optimizer.state.clear()
    optimizer.state.update(placed)
    # As torch's own load_state_dict does: the class brings state of older versions up to date.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
    warn_left_out(optimizer, saved)


def warn_left_out(optimizer: torch.optim.Optimizer | None, names: Mapping[str, Any]) -> None:
    """Say which state of a checkpoint no parameter of the optimizer takes."""
    if names and optimizer is not None:
        warnings.warn(
            f"The checkpoint has optimizer state for {listed(sorted(names), 5)}, which "
            f"{type(optimizer).__name__} does not train: it is left out.",
            UserWarning,
            stacklevel=3,
        )


def _named(
    optimizer: torch.optim.Optimizer,
    names: Mapping[nn.Parameter, str],
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Turn parameter numbers into names, by the order of the optimizer's groups."""
    numbers = [n for group in state["param_groups"] for n in group["params"]]
    if not any(isinstance(number, int) for number in numbers):
        return {"state": state["state"], "param_groups": list(state["param_groups"])}
    held = [names[p] for group in optimizer.param_groups for p in group["params"]]
    if len(held) != len(numbers):
        raise CheckpointError(
            f"Expected state for the {len(held)} parameters of {type(optimizer).__name__}, "
            f"got state for {len(numbers)}."
        )
    by_number = dict(zip(numbers, held, strict=True))
    return {
        "state": {by_number[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": [by_number[number] for number in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def _check_shapes(
    names: Mapping[nn.Parameter, str], saved: Mapping[str, Mapping[str, Any]]
) -> None:
    for parameter, name in names.items():
        for key, value in saved.get(name, {}).items():
            if key not in _LIKE_PARAMETER or value is None:  # SGD had None before a first step
                continue
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                is_tensor = isinstance(value, torch.Tensor)
                found = tuple(value.shape) if is_tensor else f"a {type(value).__name__}"
                raise CheckpointError(
                    f"Expected optimizer state {key} of {name} to be a tensor of the parameter's "
                    f"shape {tuple(parameter.shape)}, got {found}."
                )


def _place(
    key: str,
    value: Any,
    parameter: nn.Parameter,
    options: Mapping[str, Any],
    copy: bool,
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    if isinstance(value, DTensor):
        if isinstance(parameter, DTensor) and value.device_mesh == parameter.device_mesh:
            return value.clone() if copy else value
        value, copy = value.full_tensor(), False
    if isinstance(parameter, DTensor) and value.shape == parameter.shape:
        return DTensor.from_local(
            local_rows(value, parameter).to(parameter.device, copy=True),
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    if key == "step" and not (options.get("capturable") or options.get("fused")):
        return value.to("cpu", copy=copy)  # torch keeps the counter on the CPU
    return value.to(parameter.device, copy=copy)
