"""What an Accelerator is told in one line: in Python, or in the YAML of `accelerate launch`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError
from shardplug.plan.auto import AutoBudget, split_auto

__all__ = ["ENVIRONMENT_NAME", "PREFIX", "LaunchOptions"]

ENVIRONMENT_NAME = "FSDP_SHARDING_STRATEGY"
"""What `accelerate launch` makes of `fsdp_config.fsdp_sharding_strategy`; FSDP2 ignores it."""

PREFIX = "shardplug:"
"""Marks the string in the YAML as ours."""

_HOW_TO = (
    'Write fsdp_sharding_strategy: "shardplug:zero3" under fsdp_config in the YAML given to '
    '`accelerate launch --config_file`, or Accelerator(zero="zero3") in Python.'
)

_ASYNC = "async_save"


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What one line says."""

    config: ZeroConfig
    budget: AutoBudget | None = None
    """What zero_auto may use; None where the configuration is given."""
    async_save: bool | None = None
    """Whether checkpoints are written in the background; None where it does not say."""

    @classmethod
    def parse(cls, text: str) -> LaunchOptions:
        """Read a line like "shardplug:zero3,prefetch=2,async_save=true".

        Raises:
            ConfigError: For text of another form, an unknown option or an impossible value.
        """
        parts = [part.strip() for part in text.removeprefix(PREFIX).split(",")]
        named = [(part.partition("=")[0].strip() == _ASYNC, part) for part in parts]
        values = [part.partition("=")[2].strip().lower() for is_async, part in named if is_async]
        if len(values) > 1 or not set(values) <= {"true", "false"}:
            raise ConfigError(f"Expected async_save=true or async_save=false, once, got {text!r}.")
        rest, budget = split_auto(",".join(part for is_async, part in named if not is_async))
        return cls(ZeroConfig.parse(rest), budget, values == ["true"] if values else None)

    @classmethod
    def read(
        cls,
        zero: str | ZeroConfig | None,
        environment: Mapping[str, str],
        async_save: bool | None = None,
    ) -> LaunchOptions:
        """Find the options of an Accelerator.

        Args:
            zero: A configuration, a string like "zero3" or "stage=2,replicate_size=2", or None for
                the string that `accelerate launch` passes on from the YAML.
            environment: The process environment.
            async_save: The Accelerator's argument; None leaves it to the strings.

        Raises:
            ConfigError: When neither is given, both are and differ, or a string is wrong.
        """
        text = environment.get(ENVIRONMENT_NAME, "")
        launched = cls.parse(text) if text.startswith(PREFIX) else None
        given: LaunchOptions | None
        if isinstance(zero, str):
            given = cls.parse(zero)
        elif isinstance(zero, ZeroConfig):
            given = cls(zero)
        elif zero is not None:
            raise ConfigError(
                f"Expected zero to be a string or a ZeroConfig, got {type(zero).__name__}. "
                f"{_HOW_TO}"
            )
        else:
            given = launched
        if given is None:
            got = f", got fsdp_sharding_strategy {text!r}" if text else ""
            raise ConfigError(f"Expected a ZeRO stage for the Accelerator{got}. {_HOW_TO}")
        launched = launched or given
        if (launched.config, launched.budget) != (given.config, given.budget):
            raise ConfigError(
                f"Expected one ZeRO configuration, got zero={zero!r} in Python and "
                f"{ENVIRONMENT_NAME}={text!r} from the YAML. Leave one of them out."
            )
        said = {async_save, given.async_save, launched.async_save} - {None}
        if len(said) > 1:
            raise ConfigError(
                f"Expected one async_save, got async_save={async_save}, zero={zero!r} in Python "
                f"and {ENVIRONMENT_NAME}={text!r} from the YAML. Leave all but one out."
            )
        return replace(given, async_save=said == {True})
