"""How tensors are spread over the files of an export, and what the JSON files beside them say."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardplug.checkpoint.format.safetensors_file import num_bytes

__all__ = ["Item", "aligned", "config_of", "index_of", "shards_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One tensor of an export.

    Attributes:
        name: Its name in the export.
        source: Its name in the model.
        shape: Its shape.
        dtype: The dtype it is written in.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes that are written."""
        return num_bytes(self.shape, self.dtype)


def shards_of(items: Iterable[Item], max_shard_bytes: int) -> dict[str, list[Item]]:
    """Fill files in the model's order, each up to the size."""
    shards: list[list[Item]] = []
    size = 0
    for item in items:
        if not shards or (shards[-1] and size + item.size_bytes > max_shard_bytes):
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.size_bytes
    count = len(shards)
    if count == 1:
        return {"model.safetensors": aligned(shards[0])}
    return {
        f"model-{number:05}-of-{count:05}.safetensors": aligned(shard)
        for number, shard in enumerate(shards, start=1)
    }


def aligned(items: Iterable[Item]) -> list[Item]:
    """Put wider dtypes first, so that each tensor starts at a multiple of its own size."""
    return sorted(items, key=lambda item: -item.dtype.itemsize)


def index_of(files: Mapping[str, Sequence[Item]]) -> dict[str, Any]:
    items = [item for shard in files.values() for item in shard]
    return {
        "metadata": {
            "total_parameters": sum(math.prod(item.shape) for item in items),
            "total_size": sum(item.size_bytes for item in items),
        },
        "weight_map": {item.name: name for name, shard in sorted(files.items()) for item in shard},
    }


def config_of(entry: Mapping[str, Any], items: Iterable[Item]) -> dict[str, Any]:
    """Return the config, saying in what dtype the weights now are."""
    config = {key: value for key, value in entry["config"].items() if key != "_name_or_path"}
    if entry.get("class"):
        config["architectures"] = [entry["class"]]
    sizes: Counter[torch.dtype] = Counter()
    for item in items:
        if item.dtype.is_floating_point:
            sizes[item.dtype] += item.size_bytes
    if sizes:
        _set_dtype(config, str(sizes.most_common(1)[0][0]).removeprefix("torch."))
    return config


def _set_dtype(config: dict[str, Any], name: str) -> None:
    old = str(config.get("transformers_version", "5")).startswith("4.")
    config.pop("torch_dtype", None)
    config.pop("dtype", None)
    config["torch_dtype" if old else "dtype"] = name
    for key, inner in config.items():  # the parts of a model of several, like text_config
        known = isinstance(inner, dict) and {"dtype", "torch_dtype"} & inner.keys()
        if known and key != "quantization_config":
            config[key] = inner = dict(inner)
            _set_dtype(inner, name)
