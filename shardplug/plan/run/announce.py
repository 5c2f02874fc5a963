"""The plan of a run in one line at its start, whether or not anything records its memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardplug.engine.engine import ZeroEngine
from shardplug.plan.run.first_step_planner import FirstStepPlanner
from shardplug.plan.run.run_plan import FirstStep

__all__ = ["Announcement"]

_LOG = logging.getLogger("shardplug")


class Announcement:
    """Plans a run at its first micro-batch and logs the plan on rank 0, unless others do.

    A `MemoryTracker` or `MemoryCurve` plans, and logs the same line, in its place. A run is not
    planned where the logger "shardplug" takes no INFO. Nothing is collective, and a failure is
    said, not raised.

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
        self._planner: FirstStepPlanner | None = None
        if engine.rank == 0 and _LOG.isEnabledFor(logging.INFO):
            self._planner = FirstStepPlanner(
                engine,
                True,
                lambda plan: None,
                accumulate=accumulate,
                yields=True,
                say=_LOG.info,
            )
            engine.add_phase_listener(self._on_phase)

    def follow_models(self) -> None:
        """Look at the calls of the models that are sharded by now."""
        if self._planner is not None and self._listens:
            self._planner.follow_models()

    def begin(self, first: Callable[[], FirstStep]) -> None:
        """Say what the first micro-batch runs; later calls do nothing."""
        if self._planner is not None:
            self._planner.begin(first)

    def _on_phase(self, phase: str) -> None:
        if self._planner is None:
            return
        if phase == "after_backward":
            self._planner.after_backward()
        elif phase == "after_step":
            self._planner.after_step()
            self._planner.stop_listening()
            self._planner = None
            self._engine.remove_phase_listener(self._on_phase)
