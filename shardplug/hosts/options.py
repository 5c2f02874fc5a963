"""The options of a strategy, the same for Trainer and Fabric."""

from __future__ import annotations

from typing import Any

from shardplug.config import ZeroConfig

__all__ = ["config_of", "preset_options"]


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
        ConfigError: When the preset needs a tier that is not available.
    """
    config = ZeroConfig.preset(preset)
    return {name: getattr(config, name) for name in ZeroConfig.__dataclass_fields__}
