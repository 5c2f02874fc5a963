"""Looks and alerts in Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shardplug.monitor.finding_report import Report

__all__ = ["WandbAlerts", "WandbRun"]

_GIB = 2**30
_STEP = "monitor/step"


class WandbRun(Protocol):
    """The part of a `wandb.Run` that is used."""

    @property
    def summary(self) -> Any:
        """The run's last values."""

    def define_metric(self, name: str, /, *, step_metric: str | None = None) -> Any:
        """Choose a metric's x-axis."""

    def log(
        self, data: dict[str, Any], /, step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log one row."""

    def alert(self, title: str, text: str, level: Any = None, wait_duration: Any = None) -> None:
        """Send an alert."""


class WandbAlerts:
    """Logs each look, alerts of each finding, and keeps each target's last state in the summary.

    `monitor/*` are the looked-at values, `targets/*` 1 where a target is met and 0 where it is
    missed, `alerts/*` how often each kind was found. Their x-axis is `monitor/step`, the number of
    optimizer steps done.

    Args:
        run: The `wandb.Run`, needed on rank 0 only.
        host_passes_step: Whether others call `run.log(..., step=...)` on this run. Our values then
            join the row that is open, instead of moving the run's own step on.
    """

    def __init__(self, run: WandbRun, *, host_passes_step: bool = True) -> None:
        self._run = run
        self._commit = not host_passes_step
        self._known: set[str] = set()
        self._counts: dict[str, int] = {}

    def write(self, report: Report) -> None:
        """Log a look and send its alerts."""
        row = report.row
        if row is None:
            return
        values: dict[str, float] = {_STEP: row.step, "monitor/step_seconds": row.seconds}
        for name in ("loss", "grad_norm", "tokens_per_second"):
            value = getattr(row, name)
            if value is not None:
                values[f"monitor/{name}"] = value
        if row.memory_bytes:
            values["monitor/memory_gib"] = max(row.memory_bytes) / _GIB
        if row.busy_seconds:
            values["monitor/busy_seconds_most"] = max(row.busy_seconds)
            values["monitor/busy_seconds_least"] = min(row.busy_seconds)
        values.update({f"targets/{name}": float(met) for name, met in report.targets.items()})
        for alert in report.alerts:
            kind = alert.kind.removeprefix("target/")
            self._counts[kind] = self._counts.get(kind, 0) + 1
            values[f"alerts/{kind}"] = self._counts[kind]
        self._define(values)
        self._run.log(values, commit=self._commit)
        for alert in report.alerts:
            severe = alert.action != "warn" or alert.kind == "nonfinite"
            self._run.alert(
                title=f"shardplug: {alert.kind}",
                text=f"step {alert.step}: {alert.text} ({alert.action})",
                level="ERROR" if severe else "WARN",
                wait_duration=0,  # what is found is said once already
            )

    def close(self, targets: Mapping[str, bool]) -> None:
        """Write each target's last state; the run itself stays open."""
        for name, met in targets.items():
            self._run.summary[f"target_{name}"] = "met" if met else "missed"

    def _define(self, values: Mapping[str, float]) -> None:
        for name in values:
            if name in self._known:
                continue
            self._known.add(name)
            if name == _STEP:
                self._run.define_metric(name)
            else:
                self._run.define_metric(name, step_metric=_STEP)
