"""FSDP2's parameter groups, and the parameters in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "CONVERT_BEFORE",
    "changed_layout",
    "compute_dtype",
    "elements_before",
    "gathered_copy",
    "gathered_memory",
    "gathered_units",
    "groups_of",
    "is_stood_in",
    "label_of",
    "lazy_init_root",
    "managed_parameters",
    "named_managed_parameters",
    "own_groups",
    "own_rows",
    "owns_any",
    "param_groups",
    "parameters_of_fsdp",
    "places_of",
    "refresh_dtypes",
    "renew_shard",
    "replaced_parameters",
    "replicas_of",
    "resting_layouts",
    "sharded_of_gathered",
    "unit_groups",
]

CONVERT_BEFORE = (
    "Convert a model before it is sharded; to compute in less than fp32 use precision= (Lightning, "
    'Fabric), mixed_precision (Accelerate) or ZeroConfig(param_dtype="bf16").'
)
"""What a user does instead of converting a sharded model."""


def param_groups(root: nn.Module) -> Iterator[Any]:
    for state in _unit_states(root):
        yield from groups_of(state)


def _unit_states(root: nn.Module) -> Iterable[Any]:
    if isinstance(root, FSDPModule):
        state = root._get_fsdp_state()
        if state._is_root:  # once it has run, it has a list of the modules' states
            return state._state_ctx.all_states
    modules = (module for module in root.modules() if isinstance(module, FSDPModule))
    return {id(state): state for state in (m._get_fsdp_state() for m in modules)}.values()


def groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch < 2.13


def managed_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return every sharded parameter, in a fixed order, whatever is registered at the moment."""
    return [p.sharded_param for group in param_groups(root) for p in group.fsdp_params]


def parameters_of_fsdp(root: nn.Module) -> list[Any]:
    """Return FSDP2's parameters, in the order of `managed_parameters`."""
    return [param for group in param_groups(root) for param in group.fsdp_params]


def named_managed_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every sharded parameter with its name, in the order of `managed_parameters`."""
    params = [param for group in param_groups(root) for param in group.fsdp_params]
    names: dict[tuple[nn.Module, str], str] = {}
    for prefix, module in root.named_modules():
        for name in module._parameters:
            names[module, name] = f"{prefix}.{name}" if prefix else name
    return [
        (names[param._module_info.module, param._module_info.param_name], param.sharded_param)
        for param in params
    ]


def refresh_dtypes(root: nn.Module) -> list[str]:
    """Let units that were frozen when their dtypes were read be trained.

    Returns:
        Names of trainable parameters that lack the fp32 master that mixed precision calls for,
        because they were frozen, and kept in their own dtype, when the model was sharded.
    """
    lacking: list[str] = []
    for group in param_groups(root):
        trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        if group.mp_policy.param_dtype is not None:
            low = [p for p in trainable if p.orig_dtype in (torch.bfloat16, torch.float16)]
            lacking += [p._param_fqn or p._module_info.param_name for p in low]
        if trainable and group._orig_dtype is None and not lacking:
            group._init_mp_dtypes()
    return lacking


def resting_layouts(root: nn.Module) -> list[tuple[Any, torch.dtype, torch.device]]:
    """Return FSDP2's parameters, with the dtype and the device that their shards have now."""
    return [
        (param, param.sharded_param.dtype, param.sharded_param.device)
        for group in param_groups(root)
        for param in group.fsdp_params
    ]


def changed_layout(layouts: list[tuple[Any, torch.dtype, torch.device]]) -> tuple[str, str] | None:
    """Find a shard that was converted since `resting_layouts`, by name, and what it is now."""
    for param, dtype, device in layouts:
        now = param.sharded_param
        if now.dtype is not dtype or now.device != device:
            return label_of(param), f"{now.dtype} on {now.device}, not {dtype} on {device}"
    return None


def replaced_parameters(root: nn.Module) -> list[str]:
    """Names of parameters that were replaced after sharding; the next gather would undo it."""
    found: list[str] = []
    for group in param_groups(root):
        for param in group.fsdp_params:
            if is_stood_in(param):
                continue
            info = param._module_info
            places = [(info.module, info.param_name)]
            places += zip(info.shared_modules, info.shared_param_names, strict=True)
            for module, name in places:
                now = module._parameters.get(name)
                if now is not param.sharded_param and (
                    now is None or now is not getattr(param, "_unsharded_param", None)
                ):
                    found.append(param._param_fqn or name)
    return found


