"""What a manifest may hold: its entries are checked before anything is made of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from shardplug.checkpoint.format.safe_names import check_component, check_inside, shown
from shardplug.errors import CheckpointError

__all__ = [
    "DTYPES",
    "OLD_SUM",
    "SUM",
    "check_besides",
    "check_depth",
    "check_files",
    "check_manifest",
    "check_shape",
]

DTYPES: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
"""Every dtype by the name that a manifest has for it."""

SUM = "sum_by_place"
"""Key for the sum of a left out tensor's bits, each times a weight of its place."""

OLD_SUM = "sum_of_bits"
"""Key for the sum without weights, which older checkpoints have instead."""

_LARGEST_BLOCK = 2**26
_MOST_DIMS = 64
_DEEPEST = 64
_IN_LATER_MODEL = re.compile(r"model\d{1,9}::.+", re.DOTALL)


def _wrong(where: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{where} is {shown(value)}, expected {expected}")


def _check_int(where: str, value: object, low: int = 0, high: int = 2**63 - 1) -> int:
    if type(value) is not int or not low <= value <= high:
        raise _wrong(where, value, f"a whole number from {low} to {high}")
    return value


def _check_text(where: str, value: object) -> None:
    if not isinstance(value, str) or "\0" in value:
        raise _wrong(where, value, "text")


def _check_map(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "names with a value each")
    return value


def _check_list(where: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    return value


def _optional(check: Callable[[str, Any], object], where: str, value: object) -> None:
    if value is not None:
        check(where, value)


def check_shape(where: str, value: object) -> tuple[int, ...]:
    """Return a shape, of a tensor whose elements can be counted.

    Raises:
        ValueError: For anything else.
    """
    expected = "a shape"
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_DIMS:
        raise _wrong(where, value, expected)
    if not all(type(size) is int and 0 <= size < 2**62 for size in value):
        raise _wrong(where, value, f"{expected}: whole numbers from 0")
    if math.prod(value) >= 2**62:
        raise _wrong(where, value, f"{expected} of fewer than 2**62 elements")
    return tuple(value)


def _check_dtype(where: str, value: object) -> None:
    if not isinstance(value, str) or value not in DTYPES:
        raise _wrong(where, value, "the name of a dtype")


def _check_tensor(where: str, value: object) -> None:
    entry = _check_map(where, value)
    shape = check_shape(f"{where}['shape']", entry.get("shape"))
    _check_dtype(f"{where}['dtype']", entry.get("dtype"))
    if entry.get("shard_dim") is not None:
        _check_int(f"{where}['shard_dim']", entry["shard_dim"], 0, max(0, len(shape) - 1))
    if "rank_bytes" in entry:
        for rank, size in enumerate(_check_list(f"{where}['rank_bytes']", entry["rank_bytes"])):
            _check_int(f"{where}['rank_bytes'][{rank}]", size, 0, 2**62)


def _check_tensors(where: str, value: object) -> None:
    for name, entry in _check_map(where, value).items():
        if not name:
            raise _wrong(where, name, "names that are not empty")
        _check_tensor(f"{where}[{shown(name)}]", entry)


def _check_left_out(where: str, value: object) -> None:
    _check_tensors(where, value)
    for name, entry in _check_map(where, value).items():
        for key in [key for key in (SUM, OLD_SUM) if key in entry] or [SUM]:
            _check_int(f"{where}[{shown(name)}]['{key}']", entry.get(key), 0, 2**64 - 1)


def _check_optimizer(where: str, value: object) -> None:
    for name, keys in _check_map(where, value).items():
        if not name or ("::" in name and not _IN_LATER_MODEL.fullmatch(name)):
            raise _wrong(where, name, "names of parameters")
        _check_tensors(f"{where}[{shown(name)}]", keys)


def _check_texts(where: str, value: object) -> None:
    for index, text in enumerate(_check_list(where, value)):
        _check_text(f"{where}[{index}]", text)


def _each(
    key: str, manifest: Mapping[str, Any], check: Callable[[str, Any], object], count: int
) -> None:
    """Check a list with one entry for each model."""
    values = _check_list(key, manifest.get(key, []))
    if len(values) > count:
        raise ValueError(f"{key} has {len(values)} entries, expected {count}: one for each model")
    for index, value in enumerate(values):
        check(f"{key}[{index}]", value)


def _check_source_dtypes(where: str, value: object) -> None:
    for name, dtype in _check_map(where, value).items():
        _check_dtype(f"{where}[{shown(name)}]", dtype)


def _check_tied(where: str, value: object) -> None:
    for name, others in _check_map(where, value).items():
        _check_texts(f"{where}[{shown(name)}]", others)


def _check_hugging_face(where: str, value: object, models: int) -> None:
    entry = _check_map(where, value)
    _check_int(f"{where}['model']", entry.get("model"), 0, models - 1)
    _check_text(f"{where}['prefix']", entry.get("prefix"))
    _optional(_check_text, f"{where}['class']", entry.get("class"))
    for key in ("config", "generation_config"):
        _optional(_check_map, f"{where}['{key}']", entry.get(key))
    origin = (entry.get("config") or {}).get("_name_or_path")
    _optional(_check_text, f"{where}['config']['_name_or_path']", origin)
    _check_texts(f"{where}['ignored']", entry.get("ignored", []))
    for name, adapter in _check_map(f"{where}['peft']", entry.get("peft", {})).items():
        inside = f"{where}['peft'][{shown(name)}]"
        try:
            check_component(name)
        except ValueError as error:
            raise ValueError(f"the name of an adapter in {where}['peft'] {error}") from error
        content = _check_map(inside, adapter)
        _check_map(f"{inside}['config']", content.get("config"))
        if content.get("names") is not None:
            for theirs, own in _check_map(f"{inside}['names']", content["names"]).items():
                _check_text(f"{inside}['names'][{shown(theirs)}]", own)


def check_files(folder: Path, files: object, block_bytes: object) -> None:
    """Check the list of a folder's files: names, sizes, and the number of checksums.

    Raises:
        ValueError: Naming the first entry that is wrong.
    """
    block = _check_int("block_bytes", block_bytes, 1, _LARGEST_BLOCK)
    for name, value in _check_map("files", files).items():
        where = f"files[{shown(name)}]"
        try:
            check_inside(folder, name)
        except ValueError as error:
            raise ValueError(f"a name in files {error}") from error
        entry = _check_map(where, value)
        size = _check_int(f"{where}['bytes']", entry.get("bytes"))
        if "crc32" in entry:
            sums = _check_list(f"{where}['crc32']", entry["crc32"])
            if len(sums) != -(-size // block):
                raise ValueError(
                    f"{where}['crc32'] has {len(sums)} sums, expected {-(-size // block)} for "
                    f"{size} bytes"
                )
            for index, number in enumerate(sums):
                _check_int(f"{where}['crc32'][{index}]", number, 0, 2**32 - 1)


def check_manifest(manifest: Mapping[str, Any]) -> None:
    """Check everything in a manifest but the list of files; see `check_files`.

    Keys that are not known are left alone: they are facts that whoever saved wanted to keep.

    Raises:
        ValueError: Naming the first entry that is wrong, and what belongs there.
    """
    models = _check_list("models", manifest["models"])
    for index, model in enumerate(models):
        _check_tensors(f"models[{index}]", model)
    for index, state in enumerate(_check_list("optimizers", manifest["optimizers"])):
        _check_optimizer(f"optimizers[{index}]", state)
    _check_int("world_size", manifest["world_size"], 0, 2**24)
    for key in ("step", "stage", "replicate_size"):
        _optional(_check_int, key, manifest.get(key))
    for key in ("framework", "torch", "saved_at"):
        _optional(_check_text, key, manifest.get(key))
    at = manifest.get("saved_at_seconds")
    if at is not None and (type(at) not in (int, float) or not 0 <= at < 2**40):
        raise _wrong("saved_at_seconds", at, "seconds since 1970")
    for index, entry in enumerate(_check_list("hugging_face", manifest.get("hugging_face", []))):
        _check_hugging_face(f"hugging_face[{index}]", entry, len(models))
    _each("source_dtypes", manifest, _check_source_dtypes, len(models))
    _each("tied", manifest, _check_tied, len(models))
    _each("left_out", manifest, _check_left_out, len(models))
    _each("changed_base", manifest, _check_texts, len(models))
    for index, model in enumerate(models):
        for name, entry in model.items():
            sizes = entry.get("rank_bytes", [0] * manifest["world_size"])
            if len(sizes) != manifest["world_size"]:
                raise ValueError(
                    f"models[{index}][{shown(name)}]['rank_bytes'] has {len(sizes)} entries, "
                    f"expected {manifest['world_size']}: one for each rank"
                )


def check_besides(folder: Path, file: str, found: object, count: int) -> None:
    """Check what a checkpoint holds of its optimizers besides tensors.

    Args:
        folder: The checkpoint, for messages.
        file: What of it was read, for messages.
        found: For each optimizer its class, parameter groups, and state that is no tensor.
        count: How many optimizers there are.

    Raises:
        CheckpointError: Naming the first entry that is wrong.
    """
    try:
        entries = _check_list("optimizers", found)
        if len(entries) != count:
            raise ValueError(f"optimizers has {len(entries)} entries, expected {count}")
        for index, value in enumerate(entries):
            where = f"optimizers[{index}]"
            entry = _check_map(where, value)
            _optional(_check_text, f"{where}['class']", entry.get("class"))
            inside = f"{where}['param_groups']"
            for number, group in enumerate(_check_list(inside, entry.get("param_groups"))):
                options = _check_map(f"{inside}[{number}]", group)
                _check_texts(f"{inside}[{number}]['params']", options.get("params"))
            inside = f"{where}['plain_state']"
            for name, state in _check_map(inside, entry.get("plain_state")).items():
                _check_text(f"a name in {inside}", name)
                _check_map(f"{inside}[{shown(name)}]", state)
    except ValueError as error:
        raise CheckpointError(f"{folder} is damaged: {error}, in {file}.") from error


def check_depth(
    value: Any, deepest: int = _DEEPEST, most: int | None = None, most_bytes: int | None = None
) -> None:
    """Check that nested values end, so that functions which call themselves can go through them.

    Args:
        value: Dictionaries, lists, tuples and sets of anything.
        deepest: Levels that are allowed.
        most: Values that are allowed in all, each counted as often as it is reached.
        most_bytes: Bytes that copies of all tensors may take, which may be expanded ones.

    Raises:
        ValueError: For deeper ones or more, and for text that is no Unicode.
    """
    seen = copied = 0
    left: list[tuple[Any, int]] = [(value, 1)]
    while left:
        item, depth = left.pop()
        seen += 1
        if most is not None and seen > most:
            raise ValueError("holds values that contain one another too many times")
        if isinstance(item, str):
            if not item.isascii():
                _check_unicode(item)
            continue
        if isinstance(item, torch.Tensor) and item.layout == torch.strided:
            copied += item.numel() * item.element_size()
            if most_bytes is not None and copied > most_bytes:
                raise ValueError(f"holds tensors of {copied} bytes, more than are in the file")
        inner: Collection[Any] = ()
        if isinstance(item, Mapping):
            inner = [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            inner = item
        if inner and depth >= deepest:
            raise ValueError(f"is nested more than {deepest} levels deep")
        left.extend((part, depth + 1) for part in inner)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"holds {shown(text)}, which is no Unicode text") from error
