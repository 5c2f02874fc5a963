"""Where a checkpoint's tensors are: our own folder, or one of another tool that can be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from shardplug.checkpoint import manifest as manifests
from shardplug.checkpoint.commit import MANIFEST, locate
from shardplug.checkpoint.dcp_folder import DcpFolder
from shardplug.checkpoint.durable import CheckedFileSystem
from shardplug.checkpoint.foreign import foreign_source
from shardplug.checkpoint.safetensors_folder import SafetensorsFolder

__all__ = ["Source", "open_source"]


class OwnFolder:
    """A folder that shardplug wrote.

    Args:
        path: The folder.

    Raises:
        CheckpointError: When it is none of a version that can be read, or files are not whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = manifests.read(path)

    def model_key(self, index: int, name: str) -> str:
        """Return DCP's key of a tensor of a model."""
        return f"{manifests.state_key(index, self.manifest['version'])}.{name}"

    def optimizer_key(self, index: int, name: str, key: str) -> str:
        """Return DCP's key of a tensor in an optimizer's state."""
        return f"{manifests.optimizer_key(index)}.state.{name}.{key}"

    def storage_reader(self) -> StorageReader:
        """Return a reader that checks what it reads."""
        reader = _OrderedReader(self.path)
        reader.fs = CheckedFileSystem(self.manifest["files"], self.manifest["block_bytes"])
        return reader


class _OrderedReader(FileSystemReader):
    """Reads each file from its beginning to its end."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        return replace(plan, items=sorted(plan.items, key=place))


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
