"""What a plan is made for: a module, or a model named by its configuration, and a batch."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardplug.errors import ConfigError

__all__ = ["build_from_config", "make_batch", "sequence_length"]


def build_from_config(source: Any, dtype: torch.dtype | None) -> nn.Module:
    """Build a Hugging Face model on meta; nothing is downloaded but a hub model's config.

    Args:
        source: A config object, a config.json, a local folder with one, or a hub id.
        dtype: dtype of the parameters; None is the configuration's, or fp32 where it has none.

    Raises:
        ConfigError: When transformers is missing, there is no configuration to be had, or no
            model of transformers can be built from it.
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
    kind = _class_of(config)
    try:
        with torch.device("meta"):
            model = kind._from_config(config, dtype=dtype)
    except Exception as error:
        # transformers raises what the values of the configuration lead to.
        raise ConfigError(
            f"Expected a configuration that {kind.__name__} can be built from, but: {error}"
        ) from error
    assert isinstance(model, nn.Module)
    return model


_TASKS = (
    "Seq2SeqLM",
    "SpeechSeq2Seq",
    "MaskedLM",
    "CausalLM",
    "ImageTextToText",
    "ZeroShotImageClassification",
    "ImageClassification",
    "CTC",
    "AudioClassification",
)
"""What a model is trained for, where its configuration does not name its class."""


def _class_of(config: Any) -> Any:
    """Return the class that the configuration names, or that it is trained as by default."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    decodes = getattr(config, "is_decoder", False) and not config.is_encoder_decoder
    for task in ("CausalLM", *_TASKS) if decodes else _TASKS:
        known = getattr(transformers, f"AutoModelFor{task}", None)
        if known is not None and type(config) in known._model_mapping:
            found = known._model_mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    named = ", ".join(config.architectures or ()) or "no class"
    raise ConfigError(
        f"Expected a configuration whose `architectures` names a class of transformers, got "
        f"{type(config).__name__} with {named}: name the class, or call shardplug.memory.plan() "
        "with a torch.nn.Module."
    )


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


_LONGEST = 4096
"""Tokens of a sequence that are taken where none are given, if the model has as many."""


def sequence_length(model: nn.Module, given: int | None) -> int | None:
    """Return the tokens of a sequence: as given, or the model's most, at most 4096.

    None for a model that takes no tokens.

    Raises:
        ConfigError: For more than the model has positions.
    """
    if getattr(model, "main_input_name", "") == "pixel_values":
        return None
    most = _positions(model)
    if given is None:
        return min(most or _LONGEST, _LONGEST)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigError(f"Expected seq_length to be an integer above 0, got {given!r}.")
    if most is not None and given > most:
        raise ConfigError(
            f"Expected seq_length to be at most {most}, the positions that the configuration of "
            f"{type(model).__name__} has, got {given}: shorten the sequences, or raise the "
            "positions in the configuration if the model will be trained with more."
        )
    return given


def _positions(model: nn.Module) -> int | None:
    """Most tokens of a sequence, or None where the model sets no limit."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len"):
        most = getattr(config, name, None)
        if isinstance(most, int) and most > 0:
            break
    else:
        return None
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the padding's.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            skipped = -1 if module.padding_idx is None else module.padding_idx
            most = min(most, module.num_embeddings - skipped - 1)
    return most


def make_batch(model: nn.Module, micro_batch: int, seq_length: int | None) -> dict[str, Any]:
    """Make a batch of the shapes a Hugging Face model takes, on meta.

    Token ids come without attention mask, as packed or unpadded batches do.

    Raises:
        ConfigError: When the model does not say what it takes, or has fewer positions than
            `seq_length`.
    """
    config: Any = getattr(model, "config", None)
    main = str(getattr(model, "main_input_name", ""))
    if config is None or main not in ("input_ids", "pixel_values", "input_features"):
        raise ConfigError(
            f"Expected a model whose inputs are known, got {type(model).__name__}: give `batch=`, "
            "what the model is called with for one micro-batch (tensors on meta will do), to "
            "shardplug.memory.plan()."
        )
    name, takes = type(model).__name__, inspect.signature(model.forward).parameters
    labels = torch.empty(micro_batch, dtype=torch.int64, device="meta")
    if main == "pixel_values":
        batch: dict[str, Any] = {"pixel_values": _pictures(config, micro_batch)}
        return {**batch, "labels": labels} if "Classification" in name else batch
    length = sequence_length(model, seq_length)
    assert length is not None
    ids = torch.empty(micro_batch, length, dtype=torch.int64, device="meta")
    if main == "input_features":
        bins, frames = _required(config, "num_mel_bins"), _required(config, "max_source_positions")
        batch = {main: torch.empty(micro_batch, bins, 2 * frames, device="meta")}
    else:
        batch = {"input_ids": ids}
    if "return_loss" in takes and "pixel_values" in takes:  # pictures beside texts, as in CLIP
        return {**batch, "pixel_values": _pictures(config, micro_batch), "return_loss": True}
    if "SequenceClassification" in name:
        batch["labels"] = labels
    elif any(part in name for part in ("LM", "Generation", "TokenClassification")):
        batch["labels"] = torch.empty_like(ids)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        # Else they are made of the labels, which needs values and the tokens to begin with.
        batch["decoder_input_ids"] = torch.empty_like(ids)
    return batch


def _pictures(config: Any, micro_batch: int) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = _required(vision, "image_size")
    height, width = (size, size) if isinstance(size, int) else size
    channels = int(getattr(vision, "num_channels", 3))
    return torch.empty(micro_batch, channels, height, width, device="meta")


def _required(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise ConfigError(
            f"Expected {type(config).__name__} to have {name}, which the shape of its inputs "
            "follows from, got none: give `batch=` to shardplug.memory.plan()."
        )
    return value


def batch_bytes(batch: Any) -> int:
    """Return the bytes of the tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    values = batch.values() if isinstance(batch, Mapping) else batch
    return sum(
        batch_bytes(v) for v in values if isinstance(v, (torch.Tensor, Mapping, tuple, list))
    )
