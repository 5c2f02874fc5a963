"""What a plan is made for: a module, or a model named by its configuration, and a batch."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardplug.errors import ConfigError

__all__ = ["build_from_config", "make_batch"]


def build_from_config(source: Any, dtype: torch.dtype | None) -> nn.Module:
    """Build a Hugging Face model on meta; nothing is downloaded but a hub model's config.

    Args:
        source: A config object, a config.json, a local folder with one, or a hub id.
        dtype: dtype of the parameters; None is the configuration's, or fp32 where it has none.

    Raises:
        ConfigError: When transformers is missing, or there is no configuration to be had.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError(
            f"Planning for {source!r} needs transformers, which is not installed; run "
            "pip install transformers, or call shardplug.memory.plan() with a torch.nn.Module."
        )
    import transformers

    config = _read_config(source) if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(config, transformers.PretrainedConfig):
        raise ConfigError(
            "Expected a torch.nn.Module, a Hugging Face config, or the path of a config.json, "
            f"got {type(source).__name__}."
        )
    config = copy.deepcopy(config)
    config.use_cache = False  # a cache of keys and values is for generation
    own: Any = config.dtype  # transformers has made a dtype of its name
    dtype = dtype or own or torch.float32
    names = [n for n in config.architectures or () if hasattr(transformers, n)]
    with torch.device("meta"):
        if names:
            model = getattr(transformers, names[0])._from_config(config, dtype=dtype)
        else:
            auto: Any = transformers.AutoModelForCausalLM
            model = auto.from_config(config, dtype=dtype)
    assert isinstance(model, nn.Module)
    return model


def _read_config(source: str | os.PathLike[str]) -> Any:
    import transformers

    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"Expected a config.json in {path}, found none.")
    if path.suffix == ".json" and not path.is_file():
        raise ConfigError(f"Expected a configuration at {path}, found no such file.")
    try:
        return transformers.AutoConfig.from_pretrained(str(source))
    except Exception as error:
        # transformers raises what the network, the hub or the parser raised.
        if path.exists():
            raise ConfigError(
                f"Expected a configuration that transformers can read at {path}, but: {error}"
            ) from error
        raise ConfigError(
            f"The configuration of {str(source)!r} is neither a local file nor can it be "
            f"reached on the hub ({type(error).__name__}). Download its config.json where there "
            "is a network, and give the path of that file: shardplug plan path/to/config.json."
        ) from error


def make_batch(model: nn.Module, micro_batch: int, seq_length: int | None) -> dict[str, Any]:
    """Make a batch of the shapes a Hugging Face model takes, on meta.

    Token ids come without attention mask, as packed or unpadded batches do.

    Raises:
        ConfigError: When the model does not say what it takes, or `seq_length` is missing.
    """
    config: Any = getattr(model, "config", None)
    main = str(getattr(model, "main_input_name", ""))
    if config is None or main not in ("input_ids", "pixel_values"):
        raise ConfigError(
            f"Expected a model whose inputs are known, got {type(model).__name__}: give `batch=`, "
            "what the model is called with for one micro-batch (tensors on meta will do)."
        )
    name = type(model).__name__
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = vision.image_size
        height, width = (size, size) if isinstance(size, int) else size
        channels = int(getattr(vision, "num_channels", 3))
        batch = {"pixel_values": torch.empty(micro_batch, channels, height, width, device="meta")}
        if "Classification" in name:
            batch["labels"] = torch.empty(micro_batch, dtype=torch.int64, device="meta")
        return batch
    if seq_length is None:
        raise ConfigError(f"Expected seq_length for {name}, a model of tokens, got none.")
    ids = torch.empty(micro_batch, seq_length, dtype=torch.int64, device="meta")
    batch = {"input_ids": ids}
    if "SequenceClassification" in name:
        batch["labels"] = torch.empty(micro_batch, dtype=torch.int64, device="meta")
    elif any(part in name for part in ("LM", "Generation", "TokenClassification")):
        batch["labels"] = torch.empty_like(ids)
    return batch


def batch_bytes(batch: Any) -> int:
    """Return the bytes of the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    values = batch.values() if isinstance(batch, Mapping) else batch
    return sum(
        batch_bytes(v) for v in values if isinstance(v, (torch.Tensor, Mapping, tuple, list))
    )
