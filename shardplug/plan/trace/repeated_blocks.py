"""Traces equal blocks once and writes the others into the trace.

A run of equal blocks, `a` to `b`, is traced with only its first two and last two blocks computing:
those between hand their input on. In the trace each block is a slice of the forward and a slice
of the backward. The slices of the second and of the last but one must say the same, when each
storage is named by the block that allocated it (this one, the one before, the one after) and its
place there. Then the slices of the blocks between say the same too, and are written in. Where a
model does not fit this pattern every block is traced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardplug.plan.sizes.layout import Placed
from shardplug.plan.trace.recorder import MADE
from shardplug.plan.trace.trace import Batch, Event, Loss, Mark, Trace, TraceSettings, trace_step

__all__ = ["trace_model"]

_FEWEST = 5  # two at each end, and one that is not traced


def trace_model(
    placed: Placed, model: nn.Module, batch: Batch, loss: Loss | None, settings: TraceSettings
) -> Trace:
    """Trace one micro-batch, running as few of the repeated blocks as will do.

    Args:
        placed: The model's units.
        model: The model; it is left as it was.
        batch: What the model takes.
        loss: Computes the loss; by default the model's own.
        settings: Device, checkpointing, precision.

    Raises:
        Exception: Whatever the model raises on tensors without values.
    """
    runs = [run for run in _runs(placed) if len(run) >= _FEWEST]
    skipped = [block for run in runs for block in run[2:-2]]
    if skipped and all(_hands_on(placed, model, batch, loss, settings, run[0]) for run in runs):
        short = trace_step(placed, model, batch, loss, settings, skipped)
        events = list(short.events)
        try:
            for run in runs:
                events = _Writer(placed, run, events).write()
        except _Unlike:
            pass
        else:
            return Trace(tuple(events), short.kernels, short.traced_blocks)
    return trace_step(placed, model, batch, loss, settings)


class _Unlike(Exception):
    """The blocks of a run do not say the same in the trace."""


class _Seen(Exception):
    """Ends a forward after its first block."""


def _hands_on(
    placed: Placed,
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    settings: TraceSettings,
    block: nn.Module,
) -> bool:
    """Whether a block takes one tensor first and returns one like it, and nothing else."""
    fits = False

    def look(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        nonlocal fits
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and isinstance(output, torch.Tensor):
            fits = first.shape == output.shape and first.dtype == output.dtype
        raise _Seen

    handle = block.register_forward_hook(look)
    try:
        trace_step(placed, model, batch, loss, settings)
    except _Seen:
        return fits
    finally:
        handle.remove()
    return False


def _runs(placed: Placed) -> list[list[nn.Module]]:
    """Neighbouring blocks that are equal but for their weights and for their own number."""
    described = [_describe(block) for block in placed.blocks]
    numbers = {
        key
        for key, value in (described[0].items() if described else ())
        if type(value) is int and all(d.get(key) == n for n, d in enumerate(described))
    }
    runs: list[list[nn.Module]] = []
    before: dict[Any, Any] = {}
    for block, rows in zip(placed.blocks, described, strict=True):
        rows = {key: value for key, value in rows.items() if key not in numbers}
        if runs and rows == before:
            runs[-1].append(block)
        else:
            runs.append([block])
        before = rows
    return runs


def _describe(block: nn.Module) -> dict[Any, Any]:
    rows: dict[Any, Any] = {}
    for name, module in block.named_modules():
        rows[name, "class"] = type(module)
        for key, value in vars(module).items():
            if isinstance(value, (bool, int, float, str, type(None))) and key[0] != "_":
                rows[name, key] = value
        for registry in (module._parameters, module._buffers):
            for key, t in registry.items():
                if t is not None:
                    rows[name, key] = (tuple(t.shape), t.dtype, t.requires_grad)
    return rows


Name = tuple[str, int, int]  # ("f" or "b", block, place in the slice) or ("x", 0, storage)


@dataclass
class _Slices:
    """Where a block's events are, as ranges of the trace."""

    forward: tuple[int, int]
    backward: tuple[int, int]


