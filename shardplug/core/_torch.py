"""The one file that touches private names of torch.

FSDP2 keeps its books (gathered copies, unreduced gradients) in private objects; the engine needs
to read them for its memory account and for the checks that plain FSDP2 leaves out. Tested with
the torch versions that pyproject.toml admits; a test fails if another file of the package
reaches for a private name.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import _muon
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from shardplug.errors import ModelError

__all__ = [
    "backward_within_modes",
    "CONVERT_BEFORE",
    "BackwardWatch",
    "GradScaler",
    "TensorWithoutMemory",
    "TorchDispatchMode",
    "WeakTensorKeyDictionary",
    "after_gradient",
    "after_root_backward",
    "announce_collectives",
    "attention_by_kernel",
    "before_state_dict",
    "book_tensors",
    "changed_layout",
    "clamp_all",
    "close_mesh",
    "copies_of_all",
    "copy_all",
    "default_tcp_store",
    "drop_unreduced_gradients",
    "forwards_so_far",
    "fused_attention_on_cpu",
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
    "laid_out_like",
    "layout_of_shard",
    "leave_unused_inputs_alone",
    "local_tensor",
    "managed_parameters",
    "may_reduce_late",
    "multiply_all",
    "orthogonalise_whole_matrices",
    "own_groups",
    "persistent_buffers",
    "refresh_dtypes",
    "register_extra_outputs",
    "replaced_parameters",
    "replicas_of",
    "reset_iteration",
    "reshard_all",
    "reshard_own",
    "resting_layouts",
    "run_on_meta",
    "save_tensors",
    "set_collectives",
    "set_replica_sum",
    "set_gather_ahead",
    "settle_root",
    "settle_shard",
    "sharded_of_gathered",
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
    return {
        id(param._unsharded_param): param.sharded_param
        for group in _param_groups(root)
        for param in group.fsdp_params
        if hasattr(param, "_unsharded_param")
    }


def settle_root(root: nn.Module) -> None:
    """Make `root` the FSDP root now, as its first forward would.

    A part of the model that is called before the whole would else become a root of its own.
    """
    assert isinstance(root, FSDPModule)
    root._get_fsdp_state()._lazy_init()


def book_tensors(root: nn.Module) -> dict[str, list[torch.Tensor]]:
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


def register_extra_outputs(unit: nn.Module, tensors: Iterable[torch.Tensor]) -> None:
    """Gather `unit` again before the backward reaches it through `tensors`.

    FSDP2 hooks the outputs of a unit's forward. A tensor that the forward keeps on a module (an
    auxiliary loss, router logits) is a second way into the unit's backward.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    for tensor in tensors:
        state._register_pre_backward_hook(tensor)


def leave_unused_inputs_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Give no gradient, instead of zeros, to inputs that the unit turns out not to use.

    FSDP2 passes the inputs of a unit through an autograd function of its own.
    """
    for value in (*args, *kwargs.values()):
        node: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
        if type(node).__name__ == "RegisterPostBackwardFunctionBackward":
            node.set_materialize_grads(False)
            return  # one function takes all inputs


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
        self._on_backward = on_backward
        for group in _param_groups(root):
            group.post_backward = functools.partial(self._post_backward, group, group.post_backward)

    def restart(self) -> None:
        """Forget what was seen."""
        self.used.clear()
        self.ran = False

    def _post_backward(self, group: Any, original: Callable[..., None], *unused: Any) -> None:
        self._on_backward()
        self.ran = True
        if not any(hasattr(param, "_unsharded_param") for param in group.fsdp_params):
            return  # never gathered, so that torch would look for gradients on no copy
        trainable = [
            param
            for param in group.fsdp_params
            if param.sharded_param.requires_grad and hasattr(param, "_unsharded_param")
        ]
        used = [param for param in trainable if _unreduced(param)]
        self.used.update(id(param.sharded_param) for param in used)
        # A unit that is neither gathered nor holds gradients took no part in this backward.
        if group.reduce_grads and (used or group.is_unsharded):
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


def guard_partial_reads() -> None:
    """Make values of whole sharded tensors right, or an error, where torch's are neither.

    `parameter.norm()` on a sharded parameter is a DTensor whose ranks each hold their own part;
    torch's `.item()` would return that part with no error, and differently on each rank: it raises.
    Such a tensor is reduced before it is changed in place, which torch refuses. The largest and the
    smallest value of a tensor leave ranks without rows out, where torch raises on those ranks
    alone.
    """
    for name in (*_CHANGED_IN_PLACE, *_EXTREMES):
        original = getattr(DTensor, name)
        if not getattr(original, "_shardplug_guard", False):
            guard = _reduced_first if name in _CHANGED_IN_PLACE else _extreme
            setattr(DTensor, name, guard(name, original))
    for name in _GUARDED:
        original = getattr(DTensor, name, None)
        if original is None or getattr(original, "_shardplug_guard", False):
            continue
        setattr(DTensor, name, _guarded(name, original))


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


def _reduced_first(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def change(self: DTensor, *args: Any, **kwargs: Any) -> Any:
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


def settle_shard(param: Any) -> None:
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
