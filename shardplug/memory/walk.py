"""A walk through one optimizer step: what a rank holds at each moment, by kind.

The engine knows its own schedule: when a unit is gathered, when its copy goes and when gradients
are reduced is in the stage table. The walk plays the events of a trace under that schedule and
adds what FSDP2 allocates around them: the gathered copies, the buffers of the collectives, the
reduced gradients. Every figure is bytes of tensor storages; the peak is the largest sum.

Two kinds of ranks are modelled. On CPU ranks gathers run ahead asynchronously and reductions are
direct messages (`shardplug.core.peer`): each peer's part is received into a buffer of its own, and
the last reduction is completed while the next one starts. On GPUs the collectives are FSDP2's own:
the result of a forward gather is kept until the next one has been copied out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardplug.core.stage import Stage
from shardplug.memory.layout import Layout
from shardplug.memory.optimizers import OptimizerKind
from shardplug.memory.segments import Segment, Segments
from shardplug.memory.trace import Mark

__all__ = ["PLAN_KINDS", "Moved", "Point", "Setup", "Walk", "walk"]

PLAN_KINDS = (
    "master_shards",
    "gathered",
    "gradients",
    "optimizer_state",
    "activations",
    "logits_and_loss",
    "communication",
    "optimizer_work",
    "buffers",
)
"""Kinds of tensors on the device, in the order they are drawn."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a walk depends on besides the model and its trace."""

    stage: Stage
    shards: int
    replicas: int = 1
    shard: int = 0
    """Which shard: the first is never smaller than another."""
    accumulate: int = 1
    prefetch: int = 1
    device: str = "cuda"
    optimizer: OptimizerKind = OptimizerKind()
    stale_gradients: bool = False
    """Whether `zero_grad` comes between forward and backward, as in Lightning."""
    state_away: bool = False
    """Whether optimizer state, and the gradients it needs, live off the device."""
    masters_away: bool = False
    """Whether master shards live off the device."""


@dataclass(frozen=True, slots=True)
class Point:
    """The most that was held between two events of the schedule."""

    phase: str
    """"forward", "backward", "step" or "rest"."""
    unit: str
    """The unit whose event ended the stretch."""
    micro_batch: int
    held: dict[str, int]
    """Bytes by kind, of `PLAN_KINDS`, at the moment of the stretch's largest total."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.held.values())


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that one rank sends per optimizer step, as section 7 of the ZeRO paper counts."""

    gathers: int
    reductions: int
    replicas: int
    """All-reduces of gradient shards between replicas."""

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.gathers + self.reductions + self.replicas


@dataclass(frozen=True, slots=True)
class Walk:
    """The predicted curve of one optimizer step in steady state."""

    points: tuple[Point, ...]
    phases: dict[str, dict[str, int]]
    """Bytes by kind at the ends of the phases: "after_forward", "after_backward_between",
    "after_backward", "after_step", "at_rest"."""
    moved: Moved

    @property
    def peak(self) -> Point:
        """The largest point."""
        return max(self.points, key=lambda point: point.total)


def walk(layout: Layout, segments: Segments, setup: Setup) -> Walk:
    """Play one optimizer step.

    Args:
        layout: The model's units.
        segments: The trace, cut at the schedule's events.
        setup: Stage, ranks, accumulation.

    Returns:
        The curve, what is held at the end of each phase, and the bytes moved.
    """
    return _Walker(layout, segments, setup).run()


