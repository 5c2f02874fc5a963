"""Monitors and targets in a loop of Accelerate's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shardplug.monitor import Monitor, MonitorConfig, Sink, WandbAlerts

__all__ = ["make_monitor"]


def make_monitor(
    accelerator: Any,
    config: MonitorConfig | Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Monitor:
    """Make a monitor whose alerts go to the accelerator's W&B tracker, where it has one.

        monitor = make_monitor(accelerator, {"targets": {"step_seconds": 1.2}}, "checkpoints")
        ...
        if accelerator.sync_gradients:
            report = monitor.step(accelerator.completed_steps, loss=loss, grad_norm=norm)
            if report.action == "stop":
                break
            if report.resume is not None:
                accelerator.load_state(report.resume.path)

    Call it on every rank, after `init_trackers`.

    Args:
        accelerator: The `Accelerator`.
        config: A `MonitorConfig`, or plain values for `MonitorConfig.from_dict`.
        folder: Folder of `save_state` folders, needed where "rollback" is declared.

    Raises:
        ConfigError: For a wrong option, or "rollback" without a folder.
    """
    sinks: list[Sink] = []
    if accelerator.is_main_process:
        sinks = [
            # Accelerate passes its own step with each row.
            WandbAlerts(tracker.tracker, host_passes_step=True)
            for tracker in accelerator.trackers
            if tracker.name == "wandb"
        ]
    return Monitor(config, folder=folder, sinks=sinks)
