"""The one file that touches private names of torch.

FSDP2 keeps its books (gathered copies, unreduced gradients) in private objects; the engine needs
to read them for its memory account and for the checks that plain FSDP2 leaves out. Tested with
the torch versions that pyproject.toml admits; a test fails if another file of the package
reaches for a private name.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle, unserializable_hook
from torch.utils.weak import WeakTensorKeyDictionary

from shardplug.errors import ModelError

__all__ = [
    "backward_within_modes",
    "CONVERT_BEFORE",
    "BackwardWatch",
    "GradScaler",
    "ShardNotes",
    "TensorWithoutMemory",
    "TorchDispatchMode",
    "WeakTensorKeyDictionary",
    "after_gradient",
    "after_root_backward",
    "around_gathers",
    "assign_data",
    "announce_collectives",
    "attention_by_kernel",
    "before_state_dict",
    "model_state_tensors",
    "changed_layout",
    "clamp_all",
    "close_mesh",
    "copies_of_all",
    "copy_all",
    "default_tcp_store",
    "drop_unreduced_gradients",
    "elements_before",
    "forwards_so_far",
    "forget_gather",
    "fused_attention_on_cpu",
    "gather_again_after",
    "gathered_copy",
    "gathered_memory",
    "gathered_storages",
    "gathered_units",
    "guard_partial_reads",
    "hide_managed_mark",
    "has_unreduced_gradients",
    "grouped_product_flops",
    "is_copy",
    "init_fake_process_group",
    "is_read_of_value",
    "keep_shard_elsewhere",
    "label_of",
    "laid_out_like",
    "layout_of_shard",
    "let_inputs_change",
    "local_tensor",
    "managed_parameters",
    "may_reduce_late",
    "multiply_all",
    "orthogonalise_whole_matrices",
    "own_groups",
    "persistent_buffers",
    "own_rows",
    "pause_resets",
    "places_of",
    "refresh_dtypes",
    "register_extra_outputs",
    "renew_shard",
    "replaced_parameters",
    "replicas_of",
    "reset_iteration",
    "reshard_all",
    "reshard_own",
    "resting_layouts",
    "run_on_meta",
    "run_before_loading",
    "save_tensors",
    "set_collectives",
    "set_replica_sum",
    "set_gather_ahead",
    "lazy_init_root",
    "reset_sharded_param",
    "sharded_of_gathered",
    "stays_gathered",
    "storage_bytes",
    "tracked_memory",
    "tree_leaves",
    "tree_map",
    "unit_groups",
    "uncompiled",
    "version_of",
    "written_tensors",
    "without_memory",
]

CONVERT_BEFORE = (
    "Convert a model before it is sharded; to compute in less than fp32 use precision= (Lightning, "
    'Fabric), mixed_precision (Accelerate) or ZeroConfig(param_dtype="bf16").'
)
"""What a user does instead of converting a sharded model."""


def _param_groups(root: nn.Module) -> Iterator[Any]:
    for state in _unit_states(root):
        yield from _groups_of(state)


def _unit_states(root: nn.Module) -> Iterable[Any]:
    if isinstance(root, FSDPModule):
        state = root._get_fsdp_state()
        if state._is_root:  # once it has run, it has a list of the modules' states
            return state._state_ctx.all_states
    modules = (module for module in root.modules() if isinstance(module, FSDPModule))
    return {id(state): state for state in (m._get_fsdp_state() for m in modules)}.values()


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # torch < 2.13


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor without recording autograd, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors of one device and dtype in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def copies_of_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of each of these tensors, which are numbers on one device, in few kernels."""
    return list(torch._foreach_add(tensors, 0)) if tensors else []


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)


def clamp_all(tensors: list[torch.Tensor], low: float, high: float) -> None:
    """Clamp tensors of one device and dtype in place, in few kernels."""
    torch._foreach_clamp_min_(tensors, low)
    torch._foreach_clamp_max_(tensors, high)


def managed_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return every sharded parameter, in a fixed order, whatever is registered at the moment."""
    return [p.sharded_param for group in _param_groups(root) for p in group.fsdp_params]


def parameters_of_fsdp(root: nn.Module) -> list[Any]:
    """Return FSDP2's parameters, in the order of `managed_parameters`."""
    return [param for group in _param_groups(root) for param in group.fsdp_params]


