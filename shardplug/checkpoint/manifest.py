"""The manifest: what a checkpoint folder holds, written last."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from shardplug.errors import CheckpointError

__all__ = [
    "FORMAT",
    "MANIFEST",
    "VERSION",
    "describe",
    "dtype_of",
    "file_sizes",
    "optimizer_key",
    "read",
    "state_key",
]

MANIFEST = "manifest.json"
FORMAT = "shardplug"
VERSION = 1


def state_key(index: int) -> str:
    """Return the key that the tensors of model `index` are under."""
    return "state_dict" if index == 0 else f"state_dict_{index}"


def optimizer_key(index: int) -> str:
    """Return the key that the state of optimizer `index` is under."""
    return f"optimizer_{index}"


def describe(
    models: Sequence[Mapping[str, torch.Tensor]],
    optimizers: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
) -> dict[str, Any]:
    """Describe the content: names, shapes and dtypes of every tensor, and the run's layout."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "torch": torch.__version__,
        **run,
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
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return dtype


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file in a folder, by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read(path: Path) -> dict[str, Any]:
    """Read and check a folder's manifest.

    Raises:
        CheckpointError: When the folder is missing, is no shardplug checkpoint, is newer, or
            lacks a file.
    """
    if not path.exists():
        raise CheckpointError(f"Expected a checkpoint folder at {path}, found nothing.")
    if not path.is_dir():
        raise CheckpointError(f"Expected a checkpoint folder at {path}, found a file.")
    file = path / MANIFEST
    if not file.is_file():
        raise CheckpointError(
            f"Expected a shardplug checkpoint at {path}, but it has no {MANIFEST}: {_kind(path)}."
        )
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error
    if (
        not isinstance(manifest, dict)
        or manifest.get("format") != FORMAT
        or not isinstance(manifest.get("version"), int)
    ):
        raise CheckpointError(f"{file} is not a manifest of shardplug.")
    if manifest["version"] > VERSION:
        raise CheckpointError(
            f"{path} has format version {manifest['version']}, this shardplug reads up to "
            f"{VERSION}: install a newer one."
        )
    lacking = [
        key
        for key, kind in (
            ("models", list),
            ("optimizers", list),
            ("world_size", int),
            ("files", dict),
        )
        if not isinstance(manifest.get(key), kind)
    ]
    if lacking:
        raise CheckpointError(f"{file} is damaged: it lacks {', '.join(lacking)}.")
    _check_files(path, manifest["files"])
    return manifest


def _kind(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "the folder is empty"
    inside = ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
    if ".metadata" in names:
        return (
            "it is a plain torch.distributed.checkpoint folder, or a save that did not finish. "
            f"It holds {inside}"
        )
    return f"it is another kind of folder. It holds {inside}"


def _check_files(path: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a folder whose own files are not all there; other tools' files are theirs."""
    for name, size in sizes.items():
        ours = name in (".metadata", "meta.pt") or name.endswith(".distcp")
        if not ours and not (name.startswith("rng_") and name.endswith(".pt")):
            continue
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing.")
        found = file.stat().st_size
        if found != size:
            raise CheckpointError(
                f"{path} is damaged: {name} has {found} bytes, {size} were written."
            )
