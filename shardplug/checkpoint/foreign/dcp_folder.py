"""Reads a plain torch.distributed.checkpoint (DCP) folder: Lightning's, Accelerate's, anyone's.

DCP keeps, for every entry, the path of keys that led to it in the saved dictionary, such as
("optimizer", "state", "layers.0.weight", "exp_avg"). By these paths the entries are told apart.
"""

from __future__ import annotations

import dataclasses
import io
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_entries
from torch.distributed.checkpoint.storage import StorageReader

from shardplug.checkpoint.foreign.dcp_optimizer import KeyPath, find_optimizers
from shardplug.checkpoint.format.dcp_metadata import METADATA
from shardplug.checkpoint.format.plain import UNREADABLE, innermost, load_plain, why
from shardplug.checkpoint.format.schema import check_besides
from shardplug.checkpoint.read.dcp_reader import CheckedReader, read_metadata
from shardplug.checkpoint.state.tensor_names import listed
from shardplug.errors import CheckpointError

__all__ = ["DcpFolder", "check_safe"]

_MODEL_ROOT = re.compile(r"(model|module|net|network|state_dict|model_state_dict)(_\d+)?")
"""Keys that people save their models under."""


class DcpFolder:
    """The models and optimizers in a DCP folder.

    Args:
        path: The folder, or Accelerate's folder of such folders.
        kind: What the folder is, for the manifest.

    Attributes:
        manifest: What is in it, in the form of our own manifest.
        left_out: Keys of what is not read: counters, optimizers that are kept by number.

    Raises:
        CheckpointError: When the folder's metadata cannot be read, or no model is in it.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self._metadata = _read(path)
        paths = dict(self._metadata.planner_data)
        try:
            found = find_optimizers(paths)
        except ValueError as error:
            raise CheckpointError(
                f"{path} is damaged: {METADATA} has parameter groups without numbers: {error}."
            ) from error
        self._models = _models(self._metadata, paths, {k for o in found for k in o.all_keys})
        if not self._models:
            raise CheckpointError(
                f"Expected the tensors of a model in {path}, but this torch.distributed.checkpoint "
                f"folder has no group of them: it holds {listed(sorted(paths), 8)}."
            )
        owned = [optimizer.owned_by(self._models) for optimizer in found]
        self._optimizers = [optimizer for optimizer in owned if optimizer is not None]
        taken = {key for model in self._models for key in model.values()}
        taken |= {key for optimizer in self._optimizers for key in optimizer.all_keys}
        self.left_out = tuple(sorted(set(paths) - taken))
        self.manifest: dict[str, Any] = {
            "format": "dcp",
            "framework": kind,
            "world_size": 0,  # no number of ranks: random states are nobody's
            "models": [
                {name: self._entry(key) for name, key in model.items()} for model in self._models
            ],
            "optimizers": [
                {
                    name: {k: self._entry(key) for k, key in keys.items() if self._is_tensor(key)}
                    for name, keys in optimizer.state.items()
                }
                for optimizer in self._optimizers
            ],
        }

    def model_key(self, index: int, name: str) -> str:
        """Return DCP's key of a tensor of a model."""
        return self._models[index][name]

    def optimizer_key(self, index: int, name: str, key: str) -> str:
        """Return DCP's key of a tensor in an optimizer's state."""
        return self._optimizers[index].state[name][key]

    def storage_reader(self) -> StorageReader:
        """Return a new reader of the folder's tensors."""
        return CheckedReader(self.path, self._metadata)

    def besides_tensors(self) -> list[dict[str, Any]]:
        """Read what each optimizer holds besides tensors, in the form that `write` keeps it.

        Raises:
            CheckpointError: For values that cannot be read without running code.
        """
        wanted = {key: self._stand_in(key) for o in self._optimizers for key in o.group_keys}
        for optimizer in self._optimizers:
            for keys in optimizer.state.values():
                wanted |= {key: None for key in keys.values() if not self._is_tensor(key)}
        _read_objects(self.path, self._metadata, wanted)
        found = [
            {
                "class": None,
                "param_groups": optimizer.groups(wanted),
                "plain_state": {
                    name: {k: wanted[key] for k, key in keys.items() if not self._is_tensor(key)}
                    for name, keys in optimizer.state.items()
                },
            }
            for optimizer in self._optimizers
        ]
        check_besides(self.path, "its entries", found, len(found))
        return found

    def _is_tensor(self, key: str) -> bool:
        return isinstance(self._metadata.state_dict_metadata[key], TensorStorageMetadata)

    def _entry(self, key: str) -> dict[str, Any]:
        found = self._metadata.state_dict_metadata[key]
        assert isinstance(found, TensorStorageMetadata)
        return {
            "shape": list(found.size),
            "dtype": str(found.properties.dtype).removeprefix("torch."),
        }

    def _stand_in(self, key: str) -> torch.Tensor | None:
        found = self._metadata.state_dict_metadata[key]
        if not isinstance(found, TensorStorageMetadata):
            return None
        return torch.empty(found.size, dtype=found.properties.dtype)


