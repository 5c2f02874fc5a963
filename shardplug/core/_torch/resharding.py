"""When FSDP2 gathers a unit's parameters and drops the gathered copies."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from shardplug.core._torch.gradients import both
from shardplug.core._torch.groups import groups_of, param_groups

__all__ = [
    "around_gathers",
    "before_state_dict",
    "forget_gather",
    "forwards_so_far",
    "gather_again_after",
    "in_own_backward",
    "pause_resets",
    "reset_iteration",
    "reset_sharded_param",
    "reshard_all",
    "reshard_own",
    "run_before_loading",
    "set_gather_ahead",
    "stays_gathered",
]


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
    for group in param_groups(root):
        group._all_gather_result = None
        group._post_forward_indices.clear()
        group._training_state = type(group._training_state).IDLE
        group._to_sharded()


def reshard_all(root: nn.Module) -> None:
    """Drop every gathered copy, and every gather that was started ahead and never used.

    FSDP2 keeps the result of an unused gather for the next use, which may come after the
    optimizer has changed the shards: the unit would then compute with stale parameters.
    """
    for group in param_groups(root):
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
    groups = list(param_groups(root))
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
    for group in groups_of(root._get_fsdp_state()):
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
    group._to_unsharded = functools.partial(both, group._to_unsharded, gathered)
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


def run_before_loading(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call `hook(module, state_dict, prefix, local_metadata, ...)` first when a module loads."""
    register: Any = module._register_load_state_dict_pre_hook
    register(hook, with_module=True)
    hooks = cast("OrderedDict[int, Any]", module._load_state_dict_pre_hooks)
    hooks.move_to_end(next(reversed(hooks)), last=False)


def before_state_dict(unit: nn.Module, hook: Callable[..., None]) -> RemovableHandle:
    """Run `hook` when `unit.state_dict()` begins, before FSDP2 shards the unit again."""
    hooks = cast("OrderedDict[int, Any]", unit._state_dict_pre_hooks)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    hooks.move_to_end(handle.id, last=False)
    return handle


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


def in_own_backward(unit: nn.Module) -> bool:
    """Whether FSDP2 has gathered a unit for its backward, in which a forward may run again."""
    assert isinstance(unit, FSDPModule)
    state: Any = unit._get_fsdp_state()
    return bool(state._training_state is type(state._training_state).PRE_BACKWARD)
