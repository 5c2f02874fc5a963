"""Sharded training (ZeRO-1, 2, 3) for PyTorch, Lightning and Accelerate, on FSDP2.

Importing shardplug makes `Trainer(strategy="zero3")` and `Fabric(strategy="zero3")` work; it
loads none of the frameworks itself.
"""

from shardplug._hosts import install as _install
from shardplug.config import ZeroConfig
from shardplug.engine import ZeroEngine
from shardplug.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    OptimizerError,
    ScheduleError,
    ShardplugError,
    StorageError,
)

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ModelError",
    "OptimizerError",
    "ScheduleError",
    "ShardplugError",
    "StorageError",
    "ZeroConfig",
    "ZeroEngine",
    "__version__",
]

_install()
