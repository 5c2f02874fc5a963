"""The manifest: what a checkpoint folder holds, written last."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardplug.checkpoint.foreign.foreign_folders import identify
from shardplug.checkpoint.format.commit import MANIFEST
from shardplug.checkpoint.format.durable import BLOCK_BYTES, verify_file
from shardplug.checkpoint.format.schema import DTYPES, check_depth, check_files, check_manifest
from shardplug.checkpoint.state.hugging_face import describe_modules
from shardplug.checkpoint.state.model_state import state_and_aliases
from shardplug.checkpoint.state.tensor_names import clean_name
from shardplug.core.weights.origin import source_dtypes
from shardplug.errors import CheckpointError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "RANK_BYTES",
    "VERSION",
    "check_described",
    "content",
    "describe",
    "dtype_of",
    "optimizer_key",
    "parse",
    "rank_key",
    "read",
    "state_key",
    "to_json",
    "verify",
]

FORMAT = "shardplug"
VERSION = 2
"""2: checksums of all files, the dtypes the parameters came in, Hugging Face configurations."""

RANK_BYTES = "rank_bytes"
"""Key in a tensor's entry: its size on each rank in bytes, where each rank has its own."""

_OWN_SUM = "manifest_crc32"
_REQUIRED = ("models", "optimizers", "world_size", "files")


def state_key(index: int, version: int = VERSION) -> str:
    """Return the key that the tensors of model `index` are under."""
    first = "model" if version > 1 else "state_dict"  # Lightning's consolidation looks for "model"
    return first if index == 0 else f"{first}_{index}"


def rank_key(rank: int, key: str) -> str:
    """Return the key of what a rank other than 0 has in place of what rank 0 has under `key`."""
    return f"rank_{rank}.{key}"


def optimizer_key(index: int) -> str:
    """Return the key that the state of optimizer `index` is under."""
    return f"optimizer_{index}"


def describe(
    models: Sequence[Mapping[str, torch.Tensor]],
    optimizers: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
    modules: Sequence[nn.Module],
) -> dict[str, Any]:
    """Describe the content: names, shapes and dtypes of every tensor, and the run's layout.

    Args:
        models: For each model its tensors by name.
        optimizers: For each optimizer its state by name.
        run: Facts about the run.
        modules: The models themselves; may be left empty.
    """
    now = time.time()
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now)),
        "saved_at_seconds": now,
        **run,
        "hugging_face": describe_modules(modules),
        "source_dtypes": [
            _source_dtypes(module, model) for module, model in zip(modules, models, strict=False)
        ],
        "tied": [_tied(module) for module in modules],
        "models": [{name: _tensor(value) for name, value in model.items()} for model in models],
        "optimizers": [
            {
                name: {
                    key: _tensor(value)
                    for key, value in values.items()
                    if isinstance(value, torch.Tensor)
                }
                for name, values in optimizer["state"].items()
            }
            for optimizer in optimizers
        ],
    }


def _source_dtypes(module: nn.Module, model: Mapping[str, torch.Tensor]) -> dict[str, str]:
    came_in = {clean_name(name): dtype for name, dtype in source_dtypes(module).items()}
    return {
        name: str(came_in[name]).removeprefix("torch.")
        for name, value in model.items()
        if name in came_in and came_in[name] != value.dtype
    }


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """Return the further names of each tensor that has several, by the one it is saved under."""
    aliases = state_and_aliases(module, pack=False)[1]
    return {name: sorted(names - {name}) for name, names in aliases.items() if len(names) > 1}


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
    }
    if isinstance(value, DTensor):
        placement = value.placements[-1]
        entry["shard_dim"] = placement.dim if isinstance(placement, Shard) else None
    return entry


def dtype_of(entry: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that an entry of the manifest names."""
    return DTYPES[entry["dtype"]]


def check_described(manifest: Mapping[str, Any]) -> None:
    """Check before a save that its manifest will be accepted by a load.

    Raises:
        CheckpointError: Naming the entry that would not be.
    """
    try:
        read_back = json.loads(json.dumps(manifest))
        check_depth(read_back)
        check_manifest(read_back)
    except ValueError as error:
        raise CheckpointError(
            f"Expected a model and facts that a checkpoint can hold, but {error}."
        ) from error


def to_json(manifest: Mapping[str, Any]) -> str:
    """Write a manifest as JSON, with a checksum of itself."""
    return json.dumps({**manifest, _OWN_SUM: _own_sum(manifest)}, indent=1)


def _own_sum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())


def read(path: Path) -> dict[str, Any]:
    """Read and check a folder's manifest, and that its files have their sizes.

    Raises:
        CheckpointError: When the folder is missing, is no shardplug checkpoint, is newer, or
            lacks a file.
    """
    manifest = parse(path)
    for name, entry in manifest["files"].items():
        wrong = verify_file(path / name, {"bytes": entry["bytes"]}, BLOCK_BYTES)
        if wrong is not None:
            raise CheckpointError(f"{path} is damaged: {name} {wrong}.")
    return manifest


def parse(path: Path) -> dict[str, Any]:
    """Read and check a folder's manifest alone.

    Raises:
        CheckpointError: When the folder is missing, is no shardplug checkpoint, or is newer.
    """
    if not path.exists():
        raise CheckpointError(f"Expected a checkpoint folder at {path}, found nothing.")
    if not path.is_dir():
        raise CheckpointError(f"Expected a checkpoint folder at {path}, got {identify(path)}")
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"Expected a shardplug checkpoint at {path}, but it has no {MANIFEST}. It is "
            f"{identify(path)}"
        )
    try:
        manifest = content(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {MANIFEST} {error}.") from error
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest['version']}, this shardplug reads up to "
            f"{VERSION}: install a newer one."
        )
    return manifest


def content(path: Path) -> dict[str, Any]:
    """Read a folder's manifest and check every entry; of a newer version only that it is one.

    Raises:
        ValueError: Saying what is wrong with the manifest: it is no JSON, was changed after it was
            written, or an entry is not what belongs there.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError("is not a manifest of shardplug")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise ValueError("has no version")
    if version > VERSION:
        return manifest
    check_depth(manifest)
    if version > 1 and manifest.pop(_OWN_SUM, None) != _own_sum(manifest):
        raise ValueError("has other content than was written")
    lacking = [key for key in _REQUIRED if key not in manifest]
    if lacking:
        raise ValueError(f"lacks {', '.join(lacking)}")
    if version == 1:  # it had sizes only
        sizes = manifest["files"]
        if isinstance(sizes, dict):
            manifest["files"] = {name: {"bytes": size} for name, size in sizes.items()}
        manifest["block_bytes"] = BLOCK_BYTES
    manifest.pop("renamed", None)  # that is for who reads it to say
    check_files(path, manifest["files"], manifest.get("block_bytes"))
    check_manifest(manifest)
    return manifest


def verify(path: Path, manifest: Mapping[str, Any], names: Sequence[str]) -> None:
    """Read files of a folder whole and compare them with the manifest.

    Raises:
        CheckpointError: Naming the first file that differs.
    """
    for name in names:
        wrong = verify_file(path / name, manifest["files"][name], manifest["block_bytes"])
        if wrong is not None:
            raise CheckpointError(f"{path} is damaged: {name} {wrong}.")
