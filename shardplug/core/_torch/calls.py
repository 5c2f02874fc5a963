"""FSDP2's hooks on the calls of units: their inputs, their outputs, pausing them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, _common_utils
from torch.utils._pytree import tree_map

from shardplug.core._torch.gradients import grad_tensors
from shardplug.core._torch.groups import param_groups

__all__ = [
    "PausableUnits",
    "hide_managed_mark",
    "let_inputs_change",
    "persistent_buffers",
    "register_extra_outputs",
    "uncompiled",
]


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
    for group in param_groups(root):
        own = group._register_post_backward_hook
        register = functools.partial(_register_inputs, group, own)
        group._register_post_backward_hook = register


def _register_inputs(group: Any, original: Any, args: Any, kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return args, kwargs
    if torch._C._are_functorch_transforms_active():
        return original(args, kwargs)
    tensors = grad_tensors((args, kwargs))
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    if not distinct:
        return args, kwargs
    made: Any = _UnitInputs.apply(group, *distinct)  # type: ignore[no-untyped-call]
    inside = {id(old): new for old, new in zip(distinct, made, strict=True)}
    return _with_grad_tensors((args, kwargs), [inside[id(tensor)] for tensor in tensors])


def _with_grad_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    replace = getattr(_common_utils, "replace_grad_tensors", None)
    left = iter(tensors)
    if replace is not None:
        return replace(value, left)
    return tree_map(
        lambda v: next(left) if isinstance(v, torch.Tensor) and v.requires_grad else v, value
    )


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
        for tensor in grad_tensors(output):
            tensor.register_hook(state._pre_backward)  # type: ignore[no-untyped-call]
            base: Any = tensor._base
            if base is not None and base.grad_fn is not None:
                # A change in place of a view gives it a new history, which begins at its base.
                base.register_hook(functools.partial(self._pre_backward, state))
        return output

    def _pre_backward(self, state: Any, grad: torch.Tensor) -> None:
        if state._training_state is not type(state._training_state).PRE_BACKWARD:
            state._pre_backward(grad)
