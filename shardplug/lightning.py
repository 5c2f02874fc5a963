"""Sharded training with Lightning"s Trainer; the code is in `shardplug.integrations.lightning`."""

from shardplug.integrations.lightning import (
    MemoryCurve,
    RunMonitor,
    ZeroStrategy,
    load_from_checkpoint,
    strategy_class,
)

__all__ = ["MemoryCurve", "RunMonitor", "ZeroStrategy", "load_from_checkpoint", "strategy_class"]
