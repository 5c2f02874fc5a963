"""Holds a run against its plan: predicted beside measured, warnings, and one picture of both."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from shardplug.plan.run.run_plan import RunPlan
from shardplug.plan.timeline import MemoryTimeline
from shardplug.process.memory_row import MemoryRow
from shardplug.tracking.alerts import Watch
from shardplug.tracking.comparison_picture import draw_comparison

__all__ = ["PlanSink"]

_MOST_STEPS = 120


class PlanSink:
    """A sink of `MemoryTracker` that writes what was planned, and draws both.

    Into its folder it writes `plan.json` as soon as it knows the plan, and `plan.png` at the end:
    bytes by kind in each phase and at the peak, predicted and measured. A tracker makes one by
    itself; one made by hand has a plan that was made before the run.

    By itself it warns, once each, when model states or the peak exceed the plan by a share, when
    memory grows from step to step, and when one rank holds more than the others.
    """

    def __init__(
        self,
        plan: MemoryTimeline | RunPlan,
        folder: str | os.PathLike[str],
        *,
        alert_share: float = 0.1,
        compare_peak: bool = True,
        picture: bool = True,
        warns: bool = True,
    ) -> None:
        """Prepare the sink; files appear with the first row and with `close`.

        Args:
            plan: The curve of the choice that runs (`Choice.timeline`), or the plan of a run.
            folder: Folder of the files.
            alert_share: Warn when measured exceeds predicted by this share.
            compare_peak: Whether peaks are known well enough to warn about: not on a CPU.
            picture: Whether to draw, which needs matplotlib.
            warns: Whether the sink looks for what to warn about itself; its tracker does.

        Raises:
            ConfigError: For a negative share.
        """
        self.folder = Path(folder)
        self.plan = RunPlan(walks=(plan,)) if isinstance(plan, MemoryTimeline) else plan
        """What was planned."""
        self.warns = warns
        """Whether the sink warns; a `MemoryTracker` sees to that itself."""
        self._watch = Watch(alert_share, exact=compare_peak)
        self._watch.expect(self.plan)
        self._picture = picture
        self._rows: list[MemoryRow] = []
        self._written: RunPlan | None = None

    def expect(self, plan: RunPlan) -> None:
        """Take a plan, of a run that is about to begin or one that is known better now."""
        self.plan = plan
        self._watch.expect(plan)
        self._write_plan()

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Compare the rows of one step with the plan."""
        if not rows:
            return
        self._write_plan()
        self._rows.extend(rows)
        if len(self._rows) > 2 * _MOST_STEPS * len(rows):
            self._rows = _thinned(self._rows)
        for finding in self._watch.look(rows) if self.warns else ():
            warnings.warn(f"Memory: {finding.message}", stacklevel=3)

    def close(self) -> None:
        """Draw, if there was any row."""
        if self._rows and self._picture:
            draw_comparison(self._rows, self.plan, self.folder / "plan.png")

    def _write_plan(self) -> None:
        if self._written is self.plan:
            return
        self._written = self.plan
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps(self.plan.as_dict(), indent=1))


def _thinned(rows: list[MemoryRow]) -> list[MemoryRow]:
    """Of a long run keep every other step."""
    steps = sorted({row.step for row in rows})
    if len(steps) <= _MOST_STEPS:
        return rows
    kept = set(steps[::2])
    return [row for row in rows if row.step in kept]
