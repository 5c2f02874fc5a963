"""One micro-batch traced on tensors without memory: every allocation, in order.

The model's parameters are put on meta in the dtype they are computed with, a forward and a
backward run, and every storage that comes and goes is noted, with marks where FSDP2's hooks would
gather and reduce. No weights are needed and no memory is used; what is kept for the backward,
what lives only for a moment and when each gradient arrives are torch's own doing.

Repeated blocks are traced once: see `repeat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.calls import uncompiled
from shardplug.core._torch.tensors import tree_leaves, tree_map
from shardplug.core._torch.tracing import backward_within_modes
from shardplug.core.activations.checkpointing import checkpoint_activations
from shardplug.errors import ModelError
from shardplug.plan.sizes.layout import Placed
from shardplug.plan.trace.attention import as_on_device
from shardplug.plan.trace.recorder import MADE, Event, Mark, Recorder
from shardplug.plan.trace.trace_hooks import Hooks, TraceSettings
from shardplug.plan.trace.trace_offload import traced_offload

__all__ = ["Event", "Mark", "Trace", "TraceSettings", "trace_step"]

Batch = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor
Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Trace:
    """The events of one micro-batch."""

    events: tuple[Event, ...]
    kernels: frozenset[str]
    """Attention kernels that were used."""
    traced_blocks: int
    """Blocks that were really run; the others repeat one of them."""

    @property
    def flops(self) -> int:
        """Floating point operations of forward and backward, recomputation included."""
        return sum(event.size for event in self.events if event.mark is Mark.FLOPS)


def loss_or_outputs(output: Any) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the loss in what a model returned, if any, and all tensors that can be trained on."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    tensors = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return loss if isinstance(loss, torch.Tensor) else None, tensors


def default_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Call the model and take its `loss`, or the sum of its output where it has none."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    loss, tensors = loss_or_outputs(output)
    if loss is not None:
        return loss
    if not tensors:
        raise ModelError(
            f"Expected {type(model).__name__} to return a loss, or a tensor that depends on its "
            f"parameters, got {type(output).__name__}: give `loss=`, a function of (model, batch)."
        )
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()


def trace_step(
    placed: Placed,
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    settings: TraceSettings,
    skipped: Iterable[nn.Module] = (),
) -> Trace:
    """Run one forward and backward on meta and note what is allocated.

    The model is left as it was: on its device, with its hooks, its own modes and values.

    Args:
        placed: The model's units.
        model: The model.
        batch: What the model takes; tensors of any device, of which only shapes are used.
        loss: Computes the loss; by default the model's own.
        settings: Device, checkpointing, precision.
        skipped: Blocks that hand their first argument on instead of computing.

    Raises:
        Exception: Whatever the model raises on meta tensors, for example when it looks at values.
    """
    skipped = set(skipped)
    used: set[str] = set()
    recorder = Recorder()
    with _restored(model), uncompiled(), recorder.settled():
        if settings.checkpointing:
            checkpoint_activations(model, placed.blocks)
        model.train()
        hooks = Hooks(recorder, placed, settings)
        states = hooks.to_meta(model)
        recorder.ignore(states)
        for block in skipped:
            block.forward = _hand_on
        if settings.outputs_in_fp32:
            model.register_forward_hook(lambda _, args, output: _in_fp32(output))
        hooks.attach(skipped)
        offload: AbstractContextManager[None] = nullcontext()
        if settings.offload_activations:
            offload = traced_offload(model, placed.blocks, states, recorder, settings)
        with as_on_device(settings.device, settings.autocast, used), recorder:
            inputs = tree_map(recorder.known.meta_like, batch)
            kept: list[Any] = []
            if settings.keep_outputs:
                model.register_forward_hook(lambda _, args, output: kept.append(output))
            with offload:
                value = (loss or default_loss)(model, inputs)
            if not isinstance(value, torch.Tensor) or not value.requires_grad:
                raise ModelError(
                    "Expected a loss that depends on trainable parameters, got "
                    f"{type(value).__name__}: give `loss=`, a function of (model, batch)."
                )
            recorder.add(Mark.LOSS)
            backward_within_modes(value)
            hooks.finish()
            recorder.add(Mark.END)
            del value
            kept.clear()
    events = tuple(_with_bytes(recorder.events))
    return Trace(events, frozenset(used), len(placed.blocks) - len(skipped))


def _with_bytes(events: Sequence[Event]) -> Iterator[Event]:
    """Leave out storages of no bytes, which wrappers of a block make though it hands on."""
    empty = {event.number for event in events if event.mark in MADE and not event.size}
    empty -= {event.size for event in events if event.mark is Mark.GRADIENT}
    for event in events:
        if event.mark not in (*MADE, Mark.FREE) or event.number not in empty:
            yield event


def _hand_on(first: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return first


def _in_fp32(output: Any) -> Any:
    return tree_map(
        lambda v: v.float() if isinstance(v, torch.Tensor) and v.is_floating_point() else v, output
    )


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Put every module back as it was: attributes, registries, hooks."""
    before = [
        (module, dict(vars(module)), {k: v.copy() for k, v in vars(module).items() if _is_dict(v)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, registries in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in registries.items():
                registry = attributes[name]
                registry.clear()
                registry.update(content)


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)