def named_managed_parameters(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every sharded parameter with its name, in the order of `managed_parameters`."""
    params = [param for group in _param_groups(root) for param in group.fsdp_params]
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
    for group in _param_groups(root):
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
        for group in _param_groups(root)
        for param in group.fsdp_params
    ]


def changed_layout(layouts: list[tuple[Any, torch.dtype, torch.device]]) -> tuple[str, str] | None:
    """Find a shard that was converted since `resting_layouts`, by name, and what it is now."""
    for param, dtype, device in layouts:
        now = param.sharded_param
        if now.dtype is not dtype or now.device != device:
            return _label(param), f"{now.dtype} on {now.device}, not {dtype} on {device}"
    return None


def _label(param: Any) -> str:
    return str(param._param_fqn or param._module_info.param_name)


def replaced_parameters(root: nn.Module) -> list[str]:
    """Names of parameters that were replaced after sharding; the next gather would undo it."""
    found: list[str] = []
    for group in _param_groups(root):
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
    params = [param for group in _param_groups(root) for param in group.fsdp_params]
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


def model_state_tensors(root: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return what the parameters of a model hold, by kind, in one walk over its units.

    Returns:
        "master_shards": the flat, padded shards that parameters are kept in at rest. "gathered":
        the gathered copies; those not gathered at the moment have empty storages. "gradients":
        sharded ones, and full ones that have not been reduced yet.
    """
    masters: list[torch.Tensor] = []
    gathered: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []
    for group in _param_groups(root):
        if group._all_gather_result is not None:
            gathered.append(group._all_gather_result.all_gather_output)
        gradients.append(group._partial_reduce_output)
        for param in group.fsdp_params:
            masters.append(param._sharded_param_data)
            gathered += param.all_gather_outputs
            gathered += getattr(param, "_unsharded_inner_tensors", [])
            gradients.append(param.sharded_param.grad)
            gradients += _unreduced(param)
    return {
        "master_shards": masters,
        "gathered": gathered,
        "gradients": [local_tensor(grad) for grad in gradients if grad is not None],
    }


def _unreduced(param: Any) -> list[torch.Tensor]:
    whole = getattr(param, "_unsharded_param", None)
    grads = [param.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [grad for grad in grads if grad is not None]


def has_unreduced_gradients(root: nn.Module) -> bool:
    """Whether this rank holds gradients that were not reduced over the ranks."""
    return any(_unreduced(param) for group in _param_groups(root) for param in group.fsdp_params)


def drop_unreduced_gradients(root: nn.Module, only: set[int] | None = None) -> None:
    """Forget gradients that were not reduced.

    Args:
        root: The sharded model.
        only: ids of the sharded parameters concerned; None means all.
    """
    for group in _param_groups(root):
        for param in group.fsdp_params:
            if only is not None and id(param.sharded_param) not in only:
                continue
            param.unsharded_accumulated_grad = None
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


class TensorWithoutMemory(torch.Tensor):
    """A tensor of a shape, dtype and device, whose values are elsewhere.

    Args:
        like: Has the attributes shape, dtype and device.
    """

    @staticmethod
    def __new__(cls, like: Any) -> TensorWithoutMemory:
        """Make the tensor without a storage."""
        made: TensorWithoutMemory = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        return made


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the distinct storages behind `tensors`; those in a tier have none."""
    sizes: dict[int, int] = {}
    for tensor in tensors:  # hundreds, several times a step
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        for part in (local,) if type(local) is torch.Tensor else _parts(local):
            storage = part.untyped_storage()
            if num_bytes := storage.nbytes():
                sizes[storage.data_ptr()] = num_bytes
    return sum(sizes.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one made of others consists of, as torchao's 8-bit state; else itself."""
    if isinstance(tensor, TensorWithoutMemory):
        return []
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one storage, or one has none."""
    if isinstance(one, TensorWithoutMemory) or isinstance(other, TensorWithoutMemory):
        return isinstance(one, TensorWithoutMemory)
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def reset_iteration(root: nn.Module) -> None:
    """Bring FSDP2 back to rest after an exception in a forward or backward."""
    assert isinstance(root, FSDPModule)
    if root._get_fsdp_state()._is_root is None:
        return  # no forward has run
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    state = root._get_fsdp_state()  # torch < 2.13 has no call for it
    state._comm_ctx.all_gather_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for inner in state._state_ctx.all_states:
        inner._modules_to_run_forward.clear()
        inner._training_state = type(inner._training_state).IDLE
    for group in _param_groups(root):
        group._all_gather_result = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()


def reshard_all(root: nn.Module) -> None:
    """Drop every gathered copy, and every gather that was started ahead and never used.

    FSDP2 keeps the result of an unused gather for the next use, which may come after the
    optimizer has changed the shards: the unit would then compute with stale parameters.
    """
    for group in _param_groups(root):
        forget_gather(group)


def forget_gather(group: Any) -> None:
    """Drop one group's gathered copies, and a gather that was started ahead and never used."""
    if group._all_gather_result is not None:
        work = group._all_gather_result.all_gather_work
        if work is not None:
            work.wait()
        group._all_gather_result = None
    group._to_sharded()


def forwards_so_far(root: nn.Module) -> Callable[[], None]:
    """Note which forwards FSDP2 has recorded for the backward.

    It gathers ahead in the backward by the order of forwards, and counts those without gradients
    among them. Ranks that evaluated for different lengths would then gather in different orders.

    Returns:
        Forgets the forwards since.
    """
    assert isinstance(root, FSDPModule)
    order = root._get_fsdp_state()._comm_ctx.post_forward_order
    groups = list(_param_groups(root))
    length, lengths = len(order), [len(group._post_forward_indices) for group in groups]

    def forget() -> None:
        if len(order) <= length:
            return  # nothing new, or a backward has used them up
        del order[length:]
        for group, own in zip(groups, lengths, strict=True):
            del group._post_forward_indices[own:]

    return forget


def reshard_own(root: nn.Module) -> None:
    """Drop the gathered copy of the parameters that belong to `root` itself."""
    assert isinstance(root, FSDPModule)
    for group in _groups_of(root._get_fsdp_state()):
        group._to_sharded()


def set_gather_ahead(root: nn.Module) -> None:
    """Let gathers ahead of use run beside the computation where the device has no streams."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)


def around_gathers(
    group: Any,
    before: Callable[[], None],
    gathered: Callable[[], None],
    dropping: Callable[[], Callable[[], None]],
) -> None:
    """Follow when the parameters of one FSDP2 group are whole.

    Args:
        group: The group.
        before: Called before its parameters are gathered.
        gathered: Called when they are whole.
        dropping: Called before the whole copies are dropped; what it returns is called after.
    """
    group.unshard = functools.partial(_after, before, group.unshard)
    group._to_unsharded = functools.partial(_both, group._to_unsharded, gathered)
    group._to_sharded = functools.partial(_dropping, group, group._to_sharded, dropping)


def _after(before: Callable[[], None], action: Callable[..., None], *args: Any, **kw: Any) -> None:
    before()
    action(*args, **kw)


def _dropping(
    group: Any, drop: Callable[[], None], dropping: Callable[[], Callable[[], None]]
) -> None:
    if not group.is_unsharded:
        drop()
        return
    after = dropping()
    drop()
    after()


def stays_gathered(group: Any) -> bool:
    """Whether a group stays gathered after a forward, so that other code runs meanwhile."""
    return not group._reshard_after_forward


def gather_again_after(group: Any) -> None:
    """Let the next gather of a group wait for what the device has been told to do so far."""
    event = group.device_handle.Event()
    event.record()
    group._reshard_after_forward_event = event


def label_of(param: Any) -> str:
    """Return the name of one of FSDP2's parameters."""
    return _label(param)


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


def run_before_loading(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call `hook(module, state_dict, prefix, local_metadata, ...)` first when a module loads."""
    register: Any = module._register_load_state_dict_pre_hook
    register(hook, with_module=True)
    hooks = cast("OrderedDict[int, Any]", module._load_state_dict_pre_hooks)
    hooks.move_to_end(next(reversed(hooks)), last=False)


class ShardNotes:
    """Values by sharded parameter, without a reference to it.

    `module.to(...)` raises for a parameter that has weak references.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def set(self, param: Any, value: Any) -> None:
        """Note a value for the shard of one of FSDP2's parameters, as long as that is there."""
        key = id(param.sharded_param)

        def gone(known: weakref.ref[Any]) -> None:
            if key in self._by_id and self._by_id[key][0] is known:
                del self._by_id[key]

        self._by_id[key] = (weakref.ref(param, gone), value)

    def get(self, tensor: torch.Tensor) -> Any:
        """Return the value noted for a shard; None for another tensor."""
        known, value = self._by_id.get(id(tensor), (None, None))
        param = None if known is None else known()
        return value if param is not None and param.sharded_param is tensor else None

    def items(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the shards with their values."""
        found = [(known(), value) for known, value in list(self._by_id.values())]
        return [(param.sharded_param, value) for param, value in found if param is not None]


_ASSIGNED = ShardNotes()
"""What takes over a tensor that is assigned to `parameter.data`."""


def assign_data(param: Any, take: Callable[[torch.Tensor], None]) -> None:
    """Let `parameter.data = tensor` call `take(tensor)` for the shard of one of FSDP2's parameters.

    torch would exchange what a DTensor seems to be, and leave its local part as it was.
    """
    _ASSIGNED.set(param, take)
    if "data" in vars(DTensor):
        return
    plain: Any = torch.Tensor.data

    def assign(self: DTensor, value: torch.Tensor) -> None:
        found = _ASSIGNED.get(self)
        if found is None:
            plain.__set__(self, value)
        else:
            found(value)

    DTensor.data = property(plain.__get__, assign)  # type: ignore[assignment]


def register_extra_outputs(unit: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Gather `unit` again before the backward reaches it through `tensors`.

    FSDP2 hooks the outputs of a unit's forward. A tensor that the forward keeps on a module (an
    auxiliary loss, router logits) is a second way into the unit's backward.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    for tensor in tensors:
        state._register_pre_backward_hook(tensor)


class _UnitInputs(torch.autograd.Function):
    """Runs a unit's reduction after its backward, as FSDP2's own function of its inputs does.

    FSDP2's returns views, which a forward must not change in place, and gives gradients of zeros
    to inputs that the unit does not use.
    """

    @staticmethod
    def forward(ctx: Any, group: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in inputs)  # the same memory and version

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.group.post_backward()
        return (None, *grads)


def let_inputs_change(root: nn.Module) -> None:
    """Let the units' forwards change their inputs in place, and leave some of them unused."""
    for group in _param_groups(root):
        own = group._register_post_backward_hook
        register = functools.partial(_register_inputs, group, own)
        group._register_post_backward_hook = register


def _register_inputs(group: Any, original: Any, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return args, kwargs
    if torch._C._are_functorch_transforms_active():
        return original(args, kwargs)
    tensors = _grad_tensors((args, kwargs))
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    if not distinct:
        return args, kwargs
    made: Any = _UnitInputs.apply(group, *distinct)  # type: ignore[no-untyped-call]
    inside = {id(old): new for old, new in zip(distinct, made, strict=True)}
    return _with_grad_tensors((args, kwargs), [inside[id(tensor)] for tensor in tensors])


def _grad_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient, in containers and, as of torch 2.13, in dataclasses."""
    collect = getattr(_common_utils, "collect_grad_tensors", None)
    if collect is not None:
        found: list[torch.Tensor] = list(collect(value))
        return found
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor) and v.requires_grad]


def _with_grad_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    replace = getattr(_common_utils, "replace_grad_tensors", None)
    left = iter(tensors)
    if replace is not None:
        return replace(value, left)
    return tree_map(
        lambda v: next(left) if isinstance(v, torch.Tensor) and v.requires_grad else v, value
    )


def take_history(outer: torch.Tensor, inner: torch.Tensor) -> None:
    """Let a tensor have the history of another one for the same memory, which was changed."""
    with torch.autograd._unsafe_preserve_version_counter(outer):  # type: ignore[attr-defined]
        outer.copy_(inner)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that autograd takes another one for a view of."""
    return tensor._base


def unit_groups(root: nn.Module) -> list[tuple[str, Any]]:
    """Return (module name, FSDP2 parameter group) of every unit, in a fixed order."""
    names = {module: name or "the root" for name, module in root.named_modules()}
    return [(names.get(group.modules[0], "the root"), group) for group in _param_groups(root)]


def set_collectives(group: Any, gather: Any, reduce: Any) -> None:
    """Give a parameter group its own all-gather and reduce-scatter."""
    group._all_gather_comm = gather
    group._reduce_scatter_comm = reduce


def replicas_of(group: Any) -> dist.ProcessGroup | None:
    """Return the ranks that hold copies of this rank's part of a unit; None without replicas."""
    replicas: dist.ProcessGroup | None = group._all_reduce_process_group if group._is_hsdp else None
    return replicas


def set_replica_sum(group: Any, replicas: Any) -> None:
    """Let something else than a process group sum a parameter group's gradients over replicas.

    Args:
        group: A parameter group with replicas.
        replicas: Has a process group's `size` and `allreduce`, and as `error` what the latter has
            raised.
    """
    group.mesh_info.replicate_process_group = replicas
    group.post_backward = functools.partial(_raise_own, replicas, group.post_backward)


def _raise_own(replicas: Any, original: Callable[..., None], *unused: Any) -> None:
    try:
        original(*unused)
    except ValueError:
        if replicas.error is not None:
            raise replicas.error from None
        raise


def announce_collectives(group: Any, before: Callable[[str], object]) -> None:
    """Call `before("gather")` or `before("reduce")` ahead of a group's own collectives."""
    set_collectives(
        group,
        _Announced(group._all_gather_comm, functools.partial(before, "gather")),
        _Announced(group._reduce_scatter_comm, functools.partial(before, "reduce")),
    )


def may_reduce_late(group: Any, dtype: torch.dtype) -> bool:
    """Whether the result of the group's reduction in `dtype` is read only after the backward.

    FSDP2 then takes views of the result for gradients. It reads it at once to add it to earlier
    gradients, to cast it, to divide it (in dtypes other than fp32 and bf16), or to hand it to
    hooks. With replicas this holds for the sum over them; the reduction before is read at once.
    """
    return (
        dtype == group._orig_dtype
        and dtype in (torch.float32, torch.bfloat16)
        and group._all_reduce_hook is None
        and all(
            param.sharded_param.grad is None
            and not getattr(param.sharded_param, "_post_accumulate_grad_hooks", None)
            for param in group.fsdp_params
        )
    )


def after_root_backward(root: nn.Module, action: Callable[[], None]) -> None:
    """Call `action` at the end of every backward through the model, before it returns."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            original = state._root_post_backward_final_callback
            final = functools.partial(_both, original, action)
            state._root_post_backward_final_callback = final  # type: ignore[method-assign]


def _both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


class _Announced:
    """A collective that says when it starts."""

    def __init__(self, comm: Any, before: Callable[[], object]) -> None:
        self._comm = comm
        self._before = before

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self._comm.allocate(*args, **kwargs)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._comm(*args, **kwargs)


class BackwardWatch:
    """Sees each unit's gradients just before they are reduced.

    It fills in zeros for parameters that this rank did not use, because FSDP2 reduces the
    gradients that exist: ranks that used different parameters of a unit would add gradients of
    different parameters. It also remembers which parameters were used, so that a parameter that
    no rank used can go without a gradient, as it does in one process.
    """

    def __init__(self, root: nn.Module, on_backward: Callable[[], None]) -> None:
        self.used: set[int] = set()
        self.ran = False
        self.late: dict[int, Any] = {}
        """Groups, by id, that are reduced at the end of each backward (`reduce_late`)."""
        self.kept_late: set[int] = set()
        """Those among them for which this stays so in the next window."""
        self._at_end = False
        self._on_backward = on_backward
        self._groups = list(_param_groups(root))
        for group in self._groups:
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward)

    def restart(self) -> None:
        """Forget what was seen."""
        self.used.clear()
        self.ran = False
        self.late = {key: group for key, group in self.late.items() if key in self.kept_late}

    def reduce_late(self) -> None:
        """Reduce the gradients of the groups in `late`. Called when a backward ends.

        Each rank reduces all of them, whether it has gradients for them or not.
        """
        self._at_end = True
        try:
            for group in list(self.late.values()):
                group.post_backward()
            # A unit that a backward goes through twice may get gradients after its reduction.
            for group in self._groups:
                after = group._training_state is type(group._training_state).POST_BACKWARD
                if after and group.reduce_grads and any(map(_unreduced, group.fsdp_params)):
                    group.post_backward()
        finally:
            self._at_end = False

    def _post_backward(self, group: Any, original: Callable[..., None], *unused: Any) -> None:
        self._on_backward()
        self.ran = True
        late = id(group) in self.late
        if late and not self._at_end:
            reduces, group.reduce_grads = group.reduce_grads, False
            try:
                original(*unused)
            finally:
                group.reduce_grads = reduces
            return
        if not any(hasattr(param, "_unsharded_param") for param in group.fsdp_params):
            return  # never gathered, so that torch would look for gradients on no copy
        trainable = [
            param
            for param in group.fsdp_params
            if param.sharded_param.requires_grad and hasattr(param, "_unsharded_param")
        ]
        used = [param for param in trainable if _unreduced(param)]
        for param in used:
            if any(grad.is_sparse for grad in _unreduced(param)):
                raise ModelError(
                    f"Expected a dense gradient of {_label(param)}, got a sparse one, which cannot "
                    "be reduced over ranks by rows. Use sparse=False."
                )
        self.used.update(id(param.sharded_param) for param in used)
        # A unit that is neither gathered nor holds gradients took no part in this backward.
        if group.reduce_grads and (used or late or group.is_unsharded):
            accumulated = [p for p in used if p.unsharded_accumulated_grad is not None]
            if accumulated and len(accumulated) < len(trainable):
                for param in used:  # one buffer, one dtype
                    param.accumulate_unsharded_grad_if_needed()
                    param.to_accumulated_grad_if_needed()
            for param in trainable:
                whole = param._unsharded_param
                if _unreduced(param) or not whole.requires_grad:
                    continue
                dtype = (param.reduce_dtype if accumulated else None) or whole.dtype
                param.unsharded_accumulated_grad = torch.zeros(
                    whole.size(), dtype=dtype, device=whole.device
                )
        original(*unused)


class GradScaler(torch.amp.GradScaler):
    """A loss scaler whose ranks agree on whether a step is skipped.

    torch's own takes a list of gradients of one kind; here sharded and replicated ones mix. Each
    rank looks at its own parts, then the ranks combine what they found.
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                grad = local_tensor(parameter.grad)
                if grad.dtype == torch.float16 and not allow_fp16:
                    raise ValueError(
                        "Expected fp32 gradients to unscale, got fp16: keep fp32 master weights "
                        "(param_dtype=fp16 on an fp32 model)."
                    )
                by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
        found: dict[torch.device, torch.Tensor] = {}
        for (device, _), local_grads in by_kind.items():
            flag = found.setdefault(device, found_inf.to(device, copy=True))
            torch._amp_foreach_non_finite_check_and_unscale_(
                local_grads, flag, inv_scale.to(device)
            )
        if not found:
            found[found_inf.device] = found_inf
        for flag in found.values():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return found


_GUARDED = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "__complex__")


_CHANGED_IN_PLACE = tuple(
    f"{name}_"
    for name in (
        *("abs", "add", "addcdiv", "addcmul", "clamp", "clamp_max", "clamp_min", "div", "exp"),
        *("lerp", "log", "mul", "nan_to_num", "neg", "pow", "reciprocal", "rsqrt", "sqrt", "sub"),
    )
) + ("__iadd__", "__imul__", "__isub__", "__itruediv__")
_EXTREMES = {"max": "max", "amax": "max", "min": "min", "amin": "min"}
_PARTS = ("__getitem__", "narrow", "select")
_WRITTEN = ("copy_", "fill_", "zero_")
_RANDOM = ("bernoulli_", "cauchy_", "exponential_", "log_normal_", "normal_", "random_", "uniform_")
_MODIFY = "Change weights inside `with engine.gathered(part, modify=True, src=0):`."


def guard_partial_reads() -> None:
    """Make values of whole sharded tensors right, or an error, where torch's are neither.

    `parameter.norm()` on a sharded parameter is a DTensor whose ranks each hold their own part;
    torch's `.item()` would return that part with no error, and differently on each rank: it raises.
    Such a tensor is reduced before it is changed in place, which torch refuses. The largest and the
    smallest value of a tensor leave ranks without rows out, where torch raises on those ranks
    alone. Two kinds of writes raise, as they would do something else than on a whole tensor:
    random numbers, which CPU ranks would draw alike for different rows, and writes to rows or
    slices of a shard, which DTensor copies.
    """
    guards: dict[str, Callable[..., Callable[..., Any]]] = {
        **dict.fromkeys(_PARTS, _part_of_shards),
        **dict.fromkeys(_WRITTEN, _refused_on_parts),
        **dict.fromkeys(_CHANGED_IN_PLACE, _reduced_first),
        **dict.fromkeys(_RANDOM, _refused_on_shards),
        **dict.fromkeys(_EXTREMES, _extreme),
        **dict.fromkeys(_GUARDED, _guarded),
    }
    for name, guard in guards.items():
        original = getattr(DTensor, name, None)
        if original is not None and not getattr(original, "_shardplug_guard", False):
            setattr(DTensor, name, guard(name, original))


def _guarded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if any(placement.is_partial() for placement in self.placements):
            raise RuntimeError(
                f"Expected a value that is the same on every rank, got {name}() of a tensor that "
                f"is only partly reduced (placements {self.placements}): this rank would read its "
                "own part. Call .full_tensor() on it first, on every rank; for gradient norms use "
                "engine.grad_norm()."
            )
        return original(self, *args, **kwargs)

    read._shardplug_guard = True  # type: ignore[attr-defined]
    return read


def _is_shard(tensor: DTensor) -> bool:
    mesh = tensor.device_mesh
    return mesh.size() > 1 and any(placement.is_shard() for placement in tensor.placements)


def _part_of_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def part(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        # With a tensor or a list for an index the result is a copy of any tensor.
        keys = args[0] if name == "__getitem__" and args else None
        simple = all(
            key is None or key is Ellipsis or isinstance(key, (int, slice))
            for key in (keys if isinstance(keys, tuple) else (keys,))
        )
        if simple and isinstance(result, DTensor) and _is_shard(self):
            result._shardplug_part = not share_memory(  # type: ignore[attr-defined]
                result._local_tensor, self._local_tensor
            )
        return result

    part._shardplug_guard = True  # type: ignore[attr-defined]
    return part


def _refuse_parts(tensor: DTensor, name: str) -> None:
    if getattr(tensor, "_shardplug_part", False):
        raise RuntimeError(
            f"Expected whole parameters to be changed, got {name}() of rows or a slice of a "
            "sharded one (DTensor): that is a copy, and the parameter would stay as it is. "
            f"{_MODIFY}"
        )


def _refused_on_parts(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        return original(self, *args, **kwargs)

    write._shardplug_guard = True  # type: ignore[attr-defined]
    return write


def _refused_on_shards(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        if self.device_mesh.device_type == "cpu" and _is_shard(self):
            raise RuntimeError(
                f"Expected random numbers to be drawn for whole parameters, got {name}() on a "
                f"sharded one (DTensor): each rank would draw the same for its rows. {_MODIFY}"
            )
        return original(self, *args, **kwargs)

    draw._shardplug_guard = True  # type: ignore[attr-defined]
    return draw


def _reduced_first(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        _refuse_parts(self, name)
        partial = any(placement.is_partial() for placement in self.placements)
        if partial and not self.requires_grad:
            whole = self.redistribute(
                placements=[Replicate() if p.is_partial() else p for p in self.placements]
            )
            self._local_tensor, self._spec = whole._local_tensor, whole._spec
        return original(self, *args, **kwargs)

    change._shardplug_guard = True  # type: ignore[attr-defined]
    return change


def _extreme(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        local = self._local_tensor
        if args or kwargs or local.numel() or not self.numel() or self.requires_grad:
            return original(self, *args, **kwargs)
        if local.is_floating_point():
            lowest, highest = float("-inf"), float("inf")
        else:
            lowest, highest = torch.iinfo(local.dtype).min, torch.iinfo(local.dtype).max
        none = lowest if _EXTREMES[name] == "max" else highest
        placements = [Partial(_EXTREMES[name]) if p.is_shard() else p for p in self.placements]
        return DTensor.from_local(
            local.new_full((), none), self.device_mesh, placements, run_check=False
        )

    read._shardplug_guard = True  # type: ignore[attr-defined]
    return read


def current_backward() -> int:
    """Return a number of the backward that this thread runs; -1 for none."""
    return int(torch._C._current_graph_task_id())


def before_mixed_scalars(action: Callable[[Iterable[Any], str], None]) -> None:
    """Call `action` before an operation on a DTensor and a plain scalar that needs a gradient.

    DTensor takes such scalars, and the backward then fails where the scalar was computed.

    Args:
        action: Gets the tensors and the name of the operation, and may raise.
    """
    from torch.distributed.tensor._dispatch import OpDispatcher

    dispatcher: Any = OpDispatcher
    original = dispatcher._unwrap_to_op_info_impl
    if getattr(original, "_shardplug_guard", False):
        return

    @functools.wraps(original)
    def checked(self: Any, op: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        returns = (str(value.type) for value in op._schema.returns)
        if torch.is_grad_enabled() and any("Tensor" in kind for kind in returns):
            tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
            plain = (t for t in tensors if not isinstance(t, DTensor))
            if any(t.requires_grad and not t.ndim for t in plain):  # torch refuses others itself
                action(tensors, str(op))
        return original(self, op, args, kwargs, *rest)

    checked._shardplug_guard = True  # type: ignore[attr-defined]
    dispatcher._unwrap_to_op_info_impl = checked


def orthogonalise_whole_matrices() -> None:
    """Let torch.optim.Muon bring the rows of a sharded matrix together before its iteration.

    The Newton-Schulz iteration is not elementwise, and in bf16 it enlarges what is small. Left to
    DTensor, its products are summed in another order than in one process, which the update shows
    in its third digit. Every rank works on the whole matrix instead, gathered once, in the
    iteration's own dtype, and keeps its rows.
    """
    original = _muon._zeropower_via_newtonschulz
    if getattr(original, "_shardplug_whole", False):
        return

    @functools.wraps(original)
    def whole(grad: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not isinstance(grad, DTensor):
            return original(grad, *args, **kwargs)
        half = cast(DTensor, grad.bfloat16())
        result = original(half.full_tensor(), *args, **kwargs)
        # None: every rank has the same values, so that each cuts its rows out by itself.
        return distribute_tensor(result, grad.device_mesh, grad.placements, src_data_rank=None)

    whole._shardplug_whole = True  # type: ignore[attr-defined]
    _muon._zeropower_via_newtonschulz = whole


def save_tensors(tensors: dict[str, Any], **options: Any) -> None:
    """Do what torch.distributed.checkpoint.save does, without its warning for one rank.

    The warning could only be silenced for all threads, and saves run in threads.

    Args:
        tensors: Nested dictionaries of tensors.
        options: storage_writer, planner, process_group and no_dist, as for save.
    """
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict(tensors, **options)


def laid_out_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the DTensor of which this rank's part is `local`, laid out like `parameter`.

    Unlike `DTensor.from_local` it leaves `local` where it is, which may be the CPU beside a mesh
    of GPUs.

    Args:
        local: Same shape as the local part of `parameter`; any dtype.
        parameter: A DTensor; for a tensor that every rank holds whole, `local` is returned.
    """
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    assert spec.tensor_meta is not None
    meta = type(spec.tensor_meta)(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    own = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, own, requires_grad=False)  # type: ignore[no-untyped-call]


def fused_attention_on_cpu(
    query: tuple[tuple[int, ...], torch.dtype],
    key: tuple[tuple[int, ...], torch.dtype],
    value: tuple[tuple[int, ...], torch.dtype],
    masked: bool,
    dropout_p: float,
    grouped: bool,
) -> bool:
    """Ask torch whether attention on the CPU runs in one kernel, which keeps no scores.

    Args:
        query: Shape and dtype; a short sequence is enough, as it does not decide.
        key: As for the query.
        value: As for the query.
        masked: Whether a mask is given.
        dropout_p: Dropout of the scores.
        grouped: Whether several query heads share a key head.
    """
    q, k, v = (torch.empty(s, dtype=d, requires_grad=True) for s, d in (query, key, value))
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool) if masked else None
    choice = torch._fused_sdp_choice(q, k, v, mask, dropout_p, False, enable_gqa=grouped)
    return int(choice) == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def attention_by_kernel(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Run attention in one fused kernel, on meta tensors too, where torch would take none.

    Args:
        kernel: "flash", "efficient" (both GPU) or "cpu flash".
        query: (batch, heads, length, width).
        key: As the query, of its own length; heads may be fewer for "flash" and "cpu flash".
        value: As the key.
        bias: Added to the scores, for "efficient" and "cpu flash".
        dropout_p: Dropout of the scores.
        is_causal: Whether later positions are left out.
        scale: Factor of the scores.
    """
    ops = torch.ops.aten
    call: Any
    if kernel == "flash":
        call = ops._scaled_dot_product_flash_attention
        out = call(query, key, value, dropout_p, is_causal, False, scale=scale)
    elif kernel == "efficient":
        call = ops._scaled_dot_product_efficient_attention
        out = call(query, key, value, bias, True, dropout_p, is_causal, scale=scale)
    else:
        call = ops._scaled_dot_product_flash_attention_for_cpu
        out = call(query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale)
    first: torch.Tensor = out[0]
    return first


def is_read_of_value(func: Any) -> bool:
    """Whether a dispatched operation reads one number out of a tensor, as `.item()` does."""
    return func is torch.ops.aten._local_scalar_dense.default


def is_copy(func: Any) -> bool:
    """Whether a dispatched operation copies a tensor to another device or dtype."""
    return func is torch.ops.aten._to_copy.default


def backward_within_modes(value: torch.Tensor) -> None:
    """Run a scalar's backward with function modes on, for the forwards that it recomputes.

    `Tensor.backward()` and `torch.autograd.backward()` are seen by a mode, which is off in them.
    """
    start = (torch.ones_like(value),)
    _engine_run_backward(
        (value,), start, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a dispatched operation on meta as on a device.

    The kernels of grouped matrix products (mixtures of experts) take fp32 and fp16 as well as bf16,
    though torch's shapes for meta tensors are given for bf16 alone.
    """
    if not _is_grouped_product(func) or not args[0].is_meta or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    dtype = kwargs.get("out_dtype") or args[0].dtype
    low = [value.to(torch.bfloat16) for value in args[:2]]
    return func(*low, *args[2:], **{**kwargs, "out_dtype": None}).to(dtype)


def _is_grouped_product(func: Any) -> bool:
    return getattr(func, "overloadpacket", None) is torch.ops.aten._grouped_mm


def grouped_product_flops(func: Any, args: tuple[Any, ...]) -> int:
    """Count the operations of a grouped matrix product, which torch's counter leaves out."""
    if not _is_grouped_product(func):
        return 0
    first, second = args[:2]
    groups = first.shape[0] if first.dim() == 3 and second.dim() == 2 else 1
    return 2 * int(first.numel()) // groups * int(second.shape[-1])


def gathered_units(root: nn.Module) -> list[str]:
    """Return the names of the units whose parameters are whole at the moment."""
    return [name for name, group in unit_groups(root) if group.is_unsharded]


def own_groups(unit: nn.Module) -> list[Any]:
    """Return the FSDP2 parameter groups of one unit, without those of units inside."""
    assert isinstance(unit, FSDPModule)
    return _groups_of(unit._get_fsdp_state())


def close_mesh(mesh: DeviceMesh) -> None:
    """Destroy the group of a mesh with one axis.

    DTensor's caches keep meshes, and a mesh keeps its group: without letting go of it the group's
    connections would stay open, and ranks that wait for this one would go on waiting.
    """
    dist.destroy_process_group(mesh.get_group())
    getattr(mesh, "_pg_registry", {}).clear()


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled functions as they were written.

    Under a dispatch mode torch compiles nothing, and marks the code it meets as not to be compiled
    for the rest of the process.
    """
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def hide_managed_mark(module: nn.Module) -> None:
    """Take FSDP2's mark from a module whose forward computes something else where it finds it.

    The mark is meant for Dynamo, which guards on less in modules that have it.
    """
    vars(module).pop("_is_fsdp_managed_module", None)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own buffers that are in its state_dict, by name."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def before_state_dict(unit: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Run `hook` when `unit.state_dict()` begins, before FSDP2 shards the unit again."""
    hooks = cast("OrderedDict[int, Any]", unit._state_dict_pre_hooks)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    hooks.move_to_end(handle.id, last=False)
    return handle


def gathered_storages(unit: nn.Module) -> list[torch.UntypedStorage]:
    """Return the storages that one unit's parameters are whole in while they are gathered."""
    tensors: list[torch.Tensor] = []
    for group in own_groups(unit):
        for param in group.fsdp_params:
            tensors += param.all_gather_outputs
            tensors += getattr(param, "_unsharded_inner_tensors", [])
            if hasattr(param, "_unsharded_param"):
                tensors.append(local_tensor(param._unsharded_param))
    return [t.untyped_storage() for t in tensors if not isinstance(t, TensorWithoutMemory)]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or one that shares its memory, was written to in place."""
    return tensor._version


def pause_resets(param: Any) -> Callable[[], None]:
    """Let FSDP2 not look, after a load_state_dict, for a shard in the module; return the undo."""
    own = vars(param).get("reset_sharded_param")
    param.reset_sharded_param = lambda: None

    def undo() -> None:
        if own is None:
            del param.reset_sharded_param
        else:
            param.reset_sharded_param = own

    return undo


def reset_sharded_param(param: Any) -> None:
    """Let FSDP2 take over what stands in the module now for one of its parameters."""
    param.reset_sharded_param()


def layout_of_shard(param: Any) -> tuple[nn.Parameter, torch.Size, torch.dtype]:
    """Return the sharded parameter, the padded shape of its part, and the dtype gathers have."""
    parameter: nn.Parameter = param.sharded_param
    low = param.mp_policy.param_dtype
    compute = low if low is not None and parameter.is_floating_point() else parameter.dtype
    return parameter, param.padded_sharded_param_size, compute


def keep_shard_elsewhere(param: Any, tensor: torch.Tensor) -> None:
    """Let a tensor with FSDP2's extension hooks stand for a parameter's part of the shard.

    Args:
        param: FSDP2's parameter.
        tensor: Has the part's shape and dtype, and need not have memory.
    """
    param.sharded_param._local_tensor = tensor
    param._sharded_param_data = tensor
    # It would pad the part, and take its address.
    param.reset_sharded_param = functools.partial(_require_kept, param, tensor)
    param._init_extensions()


def _require_kept(param: Any, tensor: torch.Tensor) -> None:
    info = param._module_info
    now = getattr(info.module, info.param_name)
    if now is not param.sharded_param and now is not getattr(param, "_unsharded_param", None):
        raise ModelError(
            f"Expected {param._param_fqn or info.param_name} to be the parameter that was sharded, "
            "as its values rest in a tier, but it was replaced. Copy values into it (copy_, "
            "load_state_dict without assign=True), or change it before it is sharded."
        )
    if not isinstance(param.sharded_param._local_tensor, TensorWithoutMemory):
        raise ModelError(
            f"Expected {_label(param)} to rest in a tier, but .to(...), .half() or the like has "
            f"made it a tensor in memory. {CONVERT_BEFORE}"
        )


def after_gradient(parameter: nn.Parameter, action: Callable[[torch.Tensor], None]) -> None:
    """Call `action` with the parameter each time its gradient was reduced, frozen now or not."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook of a frozen one
    parameter.register_post_accumulate_grad_hook(action)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a dispatched operation writes to."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written


def init_fake_process_group(world_size: int) -> None:
    """Be rank 0 of a job whose other ranks do not exist; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def without_memory() -> Any:
    """Return a context in which tensors have sizes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


_TRACKED = {
    "Sharded Param": "master_shards",
    "Unsharded Param": "gathered",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "OptState": "optimizer_state",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Buffer": "buffers",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
}


@contextmanager
def tracked_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[torch.Tensor, ...]
) -> Iterator[Callable[[str], dict[str, int]]]:
    """Follow an FSDP2 model's memory with torch's own tracker, which knows CPU and fake tensors.

    Take one step before: the first one makes whole tensors, to work out how to shard.

    Args:
        model: Sharded.
        optimizer: Over its parameters.
        inputs: Tensors of the batch.

    Yields:
        A function that returns bytes by kind, given "current" or "peak".
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker: Any = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(inputs)

    def snapshot(which: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for by_kind in tracker.get_tracker_snapshot(which).values():
            for kind, size in by_kind.items():
                name = str(getattr(kind, "value", kind))
                if name != "Total":
                    name = _TRACKED[name]
                    found[name] = found.get(name, 0) + int(size)
        return found

    with tracker:
        yield snapshot


def default_tcp_store() -> Any | None:
    """Return the store that the default process group met in; None unless it is a TCPStore."""
    module: Any = dist  # which does not declare that it exports the classes
    store = module.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, module.PrefixStore):
        inner = inner.underlying_store
    return store if isinstance(inner, module.TCPStore) else None


# ---------------------------------------------------------------- whole parameters with gradients


def owns_any(group: Any, modules: set[nn.Module]) -> bool:
    """Whether a parameter group has a parameter that stands on one of `modules`."""
    return any(
        info.module in modules or any(shared in modules for shared in info.shared_modules)
        for info in (param._module_info for param in group.fsdp_params)
    )


def whole_values(group: Any) -> list[tuple[Any, torch.Tensor]]:
    """Return each of FSDP2's parameters with a whole copy in the dtype it rests in. Collective.

    The group is gathered, or not, afterwards as it was before.
    """
    was_sharded = not group.is_unsharded
    params = group.fsdp_params
    casts = any(param.param_dtype is not None for param in params)
    # FSDP2 reduces no gradient of a parameter that it has never gathered.
    if not casts or not all(hasattr(param, "_unsharded_param") for param in params):
        group.unshard()
        group.wait_for_unshard()
    values = []
    for param in params:
        if casts:
            full = param.sharded_param.detach().full_tensor()
            own = share_memory(full, local_tensor(param.sharded_param))
            values.append((param, full.clone() if own else full))
        else:
            values.append((param, param._unsharded_param.detach().clone()))
    if was_sharded:
        group._to_sharded()
    return values


def stand_in(param: Any, tensor: torch.Tensor) -> None:
    """Put `tensor` on the modules in the place of one of FSDP2's parameters, until `step_back`.

    FSDP2 goes on as always; only within a backward, whose forward may have run before, do its own
    tensors stand on the modules again (see `end_of_backward`).
    """
    _place(param, tensor)

    def in_backward(own: torch.Tensor) -> None:
        if current_backward() != -1:
            _place(param, own)

    param._setattr_on_modules = in_backward


def _place(param: Any, tensor: torch.Tensor) -> None:
    info = param._module_info
    places = [(info.module, info.param_name)]
    places += zip(info.shared_modules, info.shared_param_names, strict=True)
    for module, name in places:
        module._parameters[name] = tensor  # of the computation's dtype it is no Parameter


def is_stood_in(param: Any) -> bool:
    """Whether another tensor stands on the modules in the place of a parameter of FSDP2's."""
    return "_setattr_on_modules" in vars(param)


def step_back(param: Any) -> None:
    """Put what FSDP2 would have there now on the modules."""
    vars(param).pop("_setattr_on_modules", None)
    sharded = param.sharded_state is type(param.sharded_state).SHARDED
    param._setattr_on_modules(param.sharded_param if sharded else param._unsharded_param)


def in_own_backward(unit: nn.Module) -> bool:
    """Whether FSDP2 has gathered a unit for its backward, in which a forward may run again."""
    assert isinstance(unit, FSDPModule)
    state: Any = unit._get_fsdp_state()
    return bool(state._training_state is type(state._training_state).PRE_BACKWARD)


def compute_dtype(param: Any) -> torch.dtype | None:
    """The dtype that a parameter is cast to for the computation; None for the one it rests in."""
    dtype: torch.dtype | None = param.param_dtype
    return dtype


def add_whole_gradient(param: Any, grad: torch.Tensor) -> None:
    """Add to what FSDP2 keeps of this rank's gradient until the next reduction.

    Args:
        param: FSDP2's parameter.
        grad: Whole, in the dtype that the parameter rests in.
    """
    if param.unsharded_accumulated_grad is None:
        dtype = param.reduce_dtype or param.param_dtype or grad.dtype
        param.unsharded_accumulated_grad = grad.detach().to(dtype, copy=True)
    else:
        param.unsharded_accumulated_grad += grad.detach()


def end_of_backward(root: nn.Module) -> None:
    """Within a backward: let FSDP2 reduce gradients when it ends, as if it went through units."""
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    state._register_root_post_backward_final_callback()


def before_root_backward_ends(root: nn.Module, action: Callable[[], None]) -> None:
    """Call `action` at the end of every backward, before FSDP2 reduces what is left."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            original = state._root_post_backward_final_callback
            final = functools.partial(_both, action, original)
            state._root_post_backward_final_callback = final  # type: ignore[method-assign]


class PausableUnits:
    """Lets FSDP2's hooks on the calls of units be switched off.

    Args:
        root: The sharded model.
        paused: Tells whether a unit is called now without being gathered.
        enter: Called before the forward of such a unit.
        leave: Called after it.
    """

    def __init__(
        self,
        root: nn.Module,
        paused: Callable[[nn.Module], bool],
        enter: Callable[[nn.Module], None],
        leave: Callable[[nn.Module], None],
    ) -> None:
        self._paused = paused
        self._enter = enter
        self._leave = leave
        for unit in root.modules():
            if not isinstance(unit, FSDPModule):
                continue
            state = unit._get_fsdp_state()
            for hooks, own, other in (
                (unit._forward_pre_hooks, state._pre_forward, self._before),
                (unit._forward_hooks, state._post_forward, self._after),
            ):
                key = next(key for key, hook in hooks.items() if hook == own)
                call = functools.partial(self._either, own, functools.partial(other, state))
                disable: Any = torch.compiler.disable
                hooks[key] = disable(functools.wraps(own)(call))
            state._register_pre_backward_hook = functools.partial(  # type: ignore[method-assign]
                self._register, unit, state
            )

    def _either(self, own: Any, other: Any, unit: nn.Module, *args: Any) -> Any:
        return (other if self._paused(unit) else own)(unit, *args)

    def _before(self, state: Any, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        self._enter(unit)
        if state._is_root and state._device.type != "cpu":
            args, kwargs = tree_map(
                lambda v: v.to(state._device) if isinstance(v, torch.Tensor) else v, (args, kwargs)
            )
        return state._cast_forward_inputs(args, kwargs)

    def _after(self, state: Any, unit: nn.Module, args: Any, output: Any) -> Any:
        self._leave(unit)
        return state._cast_output_dtype(output)

    def _register(self, unit: nn.Module, state: Any, output: Any) -> Any:
        if self._paused(unit) or not torch.is_grad_enabled():
            return output
        if torch._C._are_functorch_transforms_active():
            return type(state)._register_pre_backward_hook(state, output)
        for tensor in _grad_tensors(output):
            tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
            base: Any = tensor._base
            if base is not None and base.grad_fn is not None:
                # A change in place of a view gives it a new history, which begins at its base.
                base.register_hook(functools.partial(self._pre_backward, state))
        return output

    def _pre_backward(self, state: Any, grad: torch.Tensor) -> None:
        if state._training_state is not type(state._training_state).PRE_BACKWARD:
            state._pre_backward(grad)


# ---------------------------------------------------------------- hooks on parameters


class UserHooks(OrderedDict[int, Any]):
    """What `Tensor.register_hook` of a shard writes to.

    Autograd reads the dictionary's own content, which is the engine's hook alone.

    Args:
        own: The engine's hook.
        users: The users' hooks, by the ids of their handles.
    """

    def __init__(self, own: Callable[..., Any], users: dict[int, Any]) -> None:
        super().__init__()
        super().__setitem__(-1, unserializable_hook(own))  # type: ignore[no-untyped-call]
        self.users = users

    def __setitem__(self, key: int, hook: Any) -> None:
        self.users[key] = hook

    def __delitem__(self, key: int) -> None:
        del self.users[key]

    def __contains__(self, key: object) -> bool:
        return key in self.users


def hooks_on(tensor: torch.Tensor) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks registered on a leaf: those on its gradient, and those after it."""
    return (
        getattr(tensor, "_backward_hooks", None) or OrderedDict(),
        getattr(tensor, "_post_accumulate_grad_hooks", None) or OrderedDict(),
    )


def follow_hooks(
    parameter: nn.Parameter, own: Callable[..., Any], users: dict[int, Any]
) -> UserHooks:
    """Keep users' hooks on a shard's gradient from autograd, and let it call the engine's.

    Args:
        parameter: The shard.
        own: Called with the gradient that autograd itself brings to the shard.
        users: Hooks that it takes over; handles of theirs stay good.
    """
    hooks = UserHooks(own, users)
    parameter._backward_hooks = hooks
    return hooks


def take_over_hooks(parameter: nn.Parameter, after: dict[int, Any]) -> None:
    """Let hooks for after the accumulation, of another parameter, be called for `parameter`."""
    if not after:
        return
    known: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if known:
        known.update(after)
    else:
        parameter._post_accumulate_grad_hooks = after


def wait_for_reductions(root: nn.Module) -> None:
    """Let the current stream wait for the reductions under way, in order to change gradients."""
    assert isinstance(root, FSDPModule)
    state: Any = root._get_fsdp_state()
    for event in state._comm_ctx._last_post_reduce_events.values():
        state._device_handle.current_stream().wait_event(event)
