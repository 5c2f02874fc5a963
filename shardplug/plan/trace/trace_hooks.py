"""Marks in a trace where FSDP2 gathers and reduces, from hooks in the same places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.tensors import tree_leaves, tree_map
from shardplug.plan.sizes.layout import Placed
from shardplug.plan.trace.known_values import meta_like
from shardplug.plan.trace.recorder import Mark, Recorder

__all__ = ["Hooks", "TraceSettings"]


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What a trace depends on besides the model and the batch."""

    device: str
    checkpointing: bool
    autocast: torch.dtype | None
    cast_inputs: torch.dtype | None
    """Cast float inputs of units to this dtype, as FSDP2 does under mixed precision."""
    outputs_in_fp32: bool = False
    """Whether float outputs of the model are cast to fp32, as Accelerate does."""
    keep_outputs: bool = False
    """Whether the training loop still holds the model's outputs in the backward."""
    offload_activations: bool = False
    """Whether what is saved for the backward waits in CPU memory."""
    prefetch: int = 1
    """Blocks whose activations come back ahead of their backward."""


class Hooks:
    """Marks where FSDP2 gathers and reduces, from hooks in the same places."""

    def __init__(self, recorder: Recorder, placed: Placed, settings: TraceSettings) -> None:
        self._recorder = recorder
        self._placed = placed
        self._cast_to = settings.cast_inputs
        self._in_backward: set[int] = set()
        self._forwarded: set[int] = set()
        self._done: set[int] = set()
        self._meta: list[nn.Parameter] = []

    def to_meta(self, model: nn.Module) -> list[torch.Tensor]:
        """Put parameters, in the dtype of the computation, and buffers on meta, in place."""
        made: dict[int, torch.Tensor] = {}
        plans = self._placed.layout.parameters
        for plan, parameter in zip(plans, self._placed.parameters, strict=True):
            new = torch.empty(plan.shape, dtype=plan.compute, device="meta")
            self._meta.append(nn.Parameter(new, requires_grad=plan.trainable))
            made[id(parameter)] = self._meta[-1]
        for module in model.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = made[id(value)]  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in made:
                        made[id(buffer)] = meta_like(buffer)
                    module._buffers[name] = made[id(buffer)]
        return list(made.values())

    def attach(self, skipped: set[nn.Module]) -> None:
        """Hook the units, and their parameters' gradients."""
        outside = set(self._placed.modules) - {m for block in skipped for m in block.modules()}
        for number, module in enumerate(self._placed.modules):
            if module in outside:
                module.register_forward_pre_hook(
                    self._enter(number), prepend=True, with_kwargs=True
                )
                module.register_forward_hook(self._leave(number))
        for number, parameter in enumerate(self._meta):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._gradient(number)
                )

    def finish(self) -> None:
        """Close units that the backward did not leave, as their inputs need no gradient."""
        for number in sorted(self._forwarded - self._done):
            self._close(number)
        for parameter in self._meta:
            parameter.grad = None

    def _gradient(self, number: int) -> Callable[[torch.Tensor], None]:
        # Python's collector does not see such a hook: one that held `self`, and with it the
        # parameter and the model, would keep them for good.
        recorder = self._recorder

        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            recorder.gradient(number, parameter.grad)

        return hook

    def _enter(self, number: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if number in self._in_backward:  # recomputation
                return self._cast((args, kwargs))
            self._recorder.add(Mark.ENTER, number)
            self._forwarded.add(number)
            args, kwargs = self._cast((args, kwargs))
            tensors = [
                value
                for value in tree_leaves((args, kwargs))
                if isinstance(value, torch.Tensor) and value.requires_grad
            ]
            if not tensors or not torch.is_grad_enabled():
                return args, kwargs
            passed = _Passed.apply(self, number, *tensors)  # type: ignore[no-untyped-call]
            through = {id(old): new for old, new in zip(tensors, passed, strict=True)}
            return tree_map(lambda value: through.get(id(value), value), (args, kwargs))

        return hook

    def _cast(self, values: Any) -> Any:
        if self._cast_to is None:
            return values
        return tree_map(
            lambda v: (
                v.to(self._cast_to) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            ),
            values,
        )

    def _leave(self, number: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if number in self._in_backward:
                return
            self._recorder.add(Mark.LEAVE, number)
            for value in tree_leaves(output):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    value.register_hook(  # type: ignore[no-untyped-call]
                        lambda _: self._back(number)
                    )

        return hook

    def _back(self, number: int) -> None:
        if number not in self._in_backward:
            self._in_backward.add(number)
            self._recorder.add(Mark.BACK, number)

    def _close(self, number: int) -> None:
        self._in_backward.discard(number)
        self._done.add(number)
        self._recorder.add(Mark.DONE, number)
        for index in self._placed.layout.units[number].parameters:
            self._meta[index].grad = None


class _Passed(torch.autograd.Function):
    """Hands inputs of a unit on; its backward comes when the unit's backward has ended."""

    @staticmethod
    def forward(ctx: Any, hooks: Hooks, number: int, *tensors: torch.Tensor) -> Any:
        ctx.hooks, ctx.number = hooks, number
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.hooks._close(ctx.number)
        return (None, None, *grads)
