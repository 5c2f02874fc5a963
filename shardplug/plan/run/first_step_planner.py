"""Makes the plan of a run at its first micro-batch, and counts what the steps work on."""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardplug.core.hooks import outside_of_graphs
from shardplug.engine.engine import ZeroEngine
from shardplug.plan.choices import gib
from shardplug.plan.run.run_plan import OUTPUTS_HELD, FirstStep, RunPlan, RunPlanner
from shardplug.plan.run.throughput import BatchSize, batch_size_of

__all__ = ["FirstStepPlanner", "StepCost", "plan_line"]

_LOG = logging.getLogger("shardplug")


_seen_to: weakref.WeakSet[Any] = weakref.WeakSet()
"""Engines whose run was planned, or is not to be."""


def plan_line(plan: RunPlan) -> str:
    """Say the plan of a run in one line."""
    peak = max((timeline.peak for timeline in plan.walks), key=lambda point: point.total)
    kinds = sorted(peak.held.items(), key=lambda item: -item[1])[:3]
    where = " ".join(part for part in (peak.phase, peak.unit) if part)
    words = [
        f"planned peak {gib(peak.total)} per rank, in {where}: "
        + ", ".join(f"{kind} {gib(size)}" for kind, size in kinds if size)
    ]
    moved = plan.walks[0].moved.total
    words.append(f"micro-batches per step: {plan.accumulate}, sent per rank and step: {gib(moved)}")
    if plan.failure:
        words.append("activations by a formula")
    words += [note for note in plan.notes if note == OUTPUTS_HELD]
    return "; ".join(words)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one rank did since the last logged step ended."""

    nanoseconds: int = 0
    """Of one step, the mean; 0 where it is not known: the first steps, or an evaluation between."""
    work: BatchSize = BatchSize()
    """Of one step, the mean."""


class FirstStepPlanner:
    """Follows the micro-batches of a run.

    Args:
        engine: The engine, or None where there is none to plan for.
        plans: Whether a plan is to be made.
        on_plan: Called on rank 0 with the plan, and again with a better one: how many
            micro-batches make a step may be known only after the first.
        accumulate: Tells the micro-batches of a step, where that is known.
        yields: Whether to leave a run to others that plan it, or were told not to.
        say: Gets what is wrong with a plan; by default it is a warning.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        plans: bool,
        on_plan: Callable[[RunPlan], None],
        *,
        accumulate: Callable[[], int] | None = None,
        yields: bool = False,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._accumulate = accumulate
        self._yields = yields
        self._say = say or _warn
        if not plans and hasattr(engine, "models"):
            _seen_to.add(engine)
        self._engine = engine
        self._plans = plans
        self._on_plan = on_plan
        self.plan: RunPlan | None = None
        self._shared: RunPlan | None = None
        self._planner: RunPlanner | None = None
        self._hooked: set[int] = set()
        self._handles: list[Any] = []
        self._micro_batches = 0
        self._work = BatchSize()
        self._steps = 0
        self._since: int | None = None
        self._interrupted = False
        self._listens = True
        self._first_done = False

    def follow_models(self) -> None:
        """Look at the models' calls, unless someone else says what runs."""
        for model in getattr(self._engine, "models", ()) if self._listens else ():
            if id(model) not in self._hooked:
                self._hooked.add(id(model))
                hook = outside_of_graphs(self._on_call)
                self._handles.append(
                    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
                )

    def stop_listening(self) -> None:
        """Let go of the models."""
        self._listens = False
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_call(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._interrupted = True
            return
        if not model.training:
            return
        device = self._engine.device.type
        self.begin(
            lambda: FirstStep(
                model=model,
                batch=(args, kwargs),
                loss=None,
                autocast=torch.is_autocast_enabled(device),
                accumulate=None if self._accumulate is None else self._accumulate(),
            )
        )
        self.count((args, kwargs))

    def begin(self, first: Callable[[], FirstStep]) -> None:
        """Plan, if it is the first micro-batch. Not collective; a failure is said, not raised."""
        if self._first_done:
            return
        self._first_done = True
        if not self._plans or self._engine.rank != 0:
            return
        if self._yields and self._engine in _seen_to:
            return
        _seen_to.add(self._engine)
        try:
            self._planner = RunPlanner(self._engine, first())
            self._take(self._planner.plan())
        except Exception as error:
            # A plan is no reason to end a training, whatever the user's classes raise under it.
            self._planner = None
            reason = str(error).partition("\n")[0]
            self._say(f"This run has no plan of its memory: {type(error).__name__}: {reason}")
            return
        if self.plan is not None and self.plan.failure and not self._yields:
            self._say(
                "The step could not be traced for the plan of this run's memory, so its "
                "activations are a formula's, which may be off by a factor of 2; model states are "
                f"exact. Reason: {self.plan.failure}"
            )

    def _take(self, plan: RunPlan) -> None:
        again = "" if self.plan is None else "; replaces the line above: the first step had them"
        self.plan = plan
        _LOG.info("%s%s", plan_line(plan), again)
        self._on_plan(plan)

    def count(self, batch: Any) -> None:
        """Count a micro-batch's tokens and samples."""
        self._work = self._work + batch_size_of(batch)

    def interrupt(self) -> None:
        """Leave the time since the last logged step out: something else ran."""
        self._interrupted = True

    def after_backward(self) -> None:
        """A micro-batch is done."""
        self._micro_batches += 1

    def after_step(self) -> None:
        """An optimizer step is done: know the window now, and plan for it."""
        self._steps += 1
        if self._planner is not None and self.plan is not None:
            if self._micro_batches not in (0, self.plan.accumulate):
                self._take(self._planner.plan(self._micro_batches))
            self._planner = None  # the first step has shown it; the batch is let go of
        self._micro_batches = 0

    @property
    def has_news(self) -> bool:
        """Whether this rank has a plan that the others may not have."""
        return self.plan is not None and self.plan is not self._shared

    def share(self) -> None:
        """Give every rank the plan of rank 0. Collective."""
        box = [self.plan]
        if self._engine.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self._engine.device)
        self.plan = self._shared = box[0]

    def cost(self) -> StepCost:
        """Return what the steps since the last call took, a step of them."""
        now, steps = time.monotonic_ns(), max(1, self._steps)
        known = self._since is not None and not self._interrupted
        work = BatchSize(self._work.tokens // steps, self._work.samples // steps)
        found = StepCost((now - (self._since or now)) // steps if known else 0, work)
        self.restart()
        return found

    def restart(self) -> None:
        """Begin a stretch of steps now."""
        self._since, self._steps, self._work = time.monotonic_ns(), 0, BatchSize()
        self._interrupted = False
