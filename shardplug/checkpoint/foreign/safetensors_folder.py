"""Reads a Hugging Face folder of safetensors files, each rank its own rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardplug.checkpoint.format.safe_names import check_inside
from shardplug.checkpoint.format.safetensors_file import Entry, read_header
from shardplug.checkpoint.format.schema import check_depth, check_manifest
from shardplug.errors import CheckpointError

__all__ = ["SafetensorsFolder", "check_weights_file", "read_index"]

_INDEX = ".safetensors.index.json"
_PIECE_BYTES = 16 * 2**20
"""Bytes read at a time."""


class SafetensorsFolder:
    """The weights in a folder of safetensors files, as one model.

    Args:
        path: The folder. With an index in it, the files that the index names are read; without,
            `model.safetensors`, or else all of them.

    Attributes:
        manifest: What is in it, in the form of our own manifest.
        left_out: Names of files that are not read.

    Raises:
        CheckpointError: When a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _files(path)
        self.left_out = tuple(
            sorted(f.name for f in path.glob("*.safetensors") if f.name not in files)
        )
        self._where: dict[str, tuple[Path, Entry]] = {}
        for name in files:
            file = check_weights_file(path, name)
            if not file.is_file():
                raise CheckpointError(f"{path} is damaged: {name} is missing.")
            for key, entry in read_header(file).items():
                if key in self._where:
                    raise CheckpointError(
                        f"Expected each tensor of {path} in one file, but {key} is in "
                        f"{self._where[key][0].name} and {name}."
                    )
                self._where[key] = (file, entry)
        self.manifest: dict[str, Any] = {
            "format": "safetensors",
            "framework": "safetensors",
            "world_size": 0,  # no number of ranks: random states are nobody's
            "models": [
                {
                    name: {
                        "shape": list(entry.shape),
                        "dtype": str(entry.dtype).removeprefix("torch."),
                    }
                    for name, (_, entry) in self._where.items()
                }
            ],
            "optimizers": [],
            "hugging_face": _configs(path),
        }
        try:
            check_depth(self.manifest)
            check_manifest(self.manifest)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}.") from error

    def model_key(self, index: int, name: str) -> str:
        """Return DCP's key of a tensor of the model."""
        return name

    def optimizer_key(self, index: int, name: str, key: str) -> str:
        """There is no optimizer in such a folder."""
        raise CheckpointError(f"Expected an optimizer in {self.path}, which holds weights only.")

    def besides_tensors(self) -> list[dict[str, Any]]:
        """Return what optimizers hold besides tensors; there are none."""
        return []

    def storage_reader(self) -> StorageReader:
        """Return a new reader of the files."""
        return _Reader(self._where)


def _files(path: Path) -> list[str]:
    index = sorted(path.glob(f"*{_INDEX}"))
    if len(index) > 1 and path / f"model{_INDEX}" in index:
        index = [path / f"model{_INDEX}"]
    if len(index) > 1:
        raise CheckpointError(f"Expected one index of weights in {path}, found {len(index)}.")
    if index:
        return sorted(set(read_index(index[0]).values()))
    if (path / "model.safetensors").is_file():
        return ["model.safetensors"]
    return sorted(file.name for file in path.glob("*.safetensors"))


def read_index(file: Path) -> dict[str, str]:
    """Return the file that each tensor is in, by the tensor's name.

    Raises:
        CheckpointError: For a file that is no index of weights, or names none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(f"{file} is damaged, or no index of weights: {why}.") from error
    if not isinstance(found, dict) or not all(isinstance(n, str) for n in found.values()):
        raise CheckpointError(f"{file} is damaged: its weight_map does not name files.")
    return found


def check_weights_file(folder: Path, name: str) -> Path:
    """Return the path of a file that an index names.

    Raises:
        CheckpointError: When it is not in the folder.
    """
    try:
        return check_inside(folder, name)
    except ValueError as error:
        raise CheckpointError(
            f"{folder} is damaged: the name of a file with weights {error}."
        ) from error


def _configs(path: Path) -> list[dict[str, Any]]:
    """Keep the folder's own config, so that an export of it has one."""
    found = {}
    for name in ("config", "generation_config"):
        try:
            found[name] = json.loads((path / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            found[name] = None
    if not isinstance(found["config"], dict):
        return []
    found["config"].setdefault("_name_or_path", str(path))
    named = found["config"].get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    return [{"model": 0, "prefix": "", "class": first, **found}]


class _Reader(StorageReader):
    """Gives torch's loader the rows it asks for."""

    def __init__(self, where: dict[str, tuple[Path, Entry]]) -> None:
        self._where = where

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether the folder can be read by this class."""
        return Path(checkpoint_id).is_dir()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Describe every tensor as one piece."""
        return Metadata(
            state_dict_metadata={
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=entry.dtype),
                    size=torch.Size(entry.shape),
                    chunks=[
                        ChunkStorageMetadata(
                            offsets=torch.Size([0] * len(entry.shape)),
                            sizes=torch.Size(entry.shape),
                        )
                    ],
                )
                for name, (_, entry) in self._where.items()
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names, file by file, in the order of the files' bytes."""
        by_file: dict[Path, list[tuple[Entry, ReadItem]]] = {}
        for item in plan.items:
            path, entry = self._where[item.storage_index.fqn]
            by_file.setdefault(path, []).append((entry, item))
        for path, wanted in by_file.items():
            with path.open("rb") as file:
                for entry, item in sorted(wanted, key=lambda pair: pair[0].start):
                    target = planner.resolve_tensor(item)
                    with torch.no_grad():
                        _fill(target.detach(), file, entry, item)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fill(target: torch.Tensor, file: BinaryIO, entry: Entry, item: ReadItem) -> None:
    """Read a block of a tensor's rows into `target`, whose dtype and device may be others."""
    if not target.numel():
        return
    if not entry.shape:
        target.copy_(_read(file, entry, 0, 1)[0])
        return
    first, count = item.storage_offsets[0], item.lengths[0]
    inner = [
        slice(start, start + length)
        for start, length in zip(item.storage_offsets[1:], item.lengths[1:], strict=True)
    ]
    for start, stop in _pieces(count, entry.size_bytes // entry.shape[0]):
        rows = _read(file, entry, first + start, stop - start)
        target[start:stop].copy_(rows.view(-1, *entry.shape[1:])[(slice(None), *inner)])


def _pieces(count: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _read(file: BinaryIO, entry: Entry, first: int, count: int) -> torch.Tensor:
    """Return `count` rows of a tensor from row `first` on, flat."""
    row_bytes = entry.size_bytes // (entry.shape[0] if entry.shape else 1)
    file.seek(entry.start + first * row_bytes)
    data = bytearray(count * row_bytes)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise CheckpointError(f"{file.name} is damaged: it ends too early.")
    return torch.frombuffer(data, dtype=entry.dtype)
