"""The options of a strategy, the same for Trainer and Fabric."""

from __future__ import annotations

from typing import Any

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError

__all__ = ["config_of", "preset_options", "refuse_checkpoint_io"]


def config_of(options: dict[str, Any]) -> ZeroConfig:
    """Build the configuration from a strategy's arguments.

    Args:
        options: Fields of ZeroConfig; lists of unit names, as YAML has them, become tuples.

    Raises:
        ConfigError: For an unknown option or an impossible value.
    """
    units = options.get("units")
    if isinstance(units, list):
        options = {**options, "units": tuple(units)}
    return ZeroConfig.from_fields(options)


def preset_options(preset: str) -> dict[str, Any]:
    """Return the arguments that a strategy string stands for.

    Raises:
        ConfigError: For an unknown preset.
    """
    config = ZeroConfig.preset(preset)
    return {name: getattr(config, name) for name in ZeroConfig.__dataclass_fields__}


def refuse_checkpoint_io(io: object, owner: str) -> None:
    """Refuse a CheckpointIO plugin of the user's, which a sharded save would pass by.

    Args:
        io: The plugin; the framework's own default, or None, is accepted.
        owner: "Trainer" or "Fabric", for the message.

    Raises:
        ConfigError: For any other plugin.
    """
    if io is not None and type(io).__name__ != "TorchCheckpointIO":
        raise ConfigError(
            f"Expected no CheckpointIO plugin, got {type(io).__name__}: the zero strategies "
            f"write their shards themselves. Leave it out of {owner}(plugins=...)."
        )
