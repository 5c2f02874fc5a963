"""Sharded training with Lightning's Trainer.

`import shardplug` is enough for `Trainer(strategy="zero3")`; this package has the class behind the
string, for options, and what belongs to it.
"""

from shardplug.integrations.common.namespace import TRAINER as _TRAINER
from shardplug.integrations.common.namespace import first_installed as _first_installed
from shardplug.integrations.lightning.loading import load_from_checkpoint
from shardplug.integrations.lightning.memory_curve import make_memory_curve as _make_memory_curve
from shardplug.integrations.lightning.run_monitor import make_run_monitor as _make_run_monitor
from shardplug.integrations.lightning.strategy import strategy_class

__all__ = ["MemoryCurve", "RunMonitor", "ZeroStrategy", "load_from_checkpoint", "strategy_class"]

_namespace = _first_installed(_TRAINER)

ZeroStrategy = strategy_class(_namespace)
"""The strategy for the import name in use: `lightning.pytorch`, or `pytorch_lightning`."""

MemoryCurve = _make_memory_curve(_namespace)
"""The memory callback for the import name in use."""

RunMonitor = _make_run_monitor(_namespace)
"""The callback of monitors and targets for the import name in use."""
