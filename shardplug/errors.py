"""Exceptions raised by shardplug.

```text
ShardplugError
|-- ConfigError      (ValueError)    an option or a combination that cannot be honoured
|-- ModelError       (ValueError)    a model that cannot be sharded as it is
|-- OptimizerError   (ValueError)    an optimizer that would not train the sharded model
|-- ScheduleError    (RuntimeError)  a call at the wrong moment of an accumulation window
|-- CheckpointError  (RuntimeError)  a folder that is no checkpoint, or does not match
`-- StorageError     (RuntimeError)  a tier that cannot keep or return its bytes
```
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ModelError",
    "OptimizerError",
    "ScheduleError",
    "ShardplugError",
    "StorageError",
]


class ShardplugError(Exception):
    """Base class of every error that shardplug raises on purpose."""


class ConfigError(ShardplugError, ValueError):
    """An option has an impossible value, or cannot be combined with another."""


class ModelError(ShardplugError, ValueError):
    """The model cannot be sharded as it is; the message names the module or parameter."""


class OptimizerError(ShardplugError, ValueError):
    """The optimizer holds parameters that are not the sharded model's."""


class ScheduleError(ShardplugError, RuntimeError):
    """A call came at the wrong moment, for example a step in the middle of a window."""


class CheckpointError(ShardplugError, RuntimeError):
    """The folder is not a shardplug checkpoint, is incomplete, or does not match the model."""


class StorageError(ShardplugError, RuntimeError):
    """State kept outside the device cannot be read or written; names path and bytes."""
