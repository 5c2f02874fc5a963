"""`from_pretrained`: a Hugging Face model on meta that knows where its weights are."""

from __future__ import annotations

import copy
import os
import re
from contextlib import ExitStack
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import meta_device_safe_creation_ops

from shardplug.errors import CheckpointError, ConfigError
from shardplug.integrations.hf.folder import ModelFolder, find_folder
from shardplug.integrations.hf.loading import attach

__all__ = ["from_pretrained"]

_REFUSED = {
    "device_map": "every rank gets its shard from the engine",
    "distributed_config": "the engine shards the model",
    "gguf_file": "GGUF files are read whole: load them with transformers",
    "ignore_mismatched_sizes": "build the model with the sizes of the files",
    "key_mapping": "rename the tensors in the files",
    "load_in_4bit": "quantized models are not read in parts",
    "load_in_8bit": "quantized models are not read in parts",
    "quantization_config": "quantized models are not read in parts",
    "state_dict": "use model.load_state_dict",
    "subfolder": "pass the path of the folder itself",
    "variant": "rename the files of the variant to the usual names",
}
_BUILDING = ("attn_implementation", "experts_implementation", "trust_remote_code")


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    *,
    auto_class: Any = AutoModelForCausalLM,
    config: PreTrainedConfig | None = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = False,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
    **config_overrides: Any,
) -> Any:
    """Build a Hugging Face model whose weights are read when it is sharded.

    The model is made on meta, so it takes no memory. `engine.shard`, `Trainer`, `Fabric` or
    `Accelerator.prepare` then let each rank read its own rows from the safetensors files: no rank
    holds the whole model, and nothing is sent between ranks. What is not in the files, such as a
    new head, is initialised as the model does it, with a warning. Not collective.

    Args:
        name_or_path: A local folder that `save_pretrained` wrote, or a hub id. Hub files are
            downloaded to the Hugging Face cache, unless they are there.
        auto_class: An `AutoModelFor...` class of transformers, or a model class.
        config: The config to build with; None reads the one in the folder.
        dtype: dtype of the parameters, as in transformers: None or "auto" means the config's,
            else that of the files. Under mixed precision the engine keeps fp32 masters anyway.
        strict: Refuse weights that the files lack, or the model has no place for.
        revision: Branch, tag or commit on the hub.
        cache_dir: Folder of the hub's cache.
        local_files_only: Download nothing.
        token: For the hub.
        **config_overrides: Entries of the config to change, like `attention_dropout=0.1`;
            `attn_implementation`, `experts_implementation` and `trust_remote_code` are taken too.

    Returns:
        The model in evaluation mode, as transformers returns it: call `.train()`.

    Raises:
        CheckpointError: When there is no such model, or its files cannot be read into it.
        ConfigError: For an option that cannot be honoured.
    """
    for name, instead in _REFUSED.items():
        if name in config_overrides:
            raise ConfigError(f"Expected no {name}, which cannot be honoured here: {instead}.")
    hub: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "token": token,
    }
    building = {k: config_overrides.pop(k) for k in _BUILDING if k in config_overrides}
    named = None if config is None else getattr(config, "transformers_weights", None)
    folder = find_folder(name_or_path, weights_name=named, **hub)
    config = _config(folder, name_or_path, auto_class, config, config_overrides, building)
    if named is None and (named := getattr(config, "transformers_weights", None)) is not None:
        folder = find_folder(name_or_path, weights_name=named, **hub)
    model = _build(auto_class, config, _dtype(dtype, config, folder), building)
    _read_generation_config(model, folder)
    attach(model, folder, strict=strict)
    model.train(False)
    return model


def _config(
    folder: ModelFolder,
    name_or_path: str | os.PathLike[str],
    auto_class: Any,
    config: PreTrainedConfig | None,
    overrides: dict[str, Any],
    building: dict[str, Any],
) -> PreTrainedConfig:
    if config is None:
        kind = getattr(auto_class, "config_class", None) or AutoConfig
        trust = {k: v for k, v in building.items() if k == "trust_remote_code"}
        try:
            config, unknown = kind.from_pretrained(
                folder.path, return_unused_kwargs=True, **overrides, **trust
            )
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"Expected the config of a Hugging Face model in {folder.path}: {error}"
            ) from error
        unknown = sorted(set(unknown) - set(building))
    else:
        config, unknown = copy.deepcopy(config), sorted(overrides)
    if unknown:
        raise ConfigError(
            f"Expected entries of {type(config).__name__}, got {', '.join(unknown)}. "
            "Set them on the config that you pass, or leave them out."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(
            f"Expected unquantized weights in {folder.path}, but its config has a "
            "quantization_config. Load an unquantized version of the model, or load it with "
            "transformers."
        )
    config.name_or_path = str(name_or_path)
    return config


def _dtype(
    wanted: torch.dtype | str | None, config: PreTrainedConfig, folder: ModelFolder
) -> torch.dtype:
    if wanted is None or wanted == "auto":
        declared = getattr(config, "dtype", None)
        if declared is None:
            floats = (t.dtype for t in folder.tensors().values() if t.dtype.is_floating_point)
            declared = next(floats, torch.get_default_dtype())
        wanted = declared
    found = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(
            f"Expected dtype to be a floating torch.dtype, its name or 'auto', got {wanted!r}."
        )
    return found


def _build(
    auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype, building: dict[str, Any]
) -> PreTrainedModel:
    build = getattr(auto_class, "from_config", None) or getattr(auto_class, "_from_config", None)
    if build is None:
        raise ConfigError(f"Expected auto_class to be a class of transformers, got {auto_class!r}.")
    if not hasattr(auto_class, "from_config"):
        building = {k: v for k, v in building.items() if k != "trust_remote_code"}
    with ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(meta_device_safe_creation_ops())
        try:
            model: PreTrainedModel = build(config, dtype=dtype, **building)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"transformers could not build the model: {error}") from error
    _keep_in_fp32(model, dtype)
    return model


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the parameters that the model's class wants in fp32 that dtype."""
    patterns: list[str] = []
    if dtype == torch.float16:
        patterns += getattr(model, "_keep_in_fp32_modules", None) or ()
    if dtype in (torch.float16, torch.bfloat16):
        patterns += getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if not patterns:
        return
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns))
    for name, parameter in model.named_parameters():
        if kept.search(name):
            parameter.data = parameter.data.float()


def _read_generation_config(model: PreTrainedModel, folder: ModelFolder) -> None:
    """Read what `generate` does by default; without a file it follows from the config."""
    if not model.can_generate():
        return
    own = (folder.path / "generation_config.json").is_file()
    options: dict[str, Any] = (
        {} if own else {"config_file_name": "config.json", "_from_model_config": True}
    )
    if own or (folder.path / "config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder.path, **options)
