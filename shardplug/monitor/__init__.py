"""Run targets and monitoring: what goes wrong in a run is found, told, and acted on."""

from shardplug.monitor.config import ACTIONS, MONITORS, TARGETS, MonitorConfig, Target
from shardplug.monitor.monitor import Monitor
from shardplug.monitor.report import Alert, Report, Sink
from shardplug.monitor.row import StepRow
from shardplug.monitor.wandb_sink import WandbAlerts

__all__ = [
    "ACTIONS",
    "MONITORS",
    "TARGETS",
    "Alert",
    "Monitor",
    "MonitorConfig",
    "Report",
    "Sink",
    "StepRow",
    "Target",
    "WandbAlerts",
]
