"""The options of a strategy, the same for Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError
from shardplug.plan.auto import AUTO, AutoBudget

__all__ = ["budget_of", "config_of", "preset_options", "refuse_checkpoint_io"]


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


def budget_of(
    budget: AutoBudget | Mapping[str, Any] | None, config: ZeroConfig
) -> AutoBudget | None:
    """Check the budget of zero_auto, which a YAML file gives as a mapping.

    Args:
        budget: The strategy's argument.
        config: The strategy's other options.

    Raises:
        ConfigError: When the strategy also says what zero_auto decides.
    """
    if budget is None:
        return None
    if isinstance(budget, Mapping):
        known = AutoBudget.__dataclass_fields__
        unknown = sorted(set(budget) - set(known))
        if unknown:
            raise ConfigError(f"Expected a budget of {', '.join(known)}, got {', '.join(unknown)}.")
        budget = AutoBudget(**budget)
    if not isinstance(budget, AutoBudget):
        raise ConfigError(f"Expected budget to be an AutoBudget, got {type(budget).__name__}.")
    if (config.stage, config.offload_optimizer, config.offload_params) != (3, "none", "none"):
        raise ConfigError(
            "Expected the stage and the tiers to be left out where a budget is given: zero_auto "
            "decides them."
        )
    return budget


def preset_options(preset: str) -> dict[str, Any]:
    """Return the arguments that a strategy string stands for.

    Raises:
        ConfigError: For an unknown preset.
    """
    if preset == AUTO:
        return {"budget": AutoBudget()}
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