def sharded_of_gathered(root: nn.Module) -> dict[int, nn.Parameter]:
    """Map the id of each gathered copy that was ever registered to its sharded parameter."""
    params = [param for group in param_groups(root) for param in group.fsdp_params]
    gathered = {
        id(param._unsharded_param): param.sharded_param
        for param in params
        if hasattr(param, "_unsharded_param")
    }
    for param in params:
        if is_stood_in(param):
            info = param._module_info
            gathered[id(info.module._parameters[info.param_name])] = param.sharded_param
    return gathered


def lazy_init_root(root: nn.Module) -> None:
    """Make `root` the FSDP root now, as its first forward would.

    A part of the model that is called before the whole would else become a root of its own.
    """
    assert isinstance(root, FSDPModule)
    root._get_fsdp_state()._lazy_init()


def label_of(param: Any) -> str:
    """Return the name of one of FSDP2's parameters."""
    return str(param._param_fqn or param._module_info.param_name)


def places_of(param: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules, and the names in them, that one of FSDP2's parameters stands in."""
    info = param._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def gathered_copy(param: Any) -> nn.Parameter | None:
    """Return the parameter that stands in the module while it is gathered; None before that."""
    whole: nn.Parameter | None = getattr(param, "_unsharded_param", None)
    return whole


def gathered_memory(param: Any) -> torch.Tensor:
    """Return the memory that gathers fill, in the parameter's shape."""
    return torch.as_strided(
        param.all_gather_outputs[0], param._orig_size, param._contiguous_orig_stride
    )


def own_rows(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a tensor of the parameter's whole shape; a view."""
    length = param.sharded_size[0]
    start = param.padded_sharded_param_size[0] * param.mesh_info.shard_mesh_rank
    return whole.narrow(0, start if length else 0, length)


def elements_before(param: Any) -> int:
    """Return how many elements of the whole parameter precede this rank's rows, if it has any."""
    return int(param.padded_sharded_param_size.numel() * param.mesh_info.shard_mesh_rank)


def renew_shard(param: Any, rows: torch.Tensor) -> bool:
    """Give a parameter at rest other memory for its shard; what refers to the old one keeps it.

    Args:
        param: FSDP2's parameter.
        rows: This rank's rows, in the dtype and on the device of the shard, in memory of their own.

    Returns:
        Whether it has it: a parameter that is gathered, or rests in a tier, is left as it is.
    """
    info = param._module_info
    local = param.sharded_param._local_tensor
    at_rest = getattr(info.module, info.param_name) is param.sharded_param
    if not at_rest or type(local) is not torch.Tensor:
        return False
    param.sharded_param._local_tensor = rows
    param.reset_sharded_param()
    return True


def unit_groups(root: nn.Module) -> list[tuple[str, Any]]:
    """Return (module name, FSDP2 parameter group) of every unit, in a fixed order."""
    names = {module: name or "the root" for name, module in root.named_modules()}
    return [(names.get(group.modules[0], "the root"), group) for group in param_groups(root)]


def replicas_of(group: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold copies of this rank's part of a unit; None without replicas."""
    replicas: dist.ProcessGroup | None = group._all_reduce_process_group if group._is_hsdp else None
    return replicas


def gathered_units(root: nn.Module) -> list[str]:
    """Return the names of the units whose parameters are whole at the moment."""
    return [name for name, group in unit_groups(root) if group.is_unsharded]


def own_groups(unit: nn.Module) -> list[Any]:
    """Return the FSDP2 parameter groups of one unit, without those of units inside."""
    assert isinstance(unit, FSDPModule)
    return groups_of(unit._get_fsdp_state())


def owns_any(group: Any, modules: set[nn.Module]) -> bool:
    """Whether a parameter group has a parameter that stands on one of `modules`."""
    return any(
        info.module in modules or any(shared in modules for shared in info.shared_modules)
        for info in (param._module_info for param in group.fsdp_params)
    )


def is_stood_in(param: Any) -> bool:
    """Whether another tensor stands on the modules in the place of a parameter of FSDP2's."""
    return "_setattr_on_modules" in vars(param)


def compute_dtype(param: Any) -> torch.dtype | None:
    """The dtype that a parameter is cast to for the computation; None for the one it rests in."""
    dtype: torch.dtype | None = param.param_dtype
    return dtype