def check_safe(path: Path) -> None:
    """Check that torch's own loader can read a folder without running code in it.

    Raises:
        CheckpointError: When the folder's metadata is not DCP's own, or an entry that is no
            tensor holds anything but plain values.
    """
    metadata = read_metadata(path)
    entries = metadata.state_dict_metadata.items()
    objects = [key for key, entry in entries if not isinstance(entry, TensorStorageMetadata)]
    _read_objects(path, metadata, dict.fromkeys(objects))


def _read_objects(path: Path, metadata: Metadata, wanted: dict[str, Any]) -> None:
    """Read entries into `wanted`: tensors into those that are there, others as plain values.

    Raises:
        CheckpointError: For values that cannot be read without running code.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load_entries(
                wanted,
                storage_reader=CheckedReader(path, metadata),
                planner=_PlainPlanner(flatten_state_dict=False),
                no_dist=True,
            )
    except (*UNREADABLE, CheckpointException) as error:
        if isinstance(innermost(error), CheckpointError):
            raise innermost(error) from error
        raise CheckpointError(
            f"{path} is damaged, or holds objects that run code when they are loaded: {why(error)}"
        ) from error


def _models(
    metadata: Metadata, paths: Mapping[str, KeyPath], taken: set[str]
) -> list[dict[str, str]]:
    """Find the dictionaries of tensors that are models: DCP's keys by name."""
    groups: dict[KeyPath, dict[str, str]] = {}
    sizes: dict[KeyPath, int] = {}
    for key, path in paths.items():
        found = metadata.state_dict_metadata[key]
        if key not in taken and isinstance(found, TensorStorageMetadata):
            parent = path[:-1]
            groups.setdefault(parent, {})[str(path[-1])] = key
            sizes[parent] = sizes.get(parent, 0) + math.prod(found.size)
    named = [parent for parent in groups if parent and _MODEL_ROOT.fullmatch(str(parent[-1]))]
    if named:
        return [groups[parent] for parent in sorted(named, key=_natural)]
    largest = max(sizes, key=lambda parent: sizes[parent], default=None)
    return [] if largest is None else [groups[largest]]


def _natural(path: KeyPath) -> list[tuple[str, int]]:
    """Order model_2 before model_10."""
    found = []
    for part in path:
        text, number = re.fullmatch(r"(.*?)(\d*)", str(part), re.DOTALL).groups()  # type: ignore[union-attr]
        found.append((text, int(number or 0)))
    return found


def _parts(path: Path) -> list[str]:
    """Return the folders in `path` that are read as one: Accelerate has one for each object."""
    if (path / METADATA).is_file():
        return [""]
    pattern = re.compile(r"(pytorch_model_fsdp|optimizer)_\d+")
    return sorted(
        entry.name
        for entry in path.iterdir()
        if pattern.fullmatch(entry.name) and (entry / METADATA).is_file()
    )


def _read(root: Path) -> Metadata:
    """Return what is in all folders together, whose keys begin with the folders' names.

    Raises:
        CheckpointError: When it cannot be read.
    """
    merged = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})
    for part in _parts(root):
        _add(merged, read_metadata(root / part), part)
    return merged


def _add(merged: Metadata, found: Metadata, part: str) -> None:
    front = f"{part}/" if part else ""
    above = (part,) if part else ()
    for key, entry in found.state_dict_metadata.items():
        merged.state_dict_metadata[front + key] = entry
        merged.planner_data[front + key] = (*above, *found.planner_data[key])
    for index, info in found.storage_data.items():
        index = dataclasses.replace(index, fqn=front + index.fqn)
        merged.storage_data[index] = dataclasses.replace(
            info, relative_path=front + info.relative_path
        )


class _PlainPlanner(DefaultLoadPlanner):
    """Reads objects without running code that is in the file."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpack one object; see the base class."""
        self.original_state_dict[read_item.dest_index.fqn] = load_plain(value)