class _Writer:
    """Writes the skipped blocks of one run into the events."""

    def __init__(self, placed: Placed, run: Sequence[nn.Module], events: list[Event]) -> None:
        self._events = events
        self._count = len(run)
        units = {module: number for number, module in enumerate(placed.modules)}
        numbers = {id(p): number for number, p in enumerate(placed.parameters)}
        self._members = [[units[m] for m in block.modules() if m in units] for block in run]
        self._owned = [[numbers[id(p)] for p in block.parameters()] for block in run]
        self._unit = [units[block] for block in run]
        shapes = {(len(m), len(o)) for m, o in zip(self._members, self._owned, strict=True)}
        if len(shapes) != 1:
            raise _Unlike
        self._real = [0, 1, self._count - 2, self._count - 1]
        self._slices = self._find()
        self._names = self._name()
        self._numbers: dict[Name, int] = {}

    def write(self) -> list[Event]:
        """Return the events with all blocks."""
        second, before_last = self._real[1], self._real[2]
        for part in ("forward", "backward"):
            one = self._relative(second, part)
            if one != self._relative(before_last, part):
                raise _Unlike
            if any(name[0] == "x" for _, name, _ in one if name is not None):
                raise _Unlike  # the block frees what lies outside of the run
        inside = {
            self._names[e.number]
            for block in self._real
            for span in (self._slices[block].forward, self._slices[block].backward)
            for e in self._events[slice(*span)]
            if e.mark is Mark.FREE
        }
        forward, backward = self._slices[second].forward, self._slices[second].backward
        found: list[Event] = []
        for index, event in enumerate(self._events):
            if index == forward[1]:
                for block in range(2, self._count - 2):
                    found += self._copy(second, block, "forward")
            if index == backward[0]:
                for block in range(self._count - 3, 1, -1):
                    found += self._copy(second, block, "backward")
            found.append(self._renamed(event, self._block_at(index)))
            if event.mark is Mark.FREE:
                name = self._names[event.number]
                if name[0] != "x" and name[1] == second and name not in inside:
                    for block in range(2, self._count - 2):
                        found.append(Event(Mark.FREE, self._number((name[0], block, name[2]))))
        return found

    def _find(self) -> dict[int, _Slices]:
        """Find where each block begins and ends."""
        place: dict[tuple[Mark, int], int] = {}
        for index, event in enumerate(self._events):
            if event.mark in (Mark.ENTER, Mark.LEAVE, Mark.BACK, Mark.DONE):
                key = (event.mark, event.number)
                if key in place and event.number in {self._unit[b] for b in self._real}:
                    raise _Unlike  # used twice
                place[key] = index
        spans: dict[int, _Slices] = {}
        try:
            for index, block in enumerate(self._real):
                unit = self._unit[block]
                after = self._real[index + 1] if index < 3 else None
                ahead = self._real[index - 1] if index else None
                forward_end = (
                    place[Mark.LEAVE, unit] + 1
                    if after is None
                    else place[Mark.ENTER, self._unit[after]]
                )
                backward_end = (
                    place[Mark.DONE, unit] + 1
                    if ahead is None
                    else place[Mark.BACK, self._unit[ahead]]
                )
                spans[block] = _Slices(
                    (place[Mark.ENTER, unit], forward_end), (place[Mark.BACK, unit], backward_end)
                )
        except KeyError as error:
            raise _Unlike from error
        order = [
            *(spans[block].forward for block in self._real),
            *(spans[block].backward for block in reversed(self._real)),
        ]
        flat = [edge for span in order for edge in span]
        if flat != sorted(flat):
            raise _Unlike
        return spans

    def _name(self) -> dict[int, Name]:
        names: dict[int, Name] = {}
        for block, slices in self._slices.items():
            for kind, span in (("f", slices.forward), ("b", slices.backward)):
                made = [e for e in self._events[slice(*span)] if e.mark in MADE]
                names.update({e.number: (kind, block, place) for place, e in enumerate(made)})
        for event in self._events:
            if event.mark in MADE:
                names.setdefault(event.number, ("x", 0, event.number))
        return names

    def _block_at(self, index: int) -> int | None:
        for block, slices in self._slices.items():
            for begin, end in (slices.forward, slices.backward):
                if begin <= index < end:
                    return block
        return None

    def _relative(self, block: int, part: str) -> list[tuple[Any, Name | None, int]]:
        """A slice with storages, units and parameters named as seen from its block."""
        place = self._real.index(block)
        before, after = self._real[place - 1], self._real[place + 1]
        rows: list[tuple[Any, Name | None, int]] = []
        for event in self._events[slice(*getattr(self._slices[block], part))]:
            mark, number, size = event
            if mark in (*MADE, Mark.FREE):
                kind, home, at = self._names[number]
                distance = {before: -1, block: 0, after: 1}.get(home)
                named = ("x", 0, number) if distance is None else (kind, distance, at)
                rows.append((mark, named, size))
            elif mark is Mark.GRADIENT:
                kind, home, at = self._names[size]
                if home != block or number not in self._owned[block]:
                    raise _Unlike
                rows.append(((mark, self._owned[block].index(number)), (kind, 0, at), 0))
            elif mark is Mark.FLOPS:
                rows.append((mark, None, size))
            elif number in self._members[block]:
                rows.append(((mark, self._members[block].index(number)), None, 0))
            else:
                raise _Unlike  # another unit within the slice
        return rows

    def _number(self, name: Name) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _renamed(self, event: Event, block: int | None) -> Event:
        """Give a storage its new number; neighbours of the gap now border on its blocks."""
        if event.mark is Mark.GRADIENT:
            return Event(event.mark, event.number, self._number(self._names[event.size]))
        if event.mark not in (*MADE, Mark.FREE):
            return event
        kind, home, at = self._names[event.number]
        if kind != "x" and (block, home) == (self._real[1], self._real[2]):
            home = block + 1  # type: ignore[operator]
        elif kind != "x" and (block, home) == (self._real[2], self._real[1]):
            home = block - 1  # type: ignore[operator]
        return Event(event.mark, self._number((kind, home, at)), event.size)

    def _copy(self, template: int, block: int, part: str) -> list[Event]:
        rows: list[Event] = []
        for mark, name, size in self._relative(template, part):
            if isinstance(mark, tuple):
                kind, at = mark
                if kind is Mark.GRADIENT:
                    assert name is not None
                    storage = self._number((name[0], block, name[2]))
                    rows.append(Event(kind, self._owned[block][at], storage))
                else:
                    rows.append(Event(kind, self._members[block][at]))
            elif name is None:
                rows.append(Event(mark, -1, size))
            else:
                number = self._number((name[0], block + name[1], name[2]))
                rows.append(Event(mark, number, size))
        return rows


def live_bytes(events: Sequence[Event]) -> int:
    """Return the bytes that are still held at the end of some events; for checks."""
    sizes = {e.number: e.size for e in events if e.mark in MADE}
    held: Counter[int] = Counter(sizes)
    held.subtract({e.number: sizes[e.number] for e in events if e.mark is Mark.FREE})
    return sum(held.values())
