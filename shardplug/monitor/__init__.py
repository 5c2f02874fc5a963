"""Run targets and monitoring: what goes wrong in a run is found, told, and acted on."""

from shardplug.monitor.finding_report import Alert, Report, Sink
from shardplug.monitor.monitor import Monitor
from shardplug.monitor.monitor_config import ACTIONS, MONITORS, TARGETS, MonitorConfig, Target
from shardplug.monitor.row import StepRow
from shardplug.monitor.wandb_findings import WandbAlerts

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
