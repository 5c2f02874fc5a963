"""Where an Accelerator's ZeRO configuration comes from, and which settings it refuses."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError

__all__ = [
    "make_plugin",
    "refuse_settings",
    "with_plugin",
    "with_precision",
]

# Environment switch of `accelerate launch` -> what it starts instead of, or around, our sharding.
_OTHER_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed (distributed_type: DEEPSPEED)",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM (distributed_type: MEGATRON_LM)",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}

_CHECKED = "_shardplug_checked"

_OTHER_ENGINE_ARGUMENTS = (
    "deepspeed_plugin",
    "deepspeed_plugins",
    "megatron_lm_plugin",
    "torch_tp_plugin",
    "parallelism_config",
)


def refuse_settings(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """Refuse arguments and launcher settings that would sidestep or double the sharding.

    Args:
        arguments: Keyword arguments on their way to `accelerate.Accelerator`.
        environment: The process environment.

    Raises:
        ConfigError: Naming the setting and what to do instead.
    """
    for name in _OTHER_ENGINE_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ConfigError(
                f"Expected shardplug to be the only engine, got {name}. Take it out; replicas "
                'over groups of ranks are zero="stage=3,replicate_size=2".'
            )
    for name, engine in _OTHER_ENGINES.items():
        if environment.get(name, "false").lower() == "true":
            raise ConfigError(
                f"Expected shardplug to be the only engine, but the launcher also starts {engine}. "
                "Use distributed_type: FSDP with fsdp_version: 2, and take that section out of "
                "the YAML."
            )
    for handler in arguments.get("kwargs_handlers") or ():
        # Hugging Face's Trainer always passes this handler; its other fields tune DDP's buckets
        # and search for unused parameters, which the engine does not need.
        hook = str(getattr(handler, "comm_hook", "no"))
        if type(handler).__name__ == "DistributedDataParallelKwargs" and hook != "no":
            raise ConfigError(
                f"comm_hook={hook!r} of DistributedDataParallelKwargs is not available: gradients "
                "are reduced by the engine. Set the dtype they are reduced in instead, "
                'zero="stage=3,reduce_dtype=bf16".'
            )
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    plugin = arguments.get("dynamo_plugin")
    if plugin is not None:
        backend = str(getattr(plugin.backend, "value", plugin.backend)).lower()
    if arguments.get("dynamo_backend") is not None:
        backend = str(arguments["dynamo_backend"]).lower()
    if backend not in ("no", "dynamobackend.no"):
        raise ConfigError(
            f"dynamo_backend={backend!r} is not available with shardplug: compile the model's "
            "blocks before prepare(), for block in blocks: block.compile()."
        )


def make_plugin(plugin: Any, environment: Mapping[str, str]) -> Any:
    """Return the FSDP plugin the rest of Accelerate reads, checked.

    Args:
        plugin: What the user passed as `fsdp_plugin`, or None for the launcher's settings.
        environment: The process environment.

    Raises:
        ConfigError: For a setting that shardplug does not serve.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    if plugin is None:
        launched = environment.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
        version = environment.get("FSDP_VERSION", "2") if launched else "2"
        if version != "2":
            raise ConfigError(
                f"Expected fsdp_version: 2 under fsdp_config in the YAML, got {version!r}."
            )
        # FULL_STATE_DICT: with the other kind Hugging Face's Trainer.save_model writes nothing.
        kind = None if "FSDP_STATE_DICT_TYPE" in environment else "FULL_STATE_DICT"
        extra = {} if kind is None else {"state_dict_type": kind}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **extra)
    elif not isinstance(plugin, FullyShardedDataParallelPlugin):
        raise ConfigError(
            "Expected fsdp_plugin to be a FullyShardedDataParallelPlugin, "
            f"got {type(plugin).__name__}."
        )
    _refuse_plugin_settings(plugin)
    setattr(plugin, _CHECKED, True)
    return plugin


def _refuse_plugin_settings(plugin: Any) -> None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    if plugin.fsdp_version != 2:
        raise ConfigError(f"Expected fsdp_version 2, got {plugin.fsdp_version}.")
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise ConfigError(
            "Expected fsdp_offload_params: false, as fsdp_sharding_strategy says what lives where: "
            '"shardplug:zero3_cpu,offload_params=cpu" keeps parameters, gradients and optimizer '
            "state in CPU memory."
        )
    if plugin.ignored_modules:
        raise ConfigError(
            f"fsdp_ignored_modules={plugin.ignored_modules!r} is not available: every parameter "
            "is sharded, frozen ones too. Take it out."
        )
    # Accelerate itself sets the policy on GPUs, so a plugin that has passed once passes again.
    if plugin.mixed_precision_policy is not None and not hasattr(plugin, _CHECKED):
        raise ConfigError(
            "mixed_precision_policy of the FSDP plugin is not read. Write the dtypes in the ZeRO "
            'configuration, zero="stage=3,param_dtype=bf16,reduce_dtype=fp32", or use '
            "mixed_precision."
        )
    if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
        raise ConfigError(
            "fsdp_auto_wrap_policy: SIZE_BASED_WRAP is not available: units are whole modules. "
            'Use TRANSFORMER_BASED_WRAP, or name classes: "shardplug:stage=3,units=MyBlock".'
        )
    if plugin.cpu_ram_efficient_loading:
        warnings.warn(
            "fsdp_cpu_ram_efficient_loading: true has no effect with shardplug: every rank loads "
            "the weights, and rank 0's are broadcast. Set it to false.",
            UserWarning,
            stacklevel=4,
        )


def with_plugin(config: ZeroConfig, plugin: Any) -> ZeroConfig:
    """Add what the plugin says about units and checkpointing to the configuration.

    Raises:
        ConfigError: When the plugin contradicts the stage.
    """
    if config.stage == 3 and plugin.reshard_after_forward is False:
        raise ConfigError(
            "Expected fsdp_reshard_after_forward: true with stage 3, got false: keeping the "
            'gathered parameters after the forward is stage 2, "shardplug:zero2".'
        )
    classes: Iterable[str] = plugin.transformer_cls_names_to_wrap or ()
    names = tuple(name.strip() for name in classes if name.strip())
    if names and config.units == "auto":
        config = dataclasses.replace(config, units=names)
    if plugin.activation_checkpointing:
        config = dataclasses.replace(config, activation_checkpointing=True)
    if getattr(plugin, "activation_checkpointing_offload", False):  # accelerate >= 1.15
        config = dataclasses.replace(config, offload_activations="cpu")
    return config


def with_precision(config: ZeroConfig, mixed_precision: str) -> ZeroConfig:
    """Set the dtypes of the configuration from Accelerate's `mixed_precision`.

    Args:
        config: The configuration; its own `param_dtype` must not contradict.
        mixed_precision: "no", "bf16" or "fp16". Both low ones keep fp32 master weights and
            reduce gradients in fp32 unless `reduce_dtype` says otherwise.

    Raises:
        ConfigError: For fp8, or two different dtypes.
    """
    if mixed_precision == "no":
        return config
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = dtypes.get(mixed_precision)
    if dtype is None:
        raise ConfigError(
            f"Expected mixed_precision 'no', 'bf16' or 'fp16', got {mixed_precision!r}."
        )
    if config.param_dtype not in (None, dtype):
        raise ConfigError(
            f"Expected one compute dtype, got mixed_precision={mixed_precision!r} and "
            f"param_dtype={config.param_dtype} in the ZeRO configuration. Leave one of them out."
        )
    return dataclasses.replace(config, param_dtype=dtype)
