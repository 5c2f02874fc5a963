"""Sharded training with Accelerate; the code is in `shardplug.integrations.accelerate`."""

from shardplug.integrations.accelerate import Accelerator, make_monitor

__all__ = ["Accelerator", "make_monitor"]
