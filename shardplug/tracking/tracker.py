"""Follows an engine through its steps and hands each rank's memory to the sinks on rank 0."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardplug.engine.engine import ZeroEngine
from shardplug.errors import ConfigError
from shardplug.plan.run.first_step_planner import FirstStepPlanner
from shardplug.plan.run.run_plan import FirstStep, RunPlan
from shardplug.plan.run.throughput import BatchSize, costs_of, peak_flops
from shardplug.plan.timeline import MemoryTimeline
from shardplug.process.memory_row import KINDS, MODEL_STATE_KINDS, PHASES, TIER_KINDS, MemoryRow
from shardplug.process.meter import make_meter
from shardplug.tracking.alerts import Finding, Watch
from shardplug.tracking.picture import PngSink
from shardplug.tracking.plan_sink import PlanSink
from shardplug.tracking.sinks import JsonlSink, Sink

__all__ = ["MemoryTracker"]

_FIELDS = (
    *(f"{kind}_bytes" for kind in (*KINDS, *TIER_KINDS)),
    "tiers_measured_bytes",
    "peak_bytes",
    "held_bytes",
)
_COSTS = 3  # nanoseconds, tokens, samples
_MEASURED = [*range(len(KINDS)), _FIELDS.index("tiers_measured_bytes")]  # what makes the total


class MemoryTracker:
    """Records what every rank holds, by kind, after forward, after backward and after the step.

    Build one on **every** rank, after the process group is up: the ranks' numbers meet in one
    small all-gather per logged step. Only rank 0 writes to the sinks.

    "other" is what is measured and not accounted for: activations, buffers, staging copies. On a
    GPU the allocator is asked, and the number is exact. On CPU it is the private resident memory
    of the process above what was there, and not accounted for, when the tracker was made. That is
    rough: work space that libraries keep counts, and so does freed memory that the C allocator
    keeps, while memory that was never written does not. "other" is never below 0; where less is
    measured than is accounted for, the total is what is accounted for. Each row also has the raw
    reading.

    The peak is the highest total since the last logged step ended, evaluation between steps
    included. Measuring it resets the process's peak counter (`max_memory_allocated` on a GPU, the
    `VmHWM` line of /proc/self/status on Linux), so other readers of it see the peak since then.

    Of several micro-batches in a step, each phase shows the one with the largest model states.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        sinks: Sequence[Sink] = (),
        every_n_steps: int = 1,
        first_step: int = 0,
        *,
        plan: MemoryTimeline | Literal["auto"] | None = "auto",
        folder: str | os.PathLike[str] | None = None,
        alert_share: float = 0.1,
        peak_tflops: float | None = None,
    ) -> None:
        """Start following an engine.

        Args:
            engine: The engine whose accounting is read.
            sinks: Receivers of the rows; closed by `close`.
            every_n_steps: Log the first step seen, and the steps whose number is a multiple.
            first_step: Optimizer steps done before, when a run is resumed.
            plan: "auto" plans at the first micro-batch; a curve (`Choice.timeline`) was planned
                before; None goes without.
            folder: Where `plan.json` and `plan.png` go; by default the first file sink's folder.
            alert_share: Warn when measured exceeds predicted by this share.
            peak_tflops: What a device could do, in 10^12 operations per second, for MFU; by default
                that of the devices in `shardplug.memory.PEAK_TFLOPS`.

        Raises:
            ConfigError: If an option is out of range, or the engine has a kind of memory in its
                accounting that is not known here.
        """
        if every_n_steps < 1:
            raise ConfigError(f"Expected every_n_steps >= 1, got {every_n_steps!r}.")
        if first_step < 0:
            raise ConfigError(f"Expected first_step >= 0, got {first_step!r}.")
        states = engine.memory()
        if set(states) - set(TIER_KINDS) != {*MODEL_STATE_KINDS, "snapshot"}:
            raise ConfigError(
                f"Expected an engine with accounts of {', '.join(MODEL_STATE_KINDS)} and snapshot, "
                f"got {', '.join(sorted(states)) or 'none'}."
            )
        self.step = first_step
        """Optimizer steps done; may be set between steps."""
        self.total_bytes = 0
        """Largest total of any rank and phase in the last logged step."""
        self.peak_bytes = 0
        """Largest peak of any rank in the last logged step."""
        self.last_rows: tuple[MemoryRow, ...] = ()
        """Rows of the last logged step: on rank 0 every rank's, elsewhere none."""
        self._engine = engine
        self._sinks = list(sinks)
        self._every_n_steps = every_n_steps
        self._seen_steps = 0
        self._window: dict[str, tuple[int, ...]] = {}
        self._closed = False
        self._watch = Watch(alert_share, exact=engine.device.type != "cpu")
        self._folder = _folder_of(self._sinks) if folder is None else Path(folder)
        self._given_tflops = peak_tflops
        peak_flops(torch.device("cpu"), torch.float32, peak_tflops)  # refuse it here
        given = RunPlan(walks=(plan,)) if isinstance(plan, MemoryTimeline) else None
        for sink in self._sinks:
            if isinstance(sink, PlanSink):  # it was made with a plan
                sink.warns, given = False, sink.plan
        made_here = plan == "auto" and given is None
        self._planner = FirstStepPlanner(engine, made_here, self._expect)
        self._meter = make_meter(engine.device, self._held(states))
        engine.add_phase_listener(self._on_phase)
        self._planner.follow_models()
        if given is not None and engine.rank == 0:
            self._planner.plan = given
            self._expect(given)

    @property
    def plan(self) -> RunPlan | None:
        """What this run is expected to hold: on rank 0 from the first micro-batch on, on every
        rank once a step was logged, and None where there is no plan."""
        return self._planner.plan

    def begin(self, first: Callable[[], FirstStep]) -> None:
        """Say what the first micro-batch runs, where the model is not called as a whole.

        Called before each micro-batch; only the first counts. A tracker that is not told looks at
        the calls of the model. Failures to plan are said, not raised.
        """
        self._planner.stop_listening()
        self._planner.begin(first)

    def count(self, batch: Any) -> None:
        """Count a micro-batch's tokens and samples, after `begin`."""
        self._planner.count(batch)

    def interrupt(self) -> None:
        """Leave tokens per second out of the next row: something else than steps runs."""
        self._planner.interrupt()

    def close(self) -> None:
        """Stop following the engine and close the sinks. Not collective; may be called twice."""
        if self._closed:
            return
        self._closed = True
        self._engine.remove_phase_listener(self._on_phase)
        self._planner.stop_listening()
        if self._engine.rank == 0:
            for sink in list(self._sinks):
                self._guarded(sink, sink.close)
        self._sinks = []

    def _on_phase(self, phase: str) -> None:
        # A forward without gradients is evaluation between steps, not part of one.
        if phase not in PHASES or (phase == "after_forward" and not torch.is_grad_enabled()):
            return
        self._planner.follow_models()  # a model may be sharded after the tracker was made
        logged = self._seen_steps == 0 or (self.step + 1) % self._every_n_steps == 0
        if logged:
            self._record(phase)
        if phase == "after_backward":
            self._planner.after_backward()
        if phase == "after_step":
            self._planner.after_step()
            self.step += 1
            self._seen_steps += 1
            if logged:
                self._finish_step()

    def _record(self, phase: str) -> None:
        states = self._engine.memory()
        held = self._held(states)
        seen = self._window.get(phase)
        reading = self._meter.read(held)
        other = max(0, reading.total - held)
        peak = max(reading.peak, held + other)
        if seen is not None:
            peak = max(peak, seen[-2])
            total = sum(seen[i] for i in _MEASURED)
            if (held, held + other) <= (total - seen[KINDS.index("other")], total):
                self._window[phase] = (*seen[:-2], peak, seen[-1])
                return
        tiers = (states.get(kind, 0) for kind in TIER_KINDS)
        kinds = (*self._kinds(states), other, *tiers, self._beside(states))
        self._window[phase] = (*kinds, peak, reading.held)

    def _kinds(self, states: dict[str, int]) -> tuple[int, ...]:
        """Bytes of every kind accounted for, as far as they are on the device that is measured."""
        snapshot = states["snapshot"] if self._engine.device.type == "cpu" else 0
        return (*(states[kind] for kind in MODEL_STATE_KINDS), snapshot)

    def _beside(self, states: dict[str, int]) -> int:
        """Bytes of the tiers that are in the memory which is measured."""
        if self._engine.device.type != "cpu":
            return 0
        return sum(states.get(kind, 0) for kind in TIER_KINDS if not kind.endswith("_nvme"))

    def _held(self, states: dict[str, int]) -> int:
        return sum(self._kinds(states)) + self._beside(states)

    def _finish_step(self) -> None:
        engine, width = self._engine, len(_FIELDS)
        cost = self._planner.cost()
        # -1 marks a phase that did not occur, for example a step without a forward.
        flat = [n for phase in PHASES for n in self._window.get(phase, (-1,) * width)]
        flat += [cost.nanoseconds, cost.work.tokens, cost.work.samples]
        flat.append(int(self._planner.has_news))
        mine = torch.tensor(flat, dtype=torch.int64, device=engine.device)
        every = [torch.empty_like(mine) for _ in range(engine.world_size)]
        dist.all_gather(every, mine)
        self._window = {}
        gathered: list[list[int]] = torch.stack(every).tolist()
        if gathered[0][-1]:  # rank 0 decides: sinks and options may differ between the ranks
            self._planner.share()
        ranks = [[n[i : i + width] for i in range(0, width * len(PHASES), width)] for n in gathered]
        seen = [phase for phases in ranks for phase in phases]
        self.total_bytes = max(sum(phase[i] for i in _MEASURED) for phase in seen)
        self.peak_bytes = max(phase[-2] for phase in seen)
        if engine.rank == 0:
            costs = costs_of(
                [n[-1 - _COSTS : -1] for n in gathered], self._model_work(), self._peak_flops
            )
            self.last_rows = tuple(
                MemoryRow(
                    step=self.step,
                    phase=phase,
                    rank=rank,
                    **dict(zip(_FIELDS, n, strict=True)),
                    **(costs[rank] if phase == "after_step" else {}),
                )
                for rank, phases in enumerate(ranks)
                for phase, n in zip(PHASES, phases, strict=True)
                if n[0] >= 0
            )
            for sink in list(self._sinks):
                self._guarded(sink, partial(sink.write, self.last_rows))
            for finding in self._watch.look(self.last_rows):
                self._alert(finding)
        self._meter.reset()

    def _model_work(self) -> tuple[BatchSize, int]:
        """Tokens and samples of a micro-batch whose operations are known, and how many they are."""
        return (BatchSize(), 0) if self.plan is None else (self.plan.work, self.plan.flops)

    @cached_property
    def _peak_flops(self) -> float | None:
        config = getattr(self._engine, "config", None)
        dtype = getattr(config, "param_dtype", None)
        if dtype is None:
            masters = (p.dtype for m in getattr(self._engine, "models", ()) for p in m.parameters())
            dtype = next(masters, torch.float32)
        return peak_flops(self._engine.device, dtype, self._given_tflops)

    def _expect(self, plan: RunPlan) -> None:
        """Tell the sinks of the plan; on rank 0."""
        self._watch.expect(plan)
        if self._folder is not None and not any(isinstance(s, PlanSink) for s in self._sinks):
            picture = any(isinstance(sink, PngSink) for sink in self._sinks)
            self._sinks.append(PlanSink(plan, self._folder, picture=picture, warns=False))
        for sink in list(self._sinks):
            expect = getattr(sink, "expect", None)
            if expect is not None:
                self._guarded(sink, partial(expect, plan))

    def _alert(self, finding: Finding) -> None:
        warnings.warn(finding.message, stacklevel=5)
        for sink in list(self._sinks):
            alert = getattr(sink, "alert", None)
            if alert is not None:
                self._guarded(sink, partial(alert, finding))

    def _guarded(self, sink: Sink, call: Callable[[], None]) -> None:
        """Run a sink, and drop it with a warning when it fails.

        Rank 0 alone writes: an exception there would leave the other ranks waiting in their next
        collective, and a full disk or a lost W&B connection is no reason to end a training.
        """
        try:
            call()
        except Exception as error:
            if sink in self._sinks:
                self._sinks.remove(sink)
            warnings.warn(
                f"{type(sink).__name__} failed and gets no more memory rows: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


def _folder_of(sinks: Sequence[Sink]) -> Path | None:
    """Where the first sink that writes a file does."""
    for sink in sinks:
        if isinstance(sink, (JsonlSink, PngSink)):
            return sink.path.parent
    return None
