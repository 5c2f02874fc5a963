"""What a plan needs to know of a run, read from the engine that runs it.

`place` in `layout` foresees what `ZeroEngine.shard` will do; here it is done, and the units, the
dtypes and the optimizers are read as they are. Models that were frozen in part, given adapters or
sharded with `child_units` are laid out as they train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardplug.config import ZeroConfig
from shardplug.core._torch.groups import sharded_of_gathered, unit_groups
from shardplug.core.precision import Precision
from shardplug.core.stage import STAGES
from shardplug.engine.engine import ZeroEngine
from shardplug.errors import ModelError
from shardplug.plan.sizes.layout import ROOT, Layout, ParameterPlan, Placed, UnitLayout
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind
from shardplug.plan.sizes.optimizer_probe import kind_of
from shardplug.plan.timeline import Setup

__all__ = ["optimizer_bytes", "placed_as_sharded", "setup_of", "trained_model"]


def placed_as_sharded(model: nn.Module, config: ZeroConfig) -> Placed:
    """Lay a sharded model out by the units that it has.

    Args:
        model: A model that an engine sharded, between two windows: every parameter is its shard.
        config: The engine's configuration.

    Raises:
        ModelError: When parameters are gathered at the moment.
    """
    if any(id(p) in sharded_of_gathered(model) for p in model.parameters()):
        raise ModelError(
            "Expected every parameter to be its shard, got gathered ones: plan between two windows."
        )
    precision = Precision.of(config)
    named = dict(model.named_parameters())
    numbers = {id(parameter): index for index, parameter in enumerate(named.values())}
    owned: dict[nn.Module, list[int]] = {model: []}
    for _, group in unit_groups(model):
        mine = owned.setdefault(group.modules[0], [])
        mine += [numbers[id(param.sharded_param)] for param in group.fsdp_params]
    sharded = {index for mine in owned.values() for index in mine}
    order = [(name, m) for name, m in model.named_modules() if m is model or owned.get(m)]
    blocks = _blocks(model, [m for _, m in order], config)
    layout = Layout(
        parameters=tuple(
            _parameter(name, p, precision, index in sharded)
            for index, (name, p) in enumerate(named.items())
        ),
        units=tuple(
            UnitLayout(name or ROOT, tuple(owned[module]), module in blocks)
            for name, module in order
        ),
        replicated=tuple(index for index in range(len(named)) if index not in sharded),
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        reduce=(
            None if precision.reduce_dtype == precision.param_dtype else precision.reduce_dtype
        ),
    )
    modules = tuple(module for _, module in order)
    return Placed(layout, modules, tuple(named.values()), tuple(m for m in modules if m in blocks))


def _parameter(
    name: str, parameter: nn.Parameter, precision: Precision, sharded: bool
) -> ParameterPlan:
    low = precision.param_dtype
    cast = sharded and low is not None and parameter.is_floating_point()
    return ParameterPlan(
        name=name,
        shape=tuple(parameter.shape),
        trainable=parameter.requires_grad,
        master=parameter.dtype,
        compute=low if cast and low is not None else parameter.dtype,
        sharded=sharded,
    )


def _blocks(model: nn.Module, units: Sequence[nn.Module], config: ZeroConfig) -> set[nn.Module]:
    """The repeated blocks among the units: named ones, or those whose class occurs twice."""
    kinds = [type(unit) for unit in units if unit is not model]
    if config.units != "auto":
        return {u for u in units if type(u).__name__ in config.units}
    return {u for u in units if u is not model and kinds.count(type(u)) > 1}


def trained_model(engine: ZeroEngine) -> nn.Module:
    """Return the one model that optimizers train.

    Raises:
        ModelError: When there is none, or several.
    """
    steps = {id(p) for o in engine.optimizers for g in o.param_groups for p in g["params"]}
    trained = [m for m in engine.models if any(id(p) in steps for p in m.parameters())]
    if len(trained) != 1:
        raise ModelError(
            f"Expected one model that the prepared optimizers train, got {len(trained)}: steps "
            "that train several models have no schedule that is known beforehand."
        )
    return trained[0]


def setup_of(
    engine: ZeroEngine, *, shard: int, accumulate: int, grads_kept_through_forward: bool
) -> Setup:
    """Return what a walk needs besides model and trace.

    Args:
        engine: The engine.
        shard: Which shard is planned.
        accumulate: Micro-batches of an optimizer step.
        stale_gradients: Whether `zero_grad` comes between forward and backward.
    """
    config = engine.config
    kinds = [kind_of(optimizer, group) for optimizer, group in _groups(engine)]
    return Setup(
        stage=STAGES[config.stage],
        shards=engine.shard_size,
        replicas=engine.world_size // engine.shard_size,
        shard=shard,
        accumulate=accumulate,
        prefetch=config.prefetch,
        device="cpu" if engine.device.type == "cpu" else "cuda",
        # Of several kinds the hungriest; the bytes of their state are counted one by one.
        optimizer=max(kinds, key=lambda kind: (kind.work, kind.tensors), default=OptimizerKind()),
        grads_kept_through_forward=grads_kept_through_forward,
        state_tier=config.offload_optimizer,
        params_tier=config.offload_params,
    )


def optimizer_bytes(engine: ZeroEngine, placed: Placed, shard: int) -> int:
    """Bytes of one shard's optimizer state, as each group's class keeps it.

    Parameters that no group holds have none, and those held by groups of different classes differ.
    """
    plans = {
        id(p): plan for p, plan in zip(placed.parameters, placed.layout.parameters, strict=True)
    }
    total = 0
    for optimizer, group in _groups(engine):
        kind = kind_of(optimizer, group)
        for parameter in group["params"]:
            plan = plans.get(id(parameter))
            if plan is not None and parameter.requires_grad:
                total += kind.state_bytes(plan.own(engine.shard_size, shard), plan.master)
    return total


def _groups(engine: ZeroEngine) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    return [(o, group) for o in engine.optimizers for group in o.param_groups]
