"""A walk through one optimizer step: what a rank holds at each moment, by kind.

The engine knows its own schedule: when a unit is gathered, when its copy goes and when gradients
are reduced is in the stage table. The walk plays the events of a trace under that schedule and
adds what FSDP2 allocates around them: the gathered copies, the buffers of the collectives, the
reduced gradients. Every figure is bytes of tensor storages; the peak is the largest sum.

Two kinds of ranks are modelled. On CPU ranks gathers run ahead asynchronously and reductions are
direct messages (`shardplug.core.ranks.peer`): each peer's part is received into a buffer of its
own, and the last reduction is completed while the next one starts. On GPUs the collectives are
FSDP2's own: the result of a forward gather is kept until the next one has been copied out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardplug.plan.read_ahead_plan import AheadOfGathers
from shardplug.plan.sizes.layout import Layout
from shardplug.plan.sizes.tier_sizes import TierSizes, tier_sizes
from shardplug.plan.sizes.unit_sizes import UnitSizes, master_width, unit_sizes
from shardplug.plan.timeline import PLAN_KINDS, MemoryTimeline, Moved, Point, Setup
from shardplug.plan.trace.recorder import Mark
from shardplug.plan.trace.segments import Segment, Segments

__all__ = ["simulate_step"]


def simulate_step(layout: Layout, segments: Segments, setup: Setup) -> MemoryTimeline:
    """Play one optimizer step.

    Args:
        layout: The model's units.
        segments: The trace, cut at the schedule's events.
        setup: Stage, ranks, accumulation.

    Returns:
        The curve, what is held at the end of each phase, and the bytes moved.
    """
    walker = _Walker(layout, segments, setup)
    if setup.params_on_nvme:  # what is read ahead was learnt in the step before
        walker.run()
        walker = _Walker(layout, segments, setup, walker.reads)
    return walker.run()


class _Walker:
    def __init__(
        self,
        layout: Layout,
        segments: Segments,
        setup: Setup,
        reads: AheadOfGathers | None = None,
    ) -> None:
        self._layout = layout
        self._segments = segments
        self._setup = setup
        self._sizes = [unit_sizes(layout, unit, setup) for unit in range(len(layout.units))]
        self._tier = tier_sizes(layout, setup)
        read = [size.read if setup.params_on_nvme else 0 for size in self._sizes]
        self.reads = reads or AheadOfGathers(setup.prefetch, read)
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
        self._host = self._most_host = 0
        # What the collectives hold on to.
        self._gathered: set[int] = set()
        self._started: set[int] = set()
        self._kept_result = 0  # of the latest forward gather, on GPUs
        self._kept_input = 0  # of the latest reduction
        self._in_flight = 0  # buffers of the reduction under way, on CPU ranks
        self._kept_replicas = 0  # what replicas were reduced in, held until the backward ends
        # Gradients by unit: whole ones by parameter, and what is already in the reduction's dtype.
        self._whole: dict[int, dict[int, int]] = {}
        self._accumulated: dict[int, dict[int, int]] = {}
        self._reduced: dict[int, int] = {}
        self._forward_order: list[int] = []
        on_cpu = setup.params_tier == "cpu" and setup.device == "cpu"
        self._reduced_kind = "gradients_cpu" if on_cpu else "gradients"
        self._stale: list[tuple[str, int]] = []

    # ------------------------------------------------------------------ the accounting

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
        self._host += segment.host
        self._most_host = max(self._most_host, self._host)

    def _mark(self, unit: int) -> None:
        name = self._layout.units[unit].name if unit >= 0 else ""
        if self._high_total >= 0:
            self._points.append(Point(self._phase, name, self._micro, self._high))
        self._high, self._high_total = dict(self._held), sum(self._held.values())

    # ------------------------------------------------------------------ the step

    def run(self) -> MemoryTimeline:
        setup, phases = self._setup, dict[str, dict[str, int]]()
        self._rest()
        sharded = sum(size.master_trained for size in self._sizes) * (not setup.masters_on_host)
        # On a drive the step uses gradients up: what holds them holds the weights from before it.
        stale = setup.grads_kept_through_forward and setup.state_tier != "nvme"
        self._stale = (
            [("gradients", self._replicated_gradients()), (self._reduced_kind, sharded)]
            if stale
            else []
        )
        for kind, size in self._stale:
            self._add(kind, size)
        # Beyond the first two and the last, the micro-batches of a window are alike.
        shown = list(range(setup.accumulate))
        if len(shown) > 3:
            shown = [0, 1, setup.accumulate - 1]
        for index in shown:
            self._micro, self._last = index, index == setup.accumulate - 1
            before = Counter(self._sent)
            self._phase = "forward"
            self._run_micro_batch(phases)
            if index == 1 and not self._last:
                repeats = setup.accumulate - len(shown)
                for kind, size in (self._sent - before).items():
                    self._sent[kind] += size * repeats
        self._phase = "step"
        self._step()
        if setup.state_tier == "nvme":
            self._held["gradients"] = self._held["gradients_cpu"] = 0
        ahead = self.reads.held
        self.reads.step()
        self._read_ahead(ahead)
        phases["after_step"] = dict(self._held)
        self._held["gradients"] = self._held["gradients_cpu"] = 0
        self._reduced.clear()
        self._phase = "rest"
        self._high_total = -1
        self._add("buffers", 0)
        self._high, self._high_total = dict(self._held), sum(self._held.values())
        self._mark(-1)
        phases["at_rest"] = dict(self._held)
        sent = self._sent
        return MemoryTimeline(
            tuple(self._points),
            phases,
            Moved(sent["gathers"], sent["reductions"], sent["replicas"]),
            sum(segment.out for segment in self._segments.segments) * setup.accumulate,
            self._most_host,
        )

    def _rest(self) -> None:
        setup, layout = self._setup, self._layout
        masters = sum(size.masters for size in self._sizes)
        state = sum(
            setup.optimizer.state_bytes(p.own(setup.shards, setup.shard), p.master)
            for p in layout.parameters
            if p.trainable
        )
        whole = sum(layout.parameters[i].numel * master_width(layout, i) for i in layout.replicated)
        on_device = masters if setup.params_tier == "none" else 0
        self._add("master_shards", on_device + whole)
        if setup.params_tier == "cpu" and setup.device == "cpu":
            self._add("master_shards_cpu", masters)
        if setup.state_tier == "none":
            self._add("optimizer_state", state)
        else:
            self._add_tier(self._tier)
        self._add("buffers", layout.buffer_bytes)
        self._read_ahead(0)

    def _add_tier(self, tier: TierSizes) -> None:
        if not self._setup.masters_on_host:
            self._add("optimizer_state", tier.resident)
            self._add("staging", tier.scratch)
        if self._setup.device == "cpu":  # the host's memory is the device's
            self._add("staging", tier.buffers)
            self._add("optimizer_state_cpu", tier.near)

    def _read_ahead(self, before: int) -> None:
        """Count what is read ahead; the memory of CPU ranks is the device's."""
        if self._setup.device == "cpu":
            self._add("staging", self.reads.held - before)

    def _acquire(self, unit: int) -> int:
        """Take a unit's shards out of the tier; return the bytes that the gather starts from."""
        size = self._sizes[unit]
        if not self._setup.params_on_nvme:
            return size.cast
        before = self.reads.held
        self.reads.enter(unit)
        self._read_ahead(before)
        before = self.reads.held
        self.reads.take(unit)
        self._read_ahead(before)
        return size.read

    def _replicated_gradients(self) -> int:
        layout = self._layout
        return sum(
            layout.parameters[i].numel * master_width(layout, i)
            for i in layout.replicated
            if layout.parameters[i].trainable
        )

    def _run_micro_batch(self, phases: dict[str, dict[str, int]]) -> None:
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
                key = "after_forward_later" if self._micro else "after_forward"
                phases[key] = dict(self._held)
                self._phase = "backward"
                for kind, size in self._stale:
                    self._held[kind] -= size
                self._stale = []
            elif mark is Mark.END:
                self._end()
                key = "after_backward" if self._last else "after_backward_between"
                phases[key] = dict(self._held)
            self._mark(number)

    def _step(self) -> None:
        setup = self._setup
        if setup.state_tier == "none":
            shards = [
                p.own(setup.shards, setup.shard) * p.master.itemsize
                for p in self._layout.parameters
                if p.trainable
            ]
            work = setup.optimizer.work_bytes(shards, setup.device)
        else:  # where the weights are on the host, so is the step
            work = 0 if setup.masters_on_host else self._tier.work
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
        if not self._setup.prefetch:
            return ()
        if unit in self._order:
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
        if shards == 1 or not self._layout.units[unit].parameters:
            return
        start = self._acquire(unit)
        self._add("communication", start + size.lifted)
        self._held["communication"] -= size.lifted
        self._add("communication", size.gathered)
        self._held["communication"] -= start
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
        if self._setup.params_on_nvme and self._layout.units[unit].parameters:
            start = self._acquire(unit)
            self._add("communication", start)
            self._add("gathered", self._sizes[unit].gathered)
            self._held["communication"] -= start
            return
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
            last = self._last_gradient(unit, whole, held) if setup.shards > 1 else 0
            self._reduce(unit, size, sum(whole.values()) + sum(held.values()) - last)
            self._held["gradients"] -= last

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

    def _last_gradient(self, unit: int, whole: dict[int, int], held: dict[int, int]) -> int:
        """FSDP2 frees a unit's gradients once they are copied, but for the last in its loop."""
        grads = {**whole, **held}
        order = self._layout.units[unit].parameters
        return next(grads[index] for index in reversed(order) if index in grads)

    def _reduce(self, unit: int, size: UnitSizes, grads: int) -> None:
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
        at_once = casts or not first or setup.params_on_nvme
        if setup.device == "cpu" and setup.shards > 1:
            received = output * (setup.shards - 1)
            self._add("communication", received)
            if setup.replicas == 1:
                self._leave_in_flight(received + size.reduce_input)
            if at_once or setup.replicas > 1:
                self._held["communication"] -= received
                self._kept_input = size.reduce_input
                if setup.replicas == 1:
                    self._in_flight = 0
        else:
            self._kept_input = size.reduce_input
        if setup.device == "cpu" and setup.replicas > 1:
            # Two replicas exchange the whole, more of them a part each.
            part = output if setup.replicas == 2 else output // setup.replicas
            self._add("communication", part * (setup.replicas - 1))
            self._leave_in_flight(part * (setup.replicas - 1))
            if at_once:
                self._held["communication"] -= self._in_flight
                self._in_flight = 0
        master = output // size.reduce_width * size.master_width
        if casts:
            self._add("gradients", master)
            self._held["gradients"] -= output
        if setup.replicas > 1 and (casts or not first):
            self._held["communication"] += output  # else it is the gradient itself
            self._kept_replicas += output
        if setup.params_on_nvme:  # it goes to the drive; what is there is read, to be added to
            earlier = 0 if first else self._largest_shard(unit)
            self._add("communication", earlier)
            self._held["communication"] -= earlier
            self._held["gradients"] -= master
            self._reduced[unit] = 0
            return
        self._held["gradients"] -= master
        if setup.masters_on_host:
            self._reduced[unit] = 0
        elif first:  # a later one is added to it
            self._held[self._reduced_kind] += master
            self._reduced[unit] = master

    def _leave_in_flight(self, num_bytes: int) -> None:
        """Starting this reduction, or sum over replicas, completes the one before."""
        self._held["communication"] -= self._in_flight
        self._in_flight = num_bytes

    def _largest_shard(self, unit: int) -> int:
        plans = [self._layout.parameters[i] for i in self._layout.units[unit].parameters]
        shards = self._setup.shards
        return max((p.padded(shards) * p.master.itemsize for p in plans if p.trainable), default=0)

    def _end(self) -> None:
        kept = self._kept_input + self._in_flight + self._kept_replicas
        self._held["communication"] -= kept
        self._kept_input = self._in_flight = self._kept_replicas = 0
        for unit in list(self._started):  # started ahead, and not used
            self._started.discard(unit)
            if self._setup.shards > 1:
                self._held["communication"] -= self._sizes[unit].gathered
        self._forward_order.clear()
        # What is left is the batch, which the next one replaces.
        self._held["activations"] = self._held["logits_and_loss"] = 0
        self._held["activations_cpu"] = self._host = 0
