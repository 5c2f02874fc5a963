"""Sharded training with Lightning Fabric; the code is in `shardplug.integrations.fabric`."""

from shardplug.integrations.fabric import ZeroStrategy, strategy_class

__all__ = ["ZeroStrategy", "strategy_class"]
