"""Where a checkpoint's tensors are: our own folder, or one of another tool that can be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from shardplug.checkpoint.foreign.dcp_folder import DcpFolder
from shardplug.checkpoint.foreign.foreign_folders import foreign_source
from shardplug.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.commit import MANIFEST, locate
from shardplug.checkpoint.format.dcp_metadata import METADATA
from shardplug.checkpoint.format.durable import CheckedFileSystem
from shardplug.checkpoint.format.plain import UNREADABLE, load_plain, why
from shardplug.checkpoint.format.safe_names import shown
from shardplug.checkpoint.format.schema import check_besides
from shardplug.checkpoint.read.dcp_reader import CheckedReader, read_metadata
from shardplug.errors import CheckpointError

__all__ = [
    "META",
    "PARAM_GROUPS",
    "OwnFolder",
    "Source",
    "check_content",
    "open_source",
    "read_meta",
]

META = "meta.pt"
"""The file with what a checkpoint holds besides tensors."""

PARAM_GROUPS = "shardplug_param_groups"
"""Key in it for what the optimizers hold besides tensors."""


class OwnFolder:
    """A folder that shardplug wrote.

    Args:
        path: The folder.

    Raises:
        CheckpointError: When it is none of a version that can be read, files are not whole, or
            the manifest says other things of its tensors than the files do.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = manifests.read(path)
        files = self.manifest["files"]
        self._file_system = CheckedFileSystem(files, self.manifest["block_bytes"])
        self._metadata = read_metadata(path, self._file_system, files)
        self._check_tensors(self._metadata)

    def model_key(self, index: int, name: str) -> str:
        """Return DCP's key of a tensor of a model."""
        return f"{manifests.state_key(index, self.manifest['version'])}.{name}"

    def optimizer_key(self, index: int, name: str, key: str) -> str:
        """Return DCP's key of a tensor in an optimizer's state."""
        return f"{manifests.optimizer_key(index)}.state.{name}.{key}"

    def storage_reader(self) -> StorageReader:
        """Return a reader that checks what it reads."""
        return CheckedReader(self.path, self._metadata, self._file_system)

    def _keys(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield every tensor's place in the manifest, DCP's key, and the manifest's entry."""
        for index, model in enumerate(self.manifest["models"]):
            for name, entry in model.items():
                where, shared = f"models[{index}][{shown(name)}]", self.model_key(index, name)
                yield where, shared, entry
                for rank, size in enumerate(entry.get(manifests.RANK_BYTES, ())):
                    key = manifests.rank_key(rank, shared) if rank else shared
                    yield f"{where} of rank {rank}", key, {**entry, "shape": [size]}
        for index, state in enumerate(self.manifest["optimizers"]):
            for name, keys in state.items():
                for key, entry in keys.items():
                    where = f"optimizers[{index}][{shown(name)}][{shown(key)}]"
                    yield where, self.optimizer_key(index, name, key), entry

    def _check_tensors(self, metadata: Metadata) -> None:
        """Hold the manifest's tensors against those that the files have."""
        for where, key, entry in self._keys():
            found = metadata.state_dict_metadata.get(key)
            if not isinstance(found, TensorStorageMetadata):
                raise CheckpointError(
                    f"{self.path} is damaged: {where} in {MANIFEST} is no tensor in its files."
                )
            here = (tuple(entry["shape"]), manifests.dtype_of(entry))
            there = (tuple(found.size), found.properties.dtype)
            if here != there:
                raise CheckpointError(
                    f"{self.path} is damaged: {where} in {MANIFEST} is {shown(here)}, and "
                    f"{shown(there)} in {METADATA}."
                )


def read_meta(path: Path, num_optimizers: int, *, weights_only: bool = True) -> dict[str, Any]:
    """Read what a folder of ours holds besides tensors.

    Args:
        path: The folder.
        num_optimizers: How many optimizers its manifest has.
        weights_only: Refuse objects other than plain types and tensors.

    Raises:
        CheckpointError: When the file is damaged, or holds other objects.
    """
    file = path / META
    try:
        loaded = (
            load_plain(file)
            if weights_only
            else torch.load(file, map_location="cpu", weights_only=False)
        )
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    except UNREADABLE as error:
        raise CheckpointError(
            f"{file} is damaged, or holds objects that run code when they are loaded: {why(error)}"
        ) from error
    if not isinstance(loaded, dict) or PARAM_GROUPS not in loaded:
        raise CheckpointError(f"{path} is damaged: {META} lacks {PARAM_GROUPS}.")
    check_besides(path, META, loaded[PARAM_GROUPS], num_optimizers)
    return loaded


def check_content(path: Path) -> None:
    """Read all of a folder of ours but its tensors' values, as a load would.

    Raises:
        CheckpointError: When a load would be refused.
    """
    read_meta(path, len(OwnFolder(path).manifest["optimizers"]))


Source: TypeAlias = OwnFolder | DcpFolder | SafetensorsFolder
"""A folder that tensors are read from."""


def open_source(path: Path) -> Source:
    """Open a folder to read tensors from.

    Raises:
        CheckpointError: When it is no checkpoint that can be read.
    """
    path = locate(path)
    if path.is_dir() and not (path / MANIFEST).is_file():
        foreign = foreign_source(path)
        if foreign is not None:
            return foreign
    return OwnFolder(path)
