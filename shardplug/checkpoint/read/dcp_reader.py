"""Reads tensors of a torch.distributed.checkpoint (DCP) folder whose metadata was checked."""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from shardplug.checkpoint.format.dcp_metadata import METADATA, UNDECODABLE, Record, decode
from shardplug.checkpoint.format.plain import UNREADABLE, load_tensor, why
from shardplug.checkpoint.format.safe_names import check_inside, shown
from shardplug.checkpoint.format.schema import check_shape
from shardplug.errors import CheckpointError, ShardplugError

__all__ = ["CheckedReader", "Place", "read_metadata"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece of a tensor, or an object, is. Attributes are named as in DCP's own class."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


_ELEMENTS_PER_BYTE = 8
"""At most: quantised state is kept in fewer bits than the dtype of its metadata has."""


def read_metadata(
    folder: Path, file_system: FileSystem | None = None, files: Collection[str] | None = None
) -> Metadata:
    """Read and check a folder's metadata. No code in it is run, and nothing else is loaded.

    Args:
        folder: The folder.
        file_system: What the file is read through.
        files: Names of the files that tensors may be in; None admits all in the folder.

    Returns:
        The metadata: pieces cover their tensors, and lie in files of the folder that have room
        for them.

    Raises:
        CheckpointError: For a file that is missing, or holds anything else.
    """
    try:
        path = check_inside(folder, METADATA)
        with (file_system or FileSystem()).create_stream(path, "rb") as stream:
            found = decode(stream.read())
        return _metadata(folder, found, files)
    except OSError as error:
        raise CheckpointError(f"{folder / METADATA} cannot be read: {error}.") from error
    except UNDECODABLE as error:
        text = str(error) if type(error) is ValueError else f"is no whole pickle: {shown(error)}"
        raise CheckpointError(f"{folder} is damaged: {METADATA} {text}.") from error


# -- From records to torch's classes ---------------------------------------------------------------


@contextmanager
def _at(place: str, name: Any) -> Iterator[None]:
    """Name the place that an error is about."""
    try:
        yield
    except UNDECODABLE as error:
        raise ValueError(f"{error} at {place}[{shown(name)}]") from error


def _fields(value: Any, kind: str) -> Any:
    if type(value) is not Record or value.kind != kind:
        raise ValueError(f"has {shown(value)} in place of a {kind}")
    return value.fields


def _named(value: Any, kind: str) -> dict[str, Any]:
    fields = _fields(value, kind)
    if type(fields) is not dict:
        raise ValueError(f"has {shown(fields)} in place of the fields of a {kind}")
    return fields


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"has {shown(value)} in place of {what}")
    return value


def _shape(value: Any, what: str) -> tuple[int, ...]:
    return check_shape(f"has {what} that", value)


def _metadata(folder: Path, found: Any, files: Collection[str] | None) -> Metadata:
    fields = _named(found, "Metadata")
    entries: dict[str, Any] = {}
    for key, value in _dict(fields.get("state_dict_metadata"), "state_dict_metadata").items():
        with _at("state_dict_metadata", key):
            if not isinstance(key, str):
                raise ValueError("has a key that is no text")
            entries[key] = _entry(value)
    storage: dict[MetadataIndex, Place] = {}
    for key, value in _dict(fields.get("storage_data"), "storage_data").items():
        at = _named(key, "MetadataIndex")
        with _at("storage_data", at.get("fqn")):
            storage[_index(at, entries)] = _place(value)
    _check_places(folder, entries, storage, files)
    return Metadata(
        state_dict_metadata=entries,
        planner_data=_planner_data(fields.get("planner_data"), entries),
        storage_data=storage,
        storage_meta=StorageMeta(),
    )


def _entry(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(value) is Record and value.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _named(value, "TensorStorageMetadata")
    properties = _fields(fields.get("properties"), "TensorProperties")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"has the properties {shown(properties)}, expected a dtype first,")
    size = _shape(fields.get("size"), "a size")
    chunks = fields.get("chunks")
    if type(chunks) is not list:
        raise ValueError(f"has {shown(chunks)} in place of a list of pieces")
    pieces = [_chunk(chunk, size) for chunk in chunks]
    _check_cover(size, pieces)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype), size=torch.Size(size), chunks=pieces
    )


