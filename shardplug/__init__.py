"""Sharded training (ZeRO-1, 2, 3) for PyTorch, Lightning and Accelerate, on FSDP2.

Importing shardplug makes `Trainer(strategy="zero3")` and `Fabric(strategy="zero3")` work; it
loads none of the frameworks itself.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from shardplug._registration import install as _install
from shardplug._undistributed import refuse_the_rest as _refuse_the_rest
from shardplug.config import ZeroConfig
from shardplug.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    OptimizerError,
    ScheduleError,
    ShardplugError,
    StorageError,
)

if _TYPE_CHECKING:
    from shardplug.engine import ZeroEngine
    from shardplug.listeners import default_listeners
elif _refuse_the_rest():
    from shardplug._undistributed import ZeroEngine  # type: ignore[assignment]
else:
    from shardplug.engine import ZeroEngine

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
    "default_listeners",
]

if not _TYPE_CHECKING:  # with it, a type checker would take any name for one of the package's

    def __getattr__(name: str) -> _Any:
        """Import what loads more when it is first named, as `shardplug.lightning.ZeroStrategy`."""
        if name in ("accelerate", "fabric", "hf", "lightning"):
            return _import_module(f"{__name__}.{name}")
        if name == "default_listeners":
            return _import_module(f"{__name__}.listeners").default_listeners
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_install()
