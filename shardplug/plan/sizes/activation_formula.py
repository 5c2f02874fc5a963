"""Activations by formula, for models that cannot be traced.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
section 4: a transformer layer keeps about 34 s b h bytes for the backward in 16 bits, without
the matrix of scores, which fused attention does not keep; with recomputation 2 s b h, its input.
Logits are kept in the computation's dtype and twice in fp32. Blocks of other makes are treated as
such a layer too, so figures may be off by a factor of 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardplug.plan.sizes.layout import Layout
from shardplug.plan.trace.trace import Event, Mark, Trace, TraceSettings

__all__ = ["estimated_trace"]

_KEPT = 17  # elements kept by a layer per token and width
_KEPT_INPUT = 1


def estimated_trace(layout: Layout, model: nn.Module, batch: Any, settings: TraceSettings) -> Trace:
    """Make up a trace of one micro-batch: units in order, with activations by formula."""
    tokens = _tokens(batch)
    width = _width(layout, model)
    events: list[Event] = []
    low = min((p.compute.itemsize for p in layout.parameters), default=4)
    layer, own = tokens * width * low * _KEPT, tokens * width * low * _KEPT_INPUT
    kept = own if settings.checkpointing else layer
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 0) or 0)
    order = [n for n, unit in enumerate(layout.units) if not unit.block and n]
    order += list(layout.blocks)
    number = 0
    events.append(Event(Mark.ENTER, 0))
    for unit in order:
        events += [Event(Mark.ENTER, unit), Event(Mark.ALLOCATE, unit, kept)]
        events.append(Event(Mark.LEAVE, unit))
        number = max(number, unit)
    logits = len(layout.units)
    events.append(Event(Mark.ALLOCATE, logits, tokens * vocabulary * (low + 8)))
    events += [Event(Mark.LEAVE, 0), Event(Mark.LOSS)]
    fresh = logits + 1
    for unit in [0, *reversed(order)]:
        events.append(Event(Mark.BACK, unit))
        recomputes = settings.checkpointing and layout.units[unit].block
        if recomputes:
            events.append(Event(Mark.ALLOCATE, fresh, layer))
            fresh += 1
        outside = () if unit else layout.replicated
        for parameter in (*layout.units[unit].parameters, *outside):
            plan = layout.parameters[parameter]
            if plan.trainable:
                events.append(Event(Mark.ALLOCATE, fresh, plan.numel * plan.compute.itemsize))
                events.append(Event(Mark.GRADIENT, parameter, fresh))
                fresh += 1
        if unit == 0:
            events.append(Event(Mark.FREE, logits))
            continue
        if recomputes:
            events.append(Event(Mark.FREE, events_of_layer(events)))
        events += [Event(Mark.FREE, unit), Event(Mark.DONE, unit)]
    per_token = 2 * layout.num_parameters + 4 * layout.num_trainable
    recomputed = 2 * layout.num_parameters if settings.checkpointing else 0
    events.append(Event(Mark.FLOPS, -1, tokens * (per_token + recomputed)))
    events += [Event(Mark.DONE, 0), Event(Mark.END)]
    return Trace(tuple(events), frozenset(), 0)


def events_of_layer(events: list[Event]) -> int:
    """Return the storage of the layer that is being recomputed: the latest of no gradient."""
    gradients = {event.size for event in events if event.mark is Mark.GRADIENT}
    return next(
        event.number
        for event in reversed(events)
        if event.mark is Mark.ALLOCATE and event.number not in gradients
    )


def _tokens(batch: Any) -> int:
    """Samples times sequence length, from the first tensor with both."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    values = [values] if isinstance(values, torch.Tensor) else list(values)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    for tensor in tensors:
        if tensor.dim() >= 2:
            return int(tensor.shape[0] * tensor.shape[1])
    return max((int(tensor.numel()) for tensor in tensors), default=1)


def _width(layout: Layout, model: nn.Module) -> int:
    """Width of the residual stream: the configuration's, else the most common vector's."""
    width = getattr(getattr(model, "config", None), "hidden_size", None)
    if isinstance(width, int):
        return width
    vectors = Counter(p.shape[0] for p in layout.parameters if len(p.shape) == 1 and p.sharded)
    if vectors:
        return vectors.most_common(1)[0][0]
    return max((p.shape[-1] for p in layout.parameters if p.shape), default=1)
