"""Monitors and targets as a callback of Hugging Face's Trainer."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from shardplug.errors import ConfigError
from shardplug.monitor import Monitor, MonitorConfig, Sink, WandbAlerts

__all__ = ["RunMonitor"]


class RunMonitor(TrainerCallback):
    """Detects what goes wrong in a training and judges its declared targets, on all ranks together.

        Trainer(model=model, args=args, callbacks=[shardplug.hf.RunMonitor(options)])

    Trainer hands loss and gradient norm to callbacks when it logs: a look is taken every
    `logging_steps`. What is found is logged and, with `report_to="wandb"`, sent as a W&B alert;
    "stop" ends the training after this step, without an error.

    Args:
        config: A `MonitorConfig`, or plain values for `MonitorConfig.from_dict`.

    Raises:
        ConfigError: For a wrong option; for "rollback", which Trainer cannot do in a running
            training; for `every_n_steps` beside `logging_steps`.
    """

    def __init__(self, config: MonitorConfig | Mapping[str, Any] | None = None) -> None:
        if not isinstance(config, MonitorConfig):
            config = MonitorConfig.from_dict(config or {})
        if config.may_roll_back:
            raise ConfigError(
                'Expected "warn" or "stop" in a Trainer, got "rollback"; declare "stop", and start '
                "again with resume_from_checkpoint=True."
            )
        if config.every_n_steps != 1:
            raise ConfigError(
                f"Expected every_n_steps to be left out, got {config.every_n_steps}: a Trainer's "
                "looks are every TrainingArguments(logging_steps=...)."
            )
        self.config = config
        self.monitor: Monitor | None = None
        """The monitor of the training, known once it has begun."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make the monitor."""
        sinks: list[Sink] = []
        run = getattr(sys.modules.get("wandb"), "run", None)
        if state.is_world_process_zero and "wandb" in args.report_to and run is not None:
            sinks = [WandbAlerts(run, host_passes_step=False)]  # Trainer passes none
        self.monitor = Monitor(self.config, sinks=sinks)
        self._step, self._began = state.global_step, time.perf_counter()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Look at the steps since the last log."""
        steps = state.global_step - self._step
        if self.monitor is None or logs is None or "loss" not in logs or steps < 1:
            return
        now = time.perf_counter()
        report = self.monitor.step(
            state.global_step,
            steps=steps,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            seconds=now - self._began,
        )
        self._step, self._began = state.global_step, now
        if report.action == "stop":
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the time of an evaluation out, where it follows a log."""
        if self._step == state.global_step:
            self._began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log each target's last state."""
        if self.monitor is not None:
            self.monitor.close()