def _chunk(value: Any, size: tuple[int, ...]) -> ChunkStorageMetadata:
    fields = _named(value, "ChunkStorageMetadata")
    offsets = _shape(fields.get("offsets"), "a place of a piece")
    sizes = _shape(fields.get("sizes"), "a size of a piece")
    inside = len(offsets) == len(sizes) == len(size) and all(
        offset + length <= whole for offset, length, whole in zip(offsets, sizes, size, strict=True)
    )
    if not inside:
        raise ValueError(
            f"has a piece of sizes {shown(sizes)} from {shown(offsets)}, which is not inside a "
            f"tensor of {shown(size)},"
        )
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def _index(at: Mapping[str, Any], entries: Mapping[str, Any]) -> MetadataIndex:
    name, offset, hint = at.get("fqn"), at.get("offset"), at.get("index")
    if not isinstance(name, str) or name not in entries:
        raise ValueError("has something that is not in state_dict_metadata")
    if offset is not None:
        offset = _shape(offset, "a place of a piece")
    return MetadataIndex(name, offset, hint if type(hint) is int else None)


def _place(value: Any) -> Place:
    place = _named(value, "_StorageInfo")
    name, start, length = (place.get(key) for key in ("relative_path", "offset", "length"))
    if not all(type(n) is int and 0 <= n < 2**62 for n in (start, length)):
        raise ValueError(
            f"has {shown(length)} bytes from byte {shown(start)}, expected whole numbers from 0,"
        )
    transforms = place.get("transform_descriptors") or ()
    if not isinstance(transforms, (list, tuple)):
        raise ValueError(f"has {shown(transforms)} in place of names of transforms")
    if not all(isinstance(text, str) for text in (name, *transforms)):
        raise ValueError(f"has {shown((name, *transforms))} in place of the name of a file")
    return Place(str(name), int(start or 0), int(length or 0), tuple(transforms))


def _check_cover(size: tuple[int, ...], pieces: list[ChunkStorageMetadata]) -> None:
    """Check that the pieces of a tensor hold each of its elements once."""
    distinct = {(tuple(p.offsets), tuple(p.sizes)) for p in pieces if math.prod(p.sizes)}
    covered = sum(math.prod(sizes) for _, sizes in distinct)
    if covered != math.prod(size):
        raise ValueError(f"has {covered} elements in the pieces of a tensor of {math.prod(size)}")
    if len(distinct) < 2:
        return
    # Along the dimension with most of the cuts only few pieces reach into one another.
    axis = max(range(len(size)), key=lambda d: len({offsets[d] for offsets, _ in distinct}))
    ordered = sorted(distinct, key=lambda piece: piece[0][axis])
    active: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offsets, sizes in ordered:
        active = [one for one in active if one[0][axis] + one[1][axis] > offsets[axis]]
        for others, lengths in active:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(offsets, sizes, others, lengths, strict=True)
            ):
                raise ValueError(f"has pieces that overlap, from {offsets} and {others},")
        active.append((offsets, sizes))


def _check_places(
    folder: Path,
    entries: Mapping[str, Any],
    storage: Mapping[MetadataIndex, Place],
    files: Collection[str] | None,
) -> None:
    """Check that every piece has bytes of its own in a file of the folder."""
    _check_files(folder, storage, files)
    for key, entry in entries.items():
        pieces = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
        for piece in pieces:
            place = storage.get(MetadataIndex(key, None if piece is None else piece.offsets))
            if place is None:
                raise ValueError(f"does not say where {shown(key)} is")
            if piece is not None and math.prod(piece.sizes) > _ELEMENTS_PER_BYTE * place.length:
                raise ValueError(
                    f"has {shown(tuple(entry.size))} as the size of {shown(key)}, in a piece of "
                    f"{place.length} bytes"
                )


