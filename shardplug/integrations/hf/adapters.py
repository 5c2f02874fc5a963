"""A trained adapter of PEFT, into a model that has the adapter's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardplug.checkpoint.state.hugging_face import describe_modules
from shardplug.errors import CheckpointError
from shardplug.integrations.hf.names import Match, match
from shardplug.integrations.hf.stored import FileTensor

__all__ = ["ADAPTER_FILE", "match_adapter"]

ADAPTER_FILE = "adapter_model.safetensors"


def match_adapter(model: nn.Module, files: Mapping[str, FileTensor], where: str) -> Match:
    """Find the place of every tensor of an adapter's file; the base model is no part of it.

    Args:
        model: A model that PEFT put one adapter into, or that holds one.
        files: The tensors by their names in the file.
        where: Where the file is, for messages.

    Raises:
        CheckpointError: When the model has no adapter, or several, or one whose file PEFT computes.
    """
    found: list[dict[str, Any]] = [d for d in describe_modules([model]) if "peft" in d]
    adapters = [(d["prefix"], a) for d in found for a in d["peft"].values()]
    if len(adapters) != 1:
        raise CheckpointError(
            f"Expected a model with one adapter, as {where} holds a PEFT adapter, got "
            f"{type(model).__name__} with {len(adapters)}. Make one: "
            f'get_peft_model(model, LoraConfig.from_pretrained("{where}")).'
        )
    prefix, adapter = adapters[0]
    if adapter["names"] is None:
        raise CheckpointError(
            f"Expected an adapter whose file holds its tensors as they are, but PEFT has to read "
            f"{where} itself: shardplug.hf.load_pretrained(model) first, then "
            "PeftModel.from_pretrained, in one process."
        )
    names = {theirs: prefix + ours for theirs, ours in adapter["names"].items()}
    result = match(model, {names.get(key, key): stored for key, stored in files.items()}, where)
    wanted = set(names.values())
    result.missing = {name: shape for name, shape in result.missing.items() if name in wanted}
    return result
