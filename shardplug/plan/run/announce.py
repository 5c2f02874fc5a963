"""The plan of a run in one line at its start, whether or not anything records its memory."""

from __future__ import annotations

import os
from collections.abc import Callable

from shardplug.engine.engine import ZeroEngine
from shardplug.plan.run.first_step_planner import FirstStepPlanner
from shardplug.plan.run.run_plan import FirstStep

__all__ = ["PLAN_VARIABLE", "Announcement"]

PLAN_VARIABLE = "SHARDPLUG_PLAN"
"""Set to "off", it keeps runs without a memory curve from being planned."""


class Announcement:
    """Plans a run at its first micro-batch and prints the plan on rank 0, unless others do.

    A `MemoryTracker` or `MemoryCurve` plans, and prints the same line, in its place. Nothing is
    collective, and a failure is said, not raised.

    Args:
        engine: The engine, before its first step.
        accumulate: Tells the micro-batches of a step, where the host knows.
        listens: Whether to look at the model's calls; False where the host says what runs.
    """

    def __init__(
        self,
        engine: ZeroEngine,
        *,
        accumulate: Callable[[], int] | None = None,
        listens: bool = True,
    ) -> None:
        self._engine = engine
        self._listens = listens
        self._foresight: FirstStepPlanner | None = None
        if engine.rank == 0 and os.environ.get(PLAN_VARIABLE, "").lower() != "off":
            self._foresight = FirstStepPlanner(
                engine,
                True,
                lambda plan: None,
                accumulate=accumulate,
                yields=True,
                say=lambda text: print(f"shardplug: {text}", flush=True),
            )
            engine.add_phase_listener(self._on_phase)

    def follow_models(self) -> None:
        """Look at the calls of the models that are sharded by now."""
        if self._foresight is not None and self._listens:
            self._foresight.follow_models()

    def begin(self, first: Callable[[], FirstStep]) -> None:
        """Say what the first micro-batch runs; later calls do nothing."""
        if self._foresight is not None:
            self._foresight.begin(first)

    def _on_phase(self, phase: str) -> None:
        if self._foresight is None:
            return
        if phase == "after_backward":
            self._foresight.after_backward()
        elif phase == "after_step":
            self._foresight.after_step()
            self._foresight.stop_listening()
            self._foresight = None
            self._engine.remove_phase_listener(self._on_phase)
