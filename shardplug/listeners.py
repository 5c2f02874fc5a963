"""What watches runs by default."""

from __future__ import annotations

import os

from shardplug.engine.listener import EngineListener
from shardplug.oom.watch import OomWatch
from shardplug.plan.request import Loop
from shardplug.plan.run.preflight import StartupReport
from shardplug.watchdog import Watchdog

__all__ = ["default_listeners"]


def default_listeners(
    loop: Loop = "pytorch", folder: str | os.PathLike[str] | None = None
) -> list[EngineListener]:
    """Return the listeners that Lightning, Fabric and Accelerate pass to their engines.

        engine = ZeroEngine(ZeroConfig(stage=3), listeners=default_listeners())

    They end the job when a rank is lost, explain out-of-memory errors, say at the start what
    offloaded state will take, and warn where ranks share cores.

    Args:
        loop: Who drives the steps; reports name its options.
        folder: Where a report of an out-of-memory error goes; None means the working directory.
    """
    return [Watchdog(), OomWatch(loop, folder), StartupReport()]
