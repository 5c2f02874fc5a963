"""What an optimizer of any class keeps for a parameter: found out by one step of a tiny one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.calls import uncompiled
from shardplug.errors import OptimizerError
from shardplug.plan.sizes.optimizer_kinds import OPTIMIZERS, OptimizerKind
from shardplug.plan.trace.meta_copy import NoCollectives

__all__ = ["kind_of", "likely_kind"]

_ROWS, _COLUMNS = 6, 5
_CHOICES = ("fused", "foreach", "capturable", "lr", "params")  # how it runs, not what it keeps


def kind_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> OptimizerKind:
    """Find out what an optimizer keeps for the parameters of a group.

    An optimizer of the same class and options steps a parameter of a few elements on the CPU, and
    its state is looked at. The work space of a step is known for the classes of `OPTIMIZERS`, and
    taken to be Adam's for others.

    Args:
        optimizer: The user's optimizer; it is not changed.
        group: One of its parameter groups.

    Raises:
        OptimizerError: When the class cannot be built from the options of its groups, or keeps
            something that is neither as large as the parameter nor small (factored moments).
    """
    kind = type(optimizer)
    takes = set(inspect.signature(kind).parameters)
    options = {k: v for k, v in group.items() if k in takes and k not in _CHOICES}
    parameter = nn.Parameter(torch.zeros(_ROWS, _COLUMNS))
    parameter.grad = torch.zeros_like(parameter)
    generator = torch.random.get_rng_state()
    try:
        if "lr" in takes:
            options["lr"] = float(group["lr"])  # a tensor may be on a device
        # Not every rank may be here, so nothing is sent. A step that the optimizer compiles by
        # itself (torchao's) is run as it is: compiled under a dispatch mode, the real steps fail.
        with uncompiled(), NoCollectives():  # type: ignore[no-untyped-call]
            probe = kind([parameter], **options)
            probe.step()
    except Exception as error:  # of a class that is not ours, on options read from its groups
        raise OptimizerError(
            f"Expected an optimizer that its groups' options build again, got {kind.__name__}, "
            f"which says {type(error).__name__}: {error}. Its state is not in the plan."
        ) from error
    finally:
        torch.random.set_rng_state(generator)
    tensors = counters = 0
    for value in probe.state[parameter].values():
        if not isinstance(value, torch.Tensor):
            continue
        if value.shape == parameter.shape:
            tensors += 1
        elif value.numel() == 1:
            counters += value.nbytes
        else:
            raise OptimizerError(
                f"Expected optimizer state as large as its parameter, got {tuple(value.shape)} of "
                f"{kind.__name__}: its size depends on the shapes. Its state is not in the plan."
            )
    names = [base.__name__.lower() for base in kind.__mro__]
    known = next((OPTIMIZERS[name] for name in names if name in OPTIMIZERS), OPTIMIZERS["adamw"])
    return replace(
        known,
        name=kind.__name__.lower(),
        tensors=tensors,
        counters=counters,
        fused=bool(group.get("fused")),
    )


def likely_kind(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Find out what an optimizer keeps, or take it to keep as Adam does where that fails.

    Args:
        optimizer: The optimizer; its first parameter group counts.
    """
    group = optimizer.param_groups[0]
    try:
        return kind_of(optimizer, group)
    except OptimizerError:
        return OptimizerKind(type(optimizer).__name__.lower(), fused=bool(group.get("fused")))
