"""A trace cut at the schedule's events: what happens in between does not depend on the stage."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shardplug.plan.sizes.layout import Layout
from shardplug.plan.trace.recorder import MADE
from shardplug.plan.trace.trace import Event, Mark, Trace

__all__ = ["Segment", "Segments", "cut"]


_HOST = "host"


@dataclass(frozen=True, slots=True)
class Segment:
    """Allocations of the model itself up to one event of the schedule."""

    peak: dict[str, int]
    """Bytes by kind above those at the segment's beginning, where their sum is largest."""
    peak_total: int
    end: dict[str, int]
    """Bytes by kind above those at the beginning, at the end; may be below 0."""
    mark: Mark
    number: int
    size: int = 0
    """For a gradient: its bytes."""
    out: int = 0
    """Bytes of activations that leave for CPU memory."""
    host: int = 0
    """Bytes in CPU memory above those at the beginning, at the end, where it is not the device's:
    as much as torch takes for them, which rounds pinned memory up to a power of 2."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A whole micro-batch."""

    segments: tuple[Segment, ...]
    unit_of: dict[int, int]
    """Unit of each sharded parameter."""


def cut(trace: Trace, layout: Layout, *, on_cpu: bool = False) -> Segments:
    """Cut a trace, and tell logits and loss from other activations.

    What is allocated outside of units after the last block's forward, and before its backward,
    counts as logits and loss.

    Args:
        trace: The events of a micro-batch.
        layout: The model's units.
        on_cpu: Whether the device's memory is CPU memory, where activations in CPU memory count.
    """
    last = layout.blocks[-1] if layout.blocks else -1
    kind, inside = "activations", False
    sizes: dict[int, tuple[str, int]] = {}
    change: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    peak_total = total = out = host = 0
    found: list[Segment] = []
    for event in trace.events:
        mark, number, size = event
        if mark is Mark.AWAY:
            out += size
            if not on_cpu:
                sizes[number] = (_HOST, size)
                host += _pinned(size)
                continue
        if mark in MADE:
            sizes[number] = (kind if not inside else "activations", size)
            if mark is Mark.AWAY:
                sizes[number] = ("activations_cpu", size)
            change[sizes[number][0]] += size
            total += size
            if total > peak_total:
                peak_total, peak = total, change.copy()
            continue
        if mark is Mark.FREE:
            where, size = sizes[number]
            if where == _HOST:
                host -= _pinned(size)
                continue
            change[where] -= size
            total -= size
            continue
        if mark is Mark.FLOPS:
            continue
        if mark is Mark.GRADIENT:
            where, size = sizes[size]
            change[where] -= size
        found.append(Segment(dict(peak), peak_total, dict(change), mark, number, size, out, host))
        change, peak = Counter(), Counter()
        peak_total = total = out = host = 0
        kind, inside = _region(event, last, kind, inside)
    units = {p: index for index, unit in enumerate(layout.units) for p in unit.parameters}
    return Segments(tuple(found), units)


def _pinned(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()


def _region(event: Event, last: int, kind: str, inside: bool) -> tuple[str, bool]:
    if event.number != last or last < 0:
        return kind, inside
    if event.mark is Mark.LEAVE:
        return "logits_and_loss", False
    if event.mark is Mark.BACK:
        return "activations", False
    return kind, inside
