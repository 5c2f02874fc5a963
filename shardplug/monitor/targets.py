"""Declared limits, judged at each look."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

from shardplug.monitor.finding_report import Alert
from shardplug.monitor.monitor_config import MonitorConfig
from shardplug.monitor.row import StepRow

__all__ = ["Gates"]

_GIB = 2**30


class Gates:
    """The targets of a run.

    Times, throughput and loss are medians of what is recent; memory is the fullest rank's of this
    look; the cost is what the run has cost until now.

    Args:
        config: Whose targets they are.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._looks = 0
        self._recent: deque[StepRow] = deque(maxlen=config.recent)
        self.met: dict[str, bool] = {}
        """Each target's state at the last look at which it was judged."""
        self.unknown: set[str] = set()
        """Targets whose time had come at a look that had no value for them."""

    def judge(self, row: StepRow, run_seconds: float) -> tuple[dict[str, bool], list[Alert]]:
        """Judge each target whose time has come.

        Args:
            row: The look.
            run_seconds: What the run has taken until now.

        Returns:
            Whether each is met, and an alert for each that is missed and was not before.
        """
        self._looks += 1
        self._recent.append(row)
        judged, alerts = {}, []
        for name, target in self._config.targets.items():
            warm = self._looks > self._config.warmup or name == "cost"
            due = warm if target.from_step is None else row.step >= target.from_step
            value = self._value(name, row, run_seconds) if due else None
            if value is None:
                if due:
                    self.unknown.add(name)
                continue
            at_least = name == "tokens_per_second"
            met = value >= target.limit if at_least else value <= target.limit
            judged[name] = met  # NaN meets nothing
            if not met and self.met.get(name, True):
                sign = "at least" if at_least else "at most"
                text = f"{name} is {value:.6g}, declared {sign} {target.limit:.6g}"
                alerts.append(Alert(f"target/{name}", row.step, text, target.action))
            self.met[name] = met
        return judged, alerts

    def restart(self) -> None:
        """Judge anew after a return to a checkpoint: what was missed may be missed again."""
        self._recent.clear()
        self._looks = 0
        self.met.clear()

    def _value(self, name: str, row: StepRow, run_seconds: float) -> float | None:
        if name == "cost":
            return (self._config.price_per_hour or 0.0) * run_seconds / 3600
        if name == "memory_gib":
            return max(row.memory_bytes) / _GIB if row.memory_bytes else None
        field = "seconds" if name == "step_seconds" else name
        values: list[float | None] = [getattr(r, field) for r in self._recent]
        known = [value for value in values if value is not None]
        if not known:
            return None
        return math.nan if any(map(math.isnan, known)) else median(known)
