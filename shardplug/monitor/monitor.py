"""Looks at each step of a run, on all ranks together."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardplug.checkpoint import resume_point
from shardplug.core.ranks.waiting_time import waited_seconds
from shardplug.errors import CheckpointError, ConfigError
from shardplug.monitor.detectors import detectors_of
from shardplug.monitor.finding_report import Alert, Report, Sink, strongest
from shardplug.monitor.measure import memory_bytes as measured_memory
from shardplug.monitor.monitor_config import MonitorConfig
from shardplug.monitor.row import StepValues, gather
from shardplug.monitor.targets import Gates

__all__ = ["Monitor"]

_LOG = logging.getLogger("shardplug.monitor")
_NONE = "the step gave no value for it"
_MISSING = {
    "tokens_per_second": "no tokens were counted, which are those of `input_ids`, or of the first "
    "integer matrix of a batch; a loop of your own gives tokens= to Monitor.step()",
}


class Monitor:
    """Detects what goes wrong in a run and judges its declared targets.

    Call `step` on every rank after every optimizer step, and do what it returns:

        monitor = Monitor(MonitorConfig.from_dict(options), folder="checkpoints")
        ...
            report = monitor.step(step, loss=loss, grad_norm=norm, tokens=batch.numel())
            if report.action == "stop":
                break
            if report.resume is not None:
                step = engine.load(report.resume.path, optimizers=[optimizer])["step"]

    The ranks' values meet in one all-gather of 56 bytes per look; what follows is the same
    everywhere, so all ranks stop or go back together. Reading the loss waits for the device:
    `every_n_steps` says how often.

    Args:
        config: A `MonitorConfig`, or plain values for `MonitorConfig.from_dict`.
        folder: Folder of checkpoints, needed where "rollback" is declared.
        sinks: Receivers of reports on rank 0, such as `WandbAlerts`.
        group: The ranks; None is the default process group, or this process alone without one.

    Raises:
        ConfigError: For a wrong option, or "rollback" without a folder.
    """

    def __init__(
        self,
        config: MonitorConfig | Mapping[str, Any] | None = None,
        *,
        folder: str | os.PathLike[str] | None = None,
        sinks: Iterable[Sink] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(config, MonitorConfig):
            config = MonitorConfig.from_dict(config or {})
        if config.may_roll_back and folder is None:
            raise ConfigError(
                'Expected a folder of checkpoints, as "rollback" is declared; give Monitor(folder='
                '...), or declare "stop".'
            )
        self.config = config
        self.folder = folder
        self.sinks = list(sinks)
        self.rollbacks = 0
        """Returns to a checkpoint so far."""
        self.run_seconds = 0.0
        """Time of all steps so far, those before a resume included."""
        self._group = group
        self._gates = Gates(config)
        self._detectors = detectors_of(config)
        self._calls = self._steps = 0
        self._tokens: float | None = None
        self._seconds = 0.0
        self._busy: float | None = None
        self._began = time.perf_counter()
        self._waited = waited_seconds()

    @property
    def targets(self) -> dict[str, bool]:
        """Whether each target was met when it was last judged."""
        return dict(self._gates.met)

    def begin(self) -> None:
        """Start the clock of the next step now, so that what came before is no part of it."""
        self._began = time.perf_counter()
        self._waited = waited_seconds()

    def looks_at_next(self) -> bool:
        """Whether the next `step` is looked at, and so needs a loss and a gradient norm."""
        return (self._calls + 1) % self.config.every_n_steps == 0

    def step(
        self,
        step: int,
        *,
        steps: int = 1,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        tokens: float | None = None,
        seconds: float | None = None,
        busy_seconds: float | None = None,
        memory_bytes: float | None = None,
    ) -> Report:
        """Take this rank's values of an optimizer step. Collective in the steps looked at.

        Args:
            step: Optimizer steps done.
            steps: Optimizer steps since the last call; what is given is of all of them.
            loss: Of this rank, or of all.
            grad_norm: Before clipping.
            tokens: That this rank has trained on in the step.
            seconds: Of the step; None is the time since the last call.
            busy_seconds: Of these, without waiting for other ranks; None is measured on CPU ranks
                that the engine shards, and elsewhere no rank is seen to lag.
            memory_bytes: None takes the device's peak, or a CPU rank's resident memory.

        Returns:
            What was found, and what to do.
        """
        self._note_times(seconds, busy_seconds)
        if tokens is not None:
            self._tokens = (self._tokens or 0.0) + tokens
        self._calls += 1
        self._steps += steps
        if self._calls % self.config.every_n_steps:
            self.begin()
            return Report()
        steps, self._steps = self._steps, 0
        values = StepValues(
            step=step,
            seconds=self._seconds / steps,
            loss=None if loss is None else float(loss),
            grad_norm=None if grad_norm is None else float(grad_norm),
            tokens=None if self._tokens is None else self._tokens / steps,
            busy_seconds=None if self._busy is None else self._busy / steps,
            memory_bytes=measured_memory() if memory_bytes is None else memory_bytes,
        )
        self._seconds, self._tokens, self._busy = 0.0, None, None
        row = gather(values, self._group)
        self.run_seconds += row.seconds * steps
        alerts = [
            Alert(name, step, text, self.config.actions.get(name, "warn"))
            for name, detector in self._detectors.items()
            if (text := detector.look(row)) is not None
        ]
        known_before = set(self._gates.unknown)
        judged, missed = self._gates.judge(row, self.run_seconds)
        for name in sorted(self._gates.unknown - known_before if self._is_first() else ()):
            _LOG.warning(
                "step %d: target %s cannot be judged: %s", step, name, _MISSING.get(name, _NONE)
            )
        report = self._decide(Report(row, (*alerts, *missed), judged))
        self._tell(report)
        self.begin()
        return report

    def close(self) -> None:
        """Log each target's last state; to be called on every rank at the end."""
        if self._is_first():
            for name, met in self.targets.items():
                _LOG.info("target %s: %s", name, "met" if met else "missed")
            for sink in self.sinks:
                sink.close(self.targets)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on counting: time, and so cost, and rollbacks."""
        return {"run_seconds": self.run_seconds, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a saved run."""
        self.run_seconds = float(state["run_seconds"])
        self.rollbacks = int(state["rollbacks"])

    def _note_times(self, seconds: float | None, busy_seconds: float | None) -> None:
        if seconds is None:
            seconds = time.perf_counter() - self._began
            waited = waited_seconds() - self._waited
            if busy_seconds is None and waited > 0:
                busy_seconds = max(0.0, seconds - waited)
        self._seconds += seconds
        if busy_seconds is not None:
            self._busy = (self._busy or 0.0) + busy_seconds

    def _decide(self, report: Report) -> Report:
        action = strongest(report.alerts)
        if action != "rollback":
            return Report(report.row, report.alerts, report.targets, action)
        assert report.row is not None and self.folder is not None
        point, why = None, f"there is no checkpoint in {self.folder} yet"
        try:
            point = resume_point(self.folder)
        except CheckpointError as error:  # on every rank alike
            why = str(error)
        if self.rollbacks >= self.config.max_rollbacks:
            why = f"the run has gone back {self.rollbacks} times already"
            if point is not None:
                why += (
                    f"; the weights in memory are not to be used, the last good are in {point.path}"
                )
                point = None
        if point is None:
            text = f"cannot go back to a checkpoint, so the run stops: {why}"
            alert = Alert("rollback", report.row.step, text, "stop")
            return Report(report.row, (*report.alerts, alert), report.targets, "stop")
        self.rollbacks += 1
        # What was usual was so on the way that is left now.
        self._detectors = detectors_of(self.config)
        self._gates.restart()
        return Report(report.row, report.alerts, report.targets, "rollback", point)

    def _tell(self, report: Report) -> None:
        if not self._is_first():
            return
        for alert in report.alerts:
            log = _LOG.warning if alert.action == "warn" else _LOG.error
            log("step %d: %s: %s (%s)", alert.step, alert.kind, alert.text, alert.action)
        if report.resume is not None:
            _LOG.error("going back to %s", report.resume.path)
        for sink in self.sinks:
            sink.write(report)

    def _is_first(self) -> bool:
        up = dist.is_available() and dist.is_initialized()
        return not up or dist.get_rank(self._group) == 0
