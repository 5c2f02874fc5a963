"""Gradients: unreduced ones, hooks on them, the end of a backward, loss scaling."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import unserializable_hook

from shardplug.core._torch.groups import label_of, param_groups
from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import ModelError

__all__ = [
    "BackwardWatch",
    "GradScaler",
    "UserHooks",
    "add_whole_gradient",
    "after_gradient",
    "after_root_backward",
    "before_root_backward_ends",
    "both",
    "current_backward",
    "drop_unreduced_gradients",
    "end_of_backward",
    "follow_hooks",
    "grad_tensors",
    "has_unreduced_gradients",
    "hooks_on",
    "may_reduce_late",
    "take_over_hooks",
    "unreduced",
    "wait_for_reductions",
]


def unreduced(param: Any) -> list[torch.Tensor]:
    whole = getattr(param, "_unsharded_param", None)
    grads = [param.unsharded_accumulated_grad, None if whole is None else whole.grad]
    return [grad for grad in grads if grad is not None]


def has_unreduced_gradients(root: nn.Module) -> bool:
    """Whether this rank holds gradients that were not reduced over the ranks."""
    return any(unreduced(param) for group in param_groups(root) for param in group.fsdp_params)


def drop_unreduced_gradients(root: nn.Module, only: set[int] | None = None) -> None:
    """Forget gradients that were not reduced.

    Args:
        root: The sharded model.
        only: ids of the sharded parameters concerned; None means all.
    """
    for group in param_groups(root):
        for param in group.fsdp_params:
            if only is not None and id(param.sharded_param) not in only:
                continue
            param.unsharded_accumulated_grad = None
            whole = getattr(param, "_unsharded_param", None)
            if whole is not None:
                whole.grad = None


def grad_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient, in containers and, as of torch 2.13, in dataclasses."""
    collect = getattr(_common_utils, "collect_grad_tensors", None)
    if collect is not None:
        found: list[torch.Tensor] = list(collect(value))
        return found
    return [v for v in tree_leaves(value) if isinstance(v, torch.Tensor) and v.requires_grad]


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
            final = functools.partial(both, original, action)
            state._root_post_backward_final_callback = final  # type: ignore[method-assign]


def both(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


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
        self._groups = list(param_groups(root))
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
                if after and group.reduce_grads and any(map(unreduced, group.fsdp_params)):
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
        used = [param for param in trainable if unreduced(param)]
        for param in used:
            if any(grad.is_sparse for grad in unreduced(param)):
                raise ModelError(
                    f"Expected a dense gradient of {label_of(param)}, got a sparse one, which "
                    "cannot be reduced over ranks by rows. Use sparse=False."
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
                if unreduced(param) or not whole.requires_grad:
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


def current_backward() -> int:
    """Return a number of the backward that this thread runs; -1 for none."""
    return int(torch._C._current_graph_task_id())


def after_gradient(parameter: nn.Parameter, action: Callable[[torch.Tensor], None]) -> None:
    """Call `action` with the parameter each time its gradient was reduced, frozen now or not."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hook of a frozen one
    parameter.register_post_accumulate_grad_hook(action)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(trained)


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
            final = functools.partial(both, action, original)
            state._root_post_backward_final_callback = final  # type: ignore[method-assign]


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
