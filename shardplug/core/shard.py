"""Applies the plan: fills, upcasts and shards a model unit by unit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from shardplug.core._torch.resharding import set_gather_ahead
from shardplug.core.own_class import keep_class_name
from shardplug.core.precision import Precision
from shardplug.core.stage import Stage
from shardplug.core.units import UnitPlan
from shardplug.core.weights.fill import WeightMaterializer, check_same_model
from shardplug.core.weights.sources import deferred_in
from shardplug.errors import ModelError

__all__ = ["Sharding", "refuse_unshardable", "shard_model"]

_QUANTISED = frozenset({"Params4bit", "Int8Params", "NF4Tensor", "HQQTensor", "QTensor"})
"""Classes of parameters of bitsandbytes, torchao's older ones, HQQ and quanto."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an engine shards its models."""

    mesh: DeviceMesh
    stage: Stage
    precision: Precision
    device: torch.device
    prefetch: int
    on_cpu: bool
    """Whether shards and gradients stay in CPU memory beside another device."""


def refuse_unshardable(model: nn.Module) -> None:
    """Refuse models that something else already wraps or shards.

    Raises:
        ModelError: Naming the module or parameter.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"Expected a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ModelError(
                f"Expected the bare model, got {name or 'a model'} inside {kind}: pass the module "
                "it wraps, shardplug reduces the gradients itself."
            )
        if isinstance(module, FSDPModule) or kind == "FullyShardedDataParallel":
            raise ModelError(
                f"Expected an unsharded model, but {name or 'the model'} ({kind}) is sharded "
                "already. Take the fully_shard / FSDP call out."
            )
        if kind == "OptimizedModule":
            if name:
                raise ModelError(
                    f"Expected layers that are not wrapped by torch.compile(), got {name}. Compile "
                    "the layer in place instead: layer.compile()."
                )
            raise ModelError(
                "Expected a model that is not compiled as a whole, got one from torch.compile(). "
                "Compile its blocks instead: for block in blocks: block.compile()."
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"Expected dense gradients, got {name or 'the model'} ({kind}) with sparse=True: "
                "sparse gradients cannot be reduced over ranks by rows. Build it with sparse=False."
            )
    _refuse_quantised(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ModelError(f"Expected plain parameters, but {name} is a DTensor already.")
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ModelError(
                f"Expected initialised parameters, but {name} is lazy: run one forward first."
            )


def _refuse_quantised(model: nn.Module) -> None:
    """Refuse weights in 4 or 8 bits, whose scales are kept beside them and are not rows of theirs.

    An integer parameter by itself is data, and is sharded as it is.
    """
    advice = (
        "the scales of its blocks could not be split with its rows. Load the model without "
        "quantization_config, in bf16: frozen, it takes 2 bytes a parameter over all ranks."
    )
    for name, parameter in model.named_parameters():
        names = {kind.__name__ for kind in type(parameter).__mro__}
        kept_beside = any(hasattr(parameter, extra) for extra in ("quant_state", "SCB"))
        # torchao has a class per format (Int8Tensor, Float8Tensor), and new ones with each release.
        by_torchao = any(kind.__module__.startswith("torchao.") for kind in type(parameter).__mro__)
        if (
            kept_beside
            or by_torchao
            or names & _QUANTISED
            or any("Quantized" in one for one in names)
        ):
            raise ModelError(
                f"Expected weights of an ordinary dtype, got {name or 'a parameter'} quantised "
                f"({type(parameter).__name__}): {advice}"
            )
    for name, module in model.named_modules():
        if getattr(module, "is_quantized", False) is True:
            method = getattr(module, "quantization_method", None) or "by transformers"
            if getattr(method, "value", method) == "gguf":
                continue  # transformers reads such files into ordinary weights
            raise ModelError(
                f"Expected weights of an ordinary dtype, got {name or 'a model'} "
                f"({type(module).__name__}) quantised ({getattr(method, 'value', method)}): "
                f"{advice}"
            )


def shard_model(
    model: nn.Module,
    plan: UnitPlan,
    sharding: Sharding,
    *,
    cast_inputs: bool,
    forward_methods: Sequence[str],
    on_unit: Callable[[nn.Module], None],
) -> None:
    """Shard `model` in place. All ranks take part; peak memory is the shards plus one unit.

    `on_unit` is called with each unit once its shards have their values, or nearly: a shard that
    is read from files and shared with a later unit gets them with that one.
    """
    device, stage, precision = sharding.device, sharding.stage, sharding.precision
    rest = CPUOffloadPolicy() if sharding.on_cpu and device.type != "cpu" else OffloadPolicy()
    waiting = deferred_in(model)
    check_same_model(model, waiting=waiting)
    _warn_low_masters(model, precision)
    filler = WeightMaterializer(model, device, waiting, whole=plan.replicated)
    done: set[nn.Module] = set()
    for unit in (*plan.modules, model):
        inside = [module for module in unit.modules() if module not in done]
        done.update(inside)
        filler.fill(inside)
        _upcast_masters(inside, precision)
        ignored = {filler.current(parameter) for parameter in plan.replicated}
        if unit is not model:
            ignored |= {filler.current(parameter) for parameter in plan.moved_up}
        fully_shard(
            unit,
            mesh=sharding.mesh,
            # The root is resharded by the engine at the end of the outermost call.
            reshard_after_forward=stage.reshard_after_forward and unit is not model,
            mp_policy=precision.policy(
                cast_inputs=cast_inputs or unit is not model,
                complex_weights=_trains_complex(inside, ignored),
            ),
            ignored_params=ignored,
            offload_policy=rest,
        )
        keep_class_name(unit)
        filler.release(inside)
        filler.fill_shards()
        on_unit(unit)
    filler.finish()
    for name in forward_methods:
        if not callable(getattr(model, name, None)):
            raise ModelError(f"Expected {type(model).__name__} to have a method {name!r}.")
        register_fsdp_forward_method(model, name)
    _gather_ahead(model, plan, device, sharding.prefetch)


def _upcast_masters(modules: list[nn.Module], precision: Precision) -> None:
    if not precision.keeps_masters:
        return
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter.is_floating_point():
                parameter.data = parameter.data.float()


def _trains_complex(modules: list[nn.Module], ignored: set[nn.Parameter]) -> bool:
    own = {p for module in modules for p in module.parameters(recurse=False)} - ignored
    return any(p.is_complex() and p.requires_grad for p in own)


def _warn_low_masters(model: nn.Module, precision: Precision) -> None:
    if precision.keeps_masters:
        return
    low = sorted(
        {
            str(p.dtype)
            for p in model.parameters()
            if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)
        }
    )
    if low and dist.get_rank() == 0:
        warnings.warn(
            f"Training keeps no fp32 master weights: trainable parameters are {', '.join(low)}. "
            "Updates smaller than half a unit in the last place are lost. Use bf16 mixed "
            "precision (param_dtype=bf16) to keep fp32 masters.",
            UserWarning,
            stacklevel=4,
        )


def _gather_ahead(model: nn.Module, plan: UnitPlan, device: torch.device, prefetch: int) -> None:
    if prefetch < 1:
        for unit in (*plan.modules, model):
            if isinstance(unit, FSDPModule):
                # Without a list FSDP2 gathers the unit whose forward ended before this one's.
                unit.set_modules_to_backward_prefetch([unit])
        return
    if device.type == "cpu":
        set_gather_ahead(model)
    blocks: list[FSDPModule] = [b for b in plan.blocks if isinstance(b, FSDPModule)]
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + prefetch])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - prefetch) : index][::-1])
