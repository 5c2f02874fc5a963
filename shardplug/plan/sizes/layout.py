"""What is gathered together, and how large it is: the units of a model as plain sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from shardplug.core.precision import Precision
from shardplug.core.units import plan_units

__all__ = ["Layout", "ParameterPlan", "UnitLayout"]

ROOT = "the root"


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter: its shape and the dtypes it is kept, computed and reduced in."""

    name: str
    shape: tuple[int, ...]
    trainable: bool
    master: torch.dtype
    compute: torch.dtype
    sharded: bool
    """False for the few that are kept whole on every rank (no dimension, or no element)."""

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def padded(self, shards: int) -> int:
        """Elements of a shard as it is stored: rows are cut into chunks of equal size."""
        if not self.sharded:
            return self.numel
        return -(-self.shape[0] // shards) * math.prod(self.shape[1:])

    def own(self, shards: int, shard: int) -> int:
        """Elements of a shard that are the parameter's: the last shards have fewer, or none."""
        if not self.sharded:
            return self.numel
        rows, chunk = self.shape[0], -(-self.shape[0] // shards)
        return min(max(rows - shard * chunk, 0), chunk) * math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """One unit: the parameters that are gathered in one collective."""

    name: str
    parameters: tuple[int, ...]
    """Indices into the layout's parameters, in FSDP2's order: those of children come first."""
    block: bool
    """Whether it is one of the repeated blocks, whose activations can be recomputed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The units of a model, the root first, then in the order of its modules."""

    parameters: tuple[ParameterPlan, ...]
    units: tuple[UnitLayout, ...]
    replicated: tuple[int, ...]
    """Parameters that are in no unit."""
    buffer_bytes: int
    reduce: torch.dtype | None
    """dtype of the reduction where it is not the gradients' own."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def num_trainable(self) -> int:
        """Elements of the trainable parameters."""
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Indices of the units that are repeated blocks, in forward order."""
        return tuple(index for index, unit in enumerate(self.units) if unit.block)


@dataclass(frozen=True, slots=True)
class Placed:
    """A layout together with the objects of the model that it describes."""

    layout: Layout
    modules: tuple[nn.Module, ...]
    """The module of each unit."""
    parameters: tuple[nn.Parameter, ...]
    """The parameter object behind each parameter of the layout."""
    blocks: tuple[nn.Module, ...]


def place(
    model: nn.Module,
    units: Literal["auto"] | tuple[str, ...],
    precision: Precision,
    converted: torch.dtype | None = None,
) -> Placed:
    """Lay a model out as `ZeroEngine.shard` would, without changing it.

    Args:
        model: The whole model, on any device; only shapes are read.
        units: "auto", or class names, as in `ZeroConfig`.
        precision: dtypes of the run.
        converted: dtype that the whole module is converted to beforehand ("bf16-true").

    Raises:
        ModelError: When a unit cannot be formed.
    """
    masters = torch.float32 if precision.keeps_masters else converted
    plan = plan_units(model, units, master_dtype=masters)
    named = dict(model.named_parameters())
    numbers = {parameter: index for index, parameter in enumerate(named.values())}
    replicated = set(plan.replicated)
    owners: dict[nn.Module, list[int]] = {}
    done: set[nn.Module] = set()
    taken: set[nn.Parameter] = set()
    for unit in (*plan.modules, model):
        mine = owners.setdefault(unit, [])
        for module in _children_first(unit, done):
            for parameter in module.parameters(recurse=False):
                moved = unit is not model and parameter in plan.moved_up
                if parameter not in taken and parameter not in replicated and not moved:
                    taken.add(parameter)
                    mine.append(numbers[parameter])
    blocks = set(plan.blocks)
    order = [
        (name, module)
        for name, module in model.named_modules()
        if module is model or owners.get(module)
    ]
    layout = Layout(
        parameters=tuple(
            _parameter_plan(name, parameter, precision, converted, parameter not in replicated)
            for name, parameter in named.items()
        ),
        units=tuple(
            UnitLayout(name or ROOT, tuple(owners[module]), module in blocks)
            for name, module in order
        ),
        replicated=tuple(numbers[parameter] for parameter in plan.replicated),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        reduce=_reduce_dtype(precision),
    )
    return Placed(layout, tuple(m for _, m in order), tuple(named.values()), plan.blocks)


def _children_first(module: nn.Module, done: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules that are not done in the order in which FSDP2 takes their parameters."""
    if module not in done:
        done.add(module)
        for child in module.children():
            yield from _children_first(child, done)
        yield module


def _parameter_plan(
    name: str,
    parameter: nn.Parameter,
    precision: Precision,
    converted: torch.dtype | None,
    sharded: bool,
) -> ParameterPlan:
    floating = parameter.is_floating_point()
    dtype = converted if converted is not None and floating else parameter.dtype
    master = torch.float32 if precision.keeps_masters and parameter.requires_grad else dtype
    master = master if floating else dtype
    compute = precision.param_dtype if precision.param_dtype and floating and sharded else master
    return ParameterPlan(
        name, tuple(parameter.shape), parameter.requires_grad, master, compute, sharded
    )


def _reduce_dtype(precision: Precision) -> torch.dtype | None:
    return None if precision.reduce_dtype == precision.param_dtype else precision.reduce_dtype
