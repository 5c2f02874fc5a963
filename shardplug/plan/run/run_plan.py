"""The plan of a run that has begun: made of the engine's accounting and the first batch.

Model states follow from the units, the dtypes and the optimizers that the engine has, and are
exact. Activations come from a trace of the step that is about to run; where it cannot be traced
they are a formula's, and the plan says so and why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardplug.core._torch.tensors import tree_leaves
from shardplug.core.precision import PLAIN_FORWARD, Precision
from shardplug.engine.engine import ZeroEngine
from shardplug.errors import ModelError
from shardplug.plan.run.running import (
    optimizer_bytes,
    placed_as_sharded,
    setup_of,
    trained_model,
)
from shardplug.plan.run.throughput import BatchSize, batch_size_of
from shardplug.plan.simulate import simulate_step
from shardplug.plan.sizes.activation_formula import estimated_trace
from shardplug.plan.sizes.layout import Placed
from shardplug.plan.timeline import PLAN_KINDS, RESIDENT_KINDS, MemoryTimeline, Setup
from shardplug.plan.trace.dry_run import Step, dry_run
from shardplug.plan.trace.placeholder_loss import loss_of
from shardplug.plan.trace.segments import Segments, cut
from shardplug.plan.trace.trace import Trace, TraceSettings
from shardplug.process.memory_row import MODEL_STATE_KINDS

__all__ = [
    "OUTPUTS_HELD",
    "FirstStep",
    "RunPlan",
    "RunPlanner",
    "predicted_model_states",
    "predicted_phases",
]

_MOST_SECONDS = 60.0
_MOST_SHARDS = 16
OUTPUTS_HELD = "the loop is taken to hold the model's outputs until the backward has ended"
"""What is assumed of a loop that calls the model and takes the loss out of what it returns."""
_FORMULA = "activations are a formula's, which may be off by a factor of 2"


@dataclass(frozen=True, kw_only=True)
class FirstStep:
    """What the first micro-batch runs."""

    model: nn.Module
    batch: Any
    """What the step gets; `tree_map` has to find its tensors."""
    loss: Step | None
    """Computes the loss as the run does; None: it is taken from the model's outputs."""
    autocast: bool = False
    """Whether the step runs under autocast in the engine's `param_dtype`."""
    outputs_in_fp32: bool = False
    """Whether outputs of the model are cast to fp32, as Accelerate does."""
    grads_kept_through_forward: bool = False
    """Whether gradients are cleared between forward and backward, as in Lightning."""
    accumulate: int | None = None
    """Micro-batches of an optimizer step, where that is known."""
    untraceable: str = ""
    """Why the step must not be traced, or nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """What each rank of a run is expected to hold, and what its steps compute."""

    walks: tuple[MemoryTimeline, ...]
    """The curve of each shard; of many shards only the first, which holds most."""
    shards: int = 1
    accumulate: int = 1
    """Micro-batches of an optimizer step."""
    failure: str = ""
    """Why activations are a formula's, or nothing where the step was traced."""
    notes: tuple[str, ...] = ()
    """What else the reader should know of the figures."""
    flops: int = 0
    """Operations of the model in the first micro-batch: forward and backward, none twice."""
    work: BatchSize = BatchSize()
    """Tokens and samples of the first micro-batch."""

    @property
    def traced(self) -> bool:
        """Whether activations are from a trace."""
        return not self.failure

    def walk_of(self, rank: int) -> MemoryTimeline:
        """Return the curve of a rank."""
        shard = rank % self.shards
        return self.walks[shard if shard < len(self.walks) else 0]

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain types, for a JSON file."""
        worst = max(self.walks, key=lambda timeline: timeline.peak.total)
        return {
            "peak": {
                "phase": worst.peak.phase,
                "unit": worst.peak.unit,
                "bytes": worst.peak.total,
            },
            "peak_bytes": {kind: worst.peak.held[kind] for kind in PLAN_KINDS},
            "phase_bytes": predicted_phases(worst),
            "accumulate": self.accumulate,
            "traced": self.traced,
            "failure": self.failure,
            "notes": list(self.notes),
            "model_flops_per_micro_batch": self.flops,
            "tokens_per_micro_batch": self.work.tokens,
            "moved_bytes_per_step": worst.moved.total,
        }


_ALIKE = {
    "after_forward": ("after_forward", "after_forward_later"),
    "after_backward": ("after_backward_between", "after_backward"),
    "after_step": ("after_step",),
}


def _shown(plan: MemoryTimeline, phase: str) -> dict[str, int]:
    """Return the micro-batch with the largest model states, as a tracker shows it."""
    held = [plan.phases[name] for name in _ALIKE[phase] if name in plan.phases]
    return max(held, key=lambda each: sum(each[kind] for kind in MODEL_STATE_KINDS))


def predicted_model_states(plan: MemoryTimeline) -> dict[str, dict[str, int]]:
    """Return the model states planned for each phase that a tracker knows, by kind."""
    return {phase: {k: _shown(plan, phase)[k] for k in MODEL_STATE_KINDS} for phase in _ALIKE}


def predicted_phases(plan: MemoryTimeline) -> dict[str, dict[str, int]]:
    """Return what is planned for each phase that a tracker knows, by the kinds of a tracker.

    "other" is all that is not accounted for: activations, logits, buffers of collectives and the
    model's.
    """
    found = {}
    for phase in _ALIKE:
        held = _shown(plan, phase)
        rest = sum(size for kind, size in held.items() if kind not in RESIDENT_KINDS)
        found[phase] = {**{kind: held[kind] for kind in RESIDENT_KINDS}, "other": rest}
    return found


class RunPlanner:
    """Plans one run, on one rank; nothing is sent to the others.

    Args:
        engine: The engine, with its models sharded and its optimizers prepared.
        first: The first micro-batch, which has not run yet.
    """

    def __init__(self, engine: ZeroEngine, first: FirstStep) -> None:
        self._engine = engine
        self._first = first
        self._notes: list[str] = []
        self._failure = first.untraceable
        trained = trained_model(engine)
        if first.model is not trained:
            raise ModelError("Expected the first micro-batch to run the model that is trained.")
        self._placed = placed_as_sharded(trained, engine.config)
        others = [m for m in engine.models if m is not trained]
        self._beside = sum(
            plan.padded(engine.shard_size) * plan.master.itemsize
            for m in others
            for plan in placed_as_sharded(m, engine.config).layout.parameters
        )
        self._recomputed = 0
        trace = self._trace()
        self._work = batch_size_of(first.batch)
        self._first = replace(first, batch=None, loss=None)  # its tensors may be on a device
        on_cpu = engine.device.type == "cpu"
        self._segments: Segments = cut(trace, self._placed.layout, on_cpu=on_cpu)
        self._flops = _model_flops(trace, self._placed, self._recomputed)

    def plan(self, accumulate: int | None = None) -> RunPlan:
        """Plan for a number of micro-batches; 1 where nobody knows it yet."""
        engine = self._engine
        accumulate = accumulate or self._first.accumulate or 1
        shards = engine.shard_size if engine.shard_size <= _MOST_SHARDS else 1
        notes = list(self._notes)
        if shards < engine.shard_size:
            notes.append("the first shard stands for all; others hold at most as much")
        return RunPlan(
            walks=tuple(self._walk(shard, accumulate) for shard in range(shards)),
            shards=engine.shard_size,
            accumulate=accumulate,
            failure=self._failure,
            notes=tuple(notes),
            flops=self._flops,
            work=self._work,
        )

    def _walk(self, shard: int, accumulate: int) -> MemoryTimeline:
        engine, layout = self._engine, self._placed.layout
        setup = setup_of(
            engine,
            shard=shard,
            accumulate=accumulate,
            grads_kept_through_forward=self._first.grads_kept_through_forward,
        )
        found = simulate_step(layout, self._segments, setup)
        more = {} if setup.masters_on_host else {_masters_kind(setup): self._beside}
        if setup.state_tier == "none":
            exact = optimizer_bytes(engine, self._placed, shard)
            more["optimizer_state"] = exact - found.phases["at_rest"]["optimizer_state"]
        return _with(found, more)

    def _trace(self) -> Trace:
        first, engine = self._first, self._engine
        low = Precision.of(engine.config).param_dtype
        autocasts = first.autocast or PLAIN_FORWARD in vars(first.model)
        settings = TraceSettings(
            device="cpu" if engine.device.type == "cpu" else "cuda",
            checkpointing=False,  # the model recomputes already what it will
            autocast=low if autocasts else None,
            cast_inputs=None if autocasts else low,
            outputs_in_fp32=first.outputs_in_fp32 or PLAIN_FORWARD in vars(first.model),
            offload_activations=engine.config.offload_activations != "none",
            prefetch=engine.config.prefetch,
        )
        outputs = _Outputs()
        if not self._failure:
            try:
                run = dry_run(
                    self._placed,
                    first.model,
                    first.batch,
                    first.loss or outputs.loss,
                    settings,
                    is_entry=first.loss is not None,
                    most_seconds=_MOST_SECONDS,
                )
            except Exception as error:
                # Anything: it is the user's step that raised, on tensors without values.
                reason = str(error).partition("\n")[0]
                self._failure = f"{type(error).__name__.strip('_')}: {reason}"
            else:
                self._recomputed = run.recomputed_flops
                self._notes += outputs.notes
                if run.made_up:
                    self._notes.append("values that the step reads were taken to be 1")
                return run.trace
            finally:
                outputs.kept.clear()
        self._notes.append(f"{_FORMULA}; model states are exact all the same")
        if settings.offload_activations:
            self._notes.append("what offload_activations moves is counted on the device")
        tensors = tuple(leaf for leaf in tree_leaves(first.batch) if isinstance(leaf, torch.Tensor))
        without = estimated_trace(self._placed.layout, first.model, tensors, settings)
        settings = replace(settings, checkpointing=engine.config.activation_checkpointing)
        found = estimated_trace(self._placed.layout, first.model, tensors, settings)
        self._recomputed = found.flops - without.flops
        return found


class _Outputs:
    """The loss of a model that is called by a loop which nobody sees."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.notes: list[str] = []

    def loss(self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> torch.Tensor:
        args, kwargs = call
        output = model(*args, **kwargs)
        found = loss_of(output, call)
        self.kept[:], self.notes[:] = [], []
        if found.made_up_of:
            self.notes[:] = [
                "the loss is computed by the loop: it is taken to be a cross entropy of the "
                f"model's outputs, and may be off by a few times their "
                f"{found.made_up_of / 2**20:.3g} MiB"
            ]
        else:
            self.kept[:] = [output]  # `outputs = model(...); outputs.loss.backward()`
            self.notes[:] = [OUTPUTS_HELD]
        return found.value


def _model_flops(trace: Trace, placed: Placed, recomputed: int) -> int:
    """Operations of forward and backward, without forwards that are computed again.

    Of equal blocks only some were run: the others compute as many again.
    """
    blocks = len(placed.blocks)
    shown = trace.traced_blocks or blocks or 1
    return trace.flops - recomputed * (blocks or 1) // shown


def _masters_kind(setup: Setup) -> str:
    return "master_shards_cpu" if setup.params_tier == "cpu" else "master_shards"


def _with(plan: MemoryTimeline, more: dict[str, int]) -> MemoryTimeline:
    """Add bytes that are held throughout."""
    if not any(more.values()):
        return plan

    def add(held: dict[str, int]) -> dict[str, int]:
        return {kind: size + more.get(kind, 0) for kind, size in held.items()}

    return replace(
        plan,
        points=tuple(replace(point, held=add(point.held)) for point in plan.points),
        phases={phase: add(held) for phase, held in plan.phases.items()},
    )
