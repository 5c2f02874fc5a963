"""What a framework's precision setting means for the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from shardplug.config import ZeroConfig
from shardplug.core.precision import GradScaler
from shardplug.errors import ConfigError

__all__ = ["autocasts", "share_scaler", "with_precision"]

_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_KNOWN = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")


def _refuse_unknown(plugin: Any) -> None:
    """Refuse precision plugins that swap layers or belong to another strategy.

    Raises:
        ConfigError: Naming the plugin.
    """
    if getattr(plugin, "precision", None) not in _KNOWN or type(plugin).__name__.startswith(
        ("FSDP", "DeepSpeed", "XLA", "TransformerEngine", "Bitsandbytes")
    ):
        raise ConfigError(
            f"Expected a precision out of {', '.join(_KNOWN)}, got {type(plugin).__name__} "
            f"(precision={getattr(plugin, 'precision', None)!r}): it is not supported by the zero "
            "strategies."
        )


def autocasts(plugin: Any) -> bool:
    """Whether the plugin runs the steps under autocast."""
    return getattr(plugin, "precision", None) in _MIXED


def with_precision(config: ZeroConfig, plugin: Any) -> ZeroConfig:
    """Fill the dtypes in that the configuration leaves to the framework.

    Mixed precision gathers and computes in the low dtype and reduces in fp32; "true" precisions
    change the module itself, so there is nothing to add.

    Raises:
        ConfigError: For an unknown plugin, or a `param_dtype` that contradicts it.
    """
    _refuse_unknown(plugin)
    dtype = _MIXED.get(plugin.precision)
    if dtype is None:
        return config
    if config.param_dtype not in (None, dtype):
        raise ConfigError(
            f"Expected param_dtype to agree with precision={plugin.precision!r}, "
            f"got {config.param_dtype}: leave param_dtype out."
        )
    return dataclasses.replace(
        config, param_dtype=dtype, reduce_dtype=config.reduce_dtype or torch.float32
    )


def share_scaler(plugin: Any) -> None:
    """Let the ranks agree on the steps that a plugin's loss scaler skips; in place.

    Raises:
        ConfigError: For a scaler of another class than torch's.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or isinstance(scaler, GradScaler):
        return
    if type(scaler) not in (torch.amp.GradScaler, torch.cuda.amp.GradScaler):
        raise ConfigError(
            f"Expected a torch.amp.GradScaler, got {type(scaler).__name__}: a scaler of another "
            "class looks at one rank's gradients only. Leave the scaler out."
        )
    scaler.__class__ = GradScaler