def _check_files(
    folder: Path, storage: Mapping[MetadataIndex, Place], files: Collection[str] | None
) -> None:
    sizes: dict[str, int] = {}
    taken: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in storage.items():
        name = info.relative_path
        if name not in sizes:
            with _at("storage_data", index.fqn):
                sizes[name] = _file_size(folder, name, files)
        end = info.offset + info.length
        if end > sizes[name]:
            raise ValueError(
                f"has {shown(index.fqn)} up to byte {end} of {shown(name)}, which has "
                f"{sizes[name]} bytes"
            )
        taken.setdefault(name, []).append((info.offset, end, index.fqn))
    for name, ranges in taken.items():
        ranges.sort()
        for (_, end, first), (start, _, second) in zip(ranges, ranges[1:], strict=False):
            if start < end:
                raise ValueError(
                    f"has {shown(first)} and {shown(second)} in the same bytes of {shown(name)}"
                )


def _file_size(folder: Path, name: str, files: Collection[str] | None) -> int:
    try:
        path = check_inside(folder, name)
    except ValueError as error:
        raise ValueError(f"has the name of a file that {error},") from error
    if (files is not None and name not in files) or not path.is_file():
        raise ValueError(f"has {shown(name)}, which is no file of the folder,")
    return path.stat().st_size


def _planner_data(found: Any, entries: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the keys that led to each entry; where they are not known, its name."""
    known = found if isinstance(found, dict) else {}
    paths: dict[str, tuple[Any, ...]] = {}
    for key in entries:
        path = known.get(key, (key,))
        plain = isinstance(path, (tuple, list)) and all(type(p) in (str, int) for p in path)
        if not plain or ".".join(map(str, path)) != key:
            raise ValueError(f"has {shown(path)} as the keys that lead to {shown(key)}")
        paths[key] = tuple(path)
    return paths


# -- Reading ---------------------------------------------------------------------------------------


class CheckedReader(FileSystemReader):
    """Reads what checked metadata says, each file from its beginning to its end.

    Args:
        path: The folder.
        metadata: What `read_metadata` returned for it, which is not read again.
        file_system: What files are read through.
    """

    def __init__(
        self, path: Path, metadata: Metadata, file_system: FileSystem | None = None
    ) -> None:
        super().__init__(path)
        self._metadata = metadata
        if file_system is not None:
            self.fs = file_system

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was checked; see the base class."""
        return replace(self._metadata, storage_meta=StorageMeta(load_id=self.load_id))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Put what is read into the order of the bytes; see the base class."""

        def place(item: ReadItem) -> tuple[str, int]:
            stored = self.storage_data[item.storage_index]
            return stored.relative_path, stored.offset

        return replace(plan, items=sorted(plan.items, key=place))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the pieces of a plan; see the base class.

        Raises:
            CheckpointError: When a file holds another tensor than the metadata says.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self.storage_data[item.storage_index].relative_path
            by_file.setdefault(name, []).append(item)
        for name, items in by_file.items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for item in items:
                    self._read_item(stream, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, stream: Any, item: ReadItem, planner: LoadPlanner) -> None:
        info = self.storage_data[item.storage_index]
        view = self._slice_file(stream, info)
        raw = self.transforms.transform_load_stream(item, info.transform_descriptors or (), view)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(raw.read(-1)))
            return
        tensor = self._load(raw if raw.seekable() else io.BytesIO(raw.read(-1)), info)
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        expected = {tuple(c.offsets): tuple(c.sizes) for c in entry.chunks}  # type: ignore[union-attr]
        sizes = expected[tuple(item.storage_index.offset or ())]
        if not isinstance(tensor, torch.Tensor) or (tuple(tensor.shape), tensor.dtype) != (
            sizes,
            entry.properties.dtype,  # type: ignore[union-attr]
        ):
            raise CheckpointError(
                f"{self.path} is damaged: {info.relative_path} holds {_described(tensor)} at byte "
                f"{info.offset}, where {METADATA} has a piece of {item.storage_index.fqn}."
            )
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            if length < tensor.size(dim):
                tensor = tensor.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _load(self, file: Any, info: Place) -> Any:
        try:
            return load_tensor(file)
        except (ShardplugError, OSError):
            raise
        except UNREADABLE as error:
            raise CheckpointError(
                f"{self.path} is damaged: {info.relative_path} has no tensor that can be read at "
                f"byte {info.offset}: {why(error)}."
            ) from error


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