class _Walker:
    def __init__(self, layout: Layout, segments: Segments, setup: Setup) -> None:
        self._layout = layout
        self._segments = segments
        self._setup = setup
        self._sizes = [_unit_sizes(layout, unit, setup) for unit in range(len(layout.units))]
        self._order = list(layout.blocks)
        self._ahead = setup.device == "cpu" and setup.prefetch > 0
        self._held: Counter[str] = Counter(dict.fromkeys(PLAN_KINDS, 0))
        self._points: list[Point] = []
        self._high: dict[str, int] = {}
        self._high_total = -1
        self._phase = "forward"
        self._micro = 0
        self._last = True
        self._sent: Counter[str] = Counter()
        # What the collectives hold on to.
        self._gathered: set[int] = set()
        self._started: set[int] = set()
        self._kept_result = 0  # of the latest forward gather, on GPUs
        self._kept_input = 0  # of the latest reduction
        self._in_flight = 0  # buffers of the reduction under way, on CPU ranks
        # Gradients by unit: whole ones by parameter, and what is already in the reduction's dtype.
        self._whole: dict[int, dict[int, int]] = {}
        self._accumulated: dict[int, dict[int, int]] = {}
        self._reduced: dict[int, int] = {}
        self._forward_order: list[int] = []

    # ------------------------------------------------------------------ the books

    def _add(self, kind: str, size: int) -> None:
        self._held[kind] += size
        if size > 0:
            total = sum(self._held.values())
            if total > self._high_total:
                self._high_total, self._high = total, dict(self._held)

    def _play(self, segment: Segment) -> None:
        """Add what the model itself allocates between two events."""
        at_peak = sum(self._held.values()) + segment.peak_total
        if at_peak > self._high_total:
            self._high_total = at_peak
            self._high = {k: n + segment.peak.get(k, 0) for k, n in self._held.items()}
        for kind, size in segment.end.items():
            self._held[kind] += size

    def _mark(self, unit: int) -> None:
        name = self._layout.units[unit].name if unit >= 0 else ""
        if self._high_total >= 0:
            self._points.append(Point(self._phase, name, self._micro, self._high))
        self._high, self._high_total = dict(self._held), sum(self._held.values())

    # ------------------------------------------------------------------ the step

    def run(self) -> Walk:
        setup, phases = self._setup, dict[str, dict[str, int]]()
        self._rest()
        grads = sum(size.master_trained for size in self._sizes) + self._replicated_gradients()
        if setup.stale_gradients and not setup.state_away:
            self._add("gradients", grads)
        # Beyond the first two and the last, the micro-batches of a window are alike.
        shown = list(range(setup.accumulate))
        if len(shown) > 3:
            shown = [0, 1, setup.accumulate - 1]
        for index in shown:
            self._micro, self._last = index, index == setup.accumulate - 1
            before = Counter(self._sent)
            self._phase = "forward"
            self._run_micro_batch(phases, stale=grads if index == 0 else 0)
            if index == 1 and not self._last:
                repeats = setup.accumulate - len(shown)
                for kind, size in (self._sent - before).items():
                    self._sent[kind] += size * repeats
        self._phase = "step"
        self._step()
        phases["after_step"] = dict(self._held)
        self._held["gradients"] = 0
        self._reduced.clear()
        self._phase = "rest"
        self._high_total = -1
        self._add("buffers", 0)
        self._high, self._high_total = dict(self._held), sum(self._held.values())
        self._mark(-1)
        phases["at_rest"] = dict(self._held)
        sent = self._sent
        return Walk(
            tuple(self._points),
            phases,
            Moved(sent["gathers"], sent["reductions"], sent["replicas"]),
        )

    def _rest(self) -> None:
        setup, layout = self._setup, self._layout
        masters = sum(size.masters for size in self._sizes)
        state = sum(
            setup.optimizer.state_bytes(p.own(setup.shards, setup.shard), p.master)
            for p in layout.parameters
            if p.trainable
        )
        whole = sum(layout.parameters[i].numel * _width(layout, i) for i in layout.replicated)
        self._add("master_shards", (0 if setup.masters_away else masters) + whole)
        self._add("optimizer_state", 0 if setup.state_away else state)
        self._add("buffers", layout.buffer_bytes)

    def _replicated_gradients(self) -> int:
        layout = self._layout
        return sum(
            layout.parameters[i].numel * _width(layout, i)
            for i in layout.replicated
            if layout.parameters[i].trainable
        )

    def _run_micro_batch(self, phases: dict[str, dict[str, int]], stale: int) -> None:
        for segment in self._segments.segments:
            self._play(segment)
            mark, number = segment.mark, segment.number
            if mark is Mark.ENTER:
                self._enter(number)
            elif mark is Mark.LEAVE:
                self._leave(number)
            elif mark is Mark.BACK:
                self._back(number)
            elif mark is Mark.DONE:
                self._done(number)
            elif mark is Mark.GRADIENT:
                self._gradient(number, segment.size)
                continue
            elif mark is Mark.LOSS:
                phases.setdefault("after_forward", dict(self._held))
                self._phase = "backward"
                if stale and self._setup.stale_gradients:
                    self._held["gradients"] -= stale
            elif mark is Mark.END:
                self._end()
                key = "after_backward" if self._last else "after_backward_between"
                phases[key] = dict(self._held)
            self._mark(number)

    def _step(self) -> None:
        setup = self._setup
        if not setup.state_away:
            shards = [
                p.own(setup.shards, setup.shard) * p.master.itemsize
                for p in self._layout.parameters
                if p.trainable
            ]
            work = setup.optimizer.work_bytes(shards, setup.device)
            self._add("optimizer_work", work)
            self._held["optimizer_work"] -= work
        self._mark(-1)

    # ------------------------------------------------------------------ gathering

    def _enter(self, unit: int) -> None:
        self._gather(unit)
        self._wait(unit, in_forward=True)
        if unit in self._order:
            place = self._order.index(unit)
            for other in self._order[place + 1 : place + 1 + self._setup.prefetch]:
                self._gather(other)

    def _leave(self, unit: int) -> None:
        if self._layout.units[unit].parameters:
            self._forward_order.append(unit)
        if unit != 0:
            if self._setup.stage.reshard_after_forward:
                self._reshard(unit)
            return
        # The outermost call ends: the last result goes, and in stage 3 the root's copy.
        self._held["communication"] -= self._kept_result
        self._kept_result = 0
        if self._setup.stage.reshard_after_forward:
            self._reshard(unit)

    def _back(self, unit: int) -> None:
        self._gather(unit)
        self._wait(unit, in_forward=False)
        for other in self._backward_prefetch(unit):
            self._gather(other)

    def _backward_prefetch(self, unit: int) -> Sequence[int]:
        if unit in self._order and self._setup.prefetch:
            place = self._order.index(unit)
            explicit = self._order[max(0, place - self._setup.prefetch) : place][::-1]
            if explicit:
                return explicit
        # FSDP2's own choice: the unit whose forward ended before this one's.
        if unit in self._forward_order:
            place = len(self._forward_order) - 1 - self._forward_order[::-1].index(unit)
            return self._forward_order[place - 1 : place] if place else ()
        return ()

    def _gather(self, unit: int) -> None:
        if unit in self._gathered or unit in self._started:
            return
        self._started.add(unit)
        size, shards = self._sizes[unit], self._setup.shards
        if shards == 1:
            return
        self._add("communication", size.cast)
        self._add("communication", size.gathered)
        self._held["communication"] -= size.cast
        self._sent["gathers"] += size.gathered // shards * (shards - 1)

    def _wait(self, unit: int, *, in_forward: bool) -> None:
        if unit not in self._started:
            return
        self._started.discard(unit)
        self._gathered.add(unit)
        size = self._sizes[unit]
        if self._setup.shards == 1:
            self._copy_alone(unit)
            return
        if in_forward:
            self._held["communication"] -= self._kept_result
            self._kept_result = 0
        self._add("gathered", size.gathered)
        if in_forward and not self._ahead:
            self._kept_result = size.gathered
        else:
            self._held["communication"] -= size.gathered

    def _copy_alone(self, unit: int) -> None:
        """On one rank each parameter is cast and copied; one cast is alive beside the next."""
        before = 0
        for cast, whole in self._sizes[unit].each:
            self._add("communication", cast)
            self._held["communication"] -= before
            self._add("gathered", whole)
            before = cast
        self._held["communication"] -= before

    def _reshard(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self._held["gathered"] -= self._sizes[unit].gathered

    # ------------------------------------------------------------------ reducing

    def _gradient(self, parameter: int, size: int) -> None:
        """A whole gradient is there: it was an activation up to now."""
        unit = self._segments.unit_of.get(parameter)
        if unit is None:
            # Not sharded: it stays, and a later micro-batch adds to it in place.
            if -1 - parameter not in self._reduced:
                self._reduced[-1 - parameter] = size
                self._add("gradients", size)
            return
        whole = self._whole.setdefault(unit, {})
        if parameter in whole:
            return  # added in place, the new one is gone
        whole[parameter] = size
        self._add("gradients", size)

    def _done(self, unit: int) -> None:
        setup, size = self._setup, self._sizes[unit]
        whole = self._whole.pop(unit, {})
        held = self._accumulated.pop(unit, {})
        for parameter in [p for p in whole if p in held]:
            self._held["gradients"] -= whole.pop(parameter)
        reduces = self._last or setup.stage.reduce_every_backward
        if not reduces:
            if setup.stage.reshard_every_backward:
                self._reshard(unit)
            self._keep_whole(unit, whole, held)
            return
        if whole or held or unit in self._gathered:
            self._fill_unused(unit, whole, held)
        if self._last or setup.stage.reshard_every_backward:
            self._reshard(unit)
        if whole or held:
            self._reduce(unit, size, sum(whole.values()) + sum(held.values()))

    def _keep_whole(self, unit: int, whole: dict[int, int], held: dict[int, int]) -> None:
        """Keep gradients that accumulate, in the dtype of the reduction."""
        dtype = self._layout.reduce
        for parameter in list(whole):
            plan = self._layout.parameters[parameter]
            if dtype is None or dtype == plan.compute:
                continue
            held[parameter] = plan.numel * dtype.itemsize
            self._add("gradients", held[parameter])
            self._held["gradients"] -= whole.pop(parameter)
        if whole:
            self._whole[unit] = whole
        if held:
            self._accumulated[unit] = held

    def _fill_unused(self, unit: int, whole: dict[int, int], held: dict[int, int]) -> None:
        for parameter in self._layout.units[unit].parameters:
            plan = self._layout.parameters[parameter]
            if not plan.trainable or parameter in whole or parameter in held:
                continue
            dtype = self._layout.reduce if held and self._layout.reduce else plan.compute
            whole[parameter] = plan.numel * dtype.itemsize
            self._add("gradients", whole[parameter])

    def _reduce(self, unit: int, size: _UnitSizes, grads: int) -> None:
        setup = self._setup
        self._held["communication"] -= self._kept_input
        self._kept_input = 0
        self._add("communication", size.reduce_input)
        self._held["gradients"] -= grads
        output = size.reduce_input // setup.shards
        self._add("gradients", output)
        self._sent["reductions"] += output * (setup.shards - 1)
        if setup.replicas > 1:
            # A ring all-reduce sends each element twice, but for the ring's last part.
            self._sent["replicas"] += 2 * output * (setup.replicas - 1) // setup.replicas
        casts = size.reduce_width != size.master_width
        first = unit not in self._reduced
        if setup.device == "cpu" and setup.shards > 1:
            received = output * (setup.shards - 1)
            self._add("communication", received)
            # Starting this reduction completes the one before.
            self._held["communication"] -= self._in_flight
            self._in_flight = received + size.reduce_input
            if casts or not first or setup.replicas > 1:
                self._held["communication"] -= received
                self._in_flight, self._kept_input = 0, size.reduce_input
        else:
            self._kept_input = size.reduce_input
        master = output // size.reduce_width * size.master_width
        if casts:
            self._add("gradients", master)
            self._held["gradients"] -= output
        if setup.state_away:
            self._held["gradients"] -= master  # it follows the optimizer
        elif first:
            self._reduced[unit] = master
        else:
            self._held["gradients"] -= master  # added to the earlier shard

    def _end(self) -> None:
        self._held["communication"] -= self._kept_input + self._in_flight
        self._kept_input = self._in_flight = 0
        for unit in list(self._started):  # started ahead, and not used
            self._started.discard(unit)
            if self._setup.shards > 1:
                self._held["communication"] -= self._sizes[unit].gathered
        self._forward_order.clear()
        # What is left is the batch, which the next one replaces.
        self._held["activations"] = self._held["logits_and_loss"] = 0


@dataclass(frozen=True, slots=True)
class _UnitSizes:
    """Bytes of one unit under a setup."""

    masters: int
    master_trained: int
    gathered: int
    cast: int
    """The flat copy in the computation's dtype that a gather starts from."""
    each: tuple[tuple[int, int], ...]
    """(cast, gathered) of each parameter, on one rank."""
    reduce_input: int
    reduce_width: int
    master_width: int


def _width(layout: Layout, parameter: int) -> int:
    return layout.parameters[parameter].master.itemsize


def _unit_sizes(layout: Layout, number: int, setup: Setup) -> _UnitSizes:
    shards = setup.shards
    plans = [layout.parameters[index] for index in layout.units[number].parameters]
    shard = [(plan, plan.padded(shards)) for plan in plans]
    trained = [(plan, n) for plan, n in shard if plan.trainable]
    reduce = layout.reduce or (trained[0][0].compute if trained else None)
    return _UnitSizes(
        masters=sum(n * plan.master.itemsize for plan, n in shard),
        master_trained=sum(n * plan.master.itemsize for plan, n in trained),
        gathered=sum(n * shards * plan.compute.itemsize for plan, n in shard),
        cast=sum(n * plan.compute.itemsize for plan, n in shard if plan.compute != plan.master),
        each=tuple(
            (
                n * plan.compute.itemsize if plan.compute != plan.master else 0,
                n * plan.compute.itemsize,
            )
            for plan, n in shard
        ),
        reduce_input=sum(n * shards for _, n in trained) * (reduce.itemsize if reduce else 0),
        reduce_width=reduce.itemsize if reduce else 1,
        master_width=trained[0][0].master.itemsize if trained else 1,
    )
