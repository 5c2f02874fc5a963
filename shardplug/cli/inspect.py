"""Say what is in a checkpoint, and whether it is whole.

CHECKPOINT may be a checkpoint folder, a folder of checkpoints (listed newest first, with the one
that a resumed run takes), or a folder of another tool (named, with the way to convert it).
Exit code 0: whole. 1: damaged or not finished. 2: nothing that can be loaded.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardplug.checkpoint.format.commit import locate
from shardplug.checkpoint.read.inspection import (
    CheckpointInfo,
    FolderInfo,
    Group,
    inspect,
    inspect_folder,
)

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder")
    parser.add_argument(
        "--verify", action="store_true", help="read every file and compare its checksums"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--tensors", action="store_true", help="list every tensor with its shape and dtype"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print, and return the exit code."""
    if not locate(arguments.checkpoint).exists():
        print(f"shardplug: there is nothing at {arguments.checkpoint}", file=sys.stderr)
        return 2
    folder = inspect_folder(arguments.checkpoint, verify=arguments.verify)
    if folder is not None:
        if arguments.json:
            print(_json(folder, arguments.tensors))
        else:
            print("\n".join(_folder_lines(folder)))
        return 0 if folder.resume is not None else 1
    info = inspect(arguments.checkpoint, verify=arguments.verify)
    if arguments.json:
        print(_json(info, arguments.tensors))
    else:
        print("\n".join(_lines(info, arguments.tensors)))
    if info.health in ("damaged", "unfinished"):
        return 1
    return 0 if info.loads else 2


def _json(found: CheckpointInfo | FolderInfo, tensors: bool) -> str:
    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: without(item)
                for key, item in value.items()
                if tensors or key != "tensors" or not isinstance(item, dict)
            }
        return [without(item) for item in value] if isinstance(value, (list, tuple)) else value

    plain: dict[str, Any] = dataclasses.asdict(found)
    return json.dumps(without(plain), indent=2, default=str)


# -- One checkpoint -------------------------------------------------------------------------------


def _lines(info: CheckpointInfo, tensors: bool) -> Iterable[str]:
    yield f"{info.path}: {info.description or 'a checkpoint of shardplug'}"
    if info.advice:
        yield f"  {info.advice}"
    yield from _table(
        [
            ("health", _health(info)),
            ("saved", info.saved_at),
            ("framework", info.framework),
            ("step", info.step),
            ("stage", info.stage),
            ("world size", _world(info)),
            ("format", None if info.version is None else f"version {info.version}"),
            ("torch", info.torch),
            *(("Hugging Face", text) for text in info.hugging_face),
            *(("model", _model(i, group)) for i, group in enumerate(info.models)),
            *(("optimizer", _optimizer(i, group)) for i, group in enumerate(info.optimizers)),
            ("size", _sizes(info.bytes)),
        ]
    )
    if info.problems:
        yield "damaged files:"
        yield from (f"  {name}: {wrong}" for name, wrong in info.problems)
    if tensors and info.tensors:
        yield "tensors:"
        width = max(map(len, info.tensors))
        for name, entry in info.tensors.items():
            yield f"  {name:{width}}  {entry['dtype']:9} {tuple(entry['shape'])}"


def _table(rows: Sequence[tuple[str, Any]]) -> Iterable[str]:
    return (f"  {name:12} {value}" for name, value in rows if value is not None)


def _health(info: CheckpointInfo) -> str | None:
    if info.kind != "shardplug":
        return info.health if info.health != "foreign" else None
    if info.health == "whole":
        if info.verified:
            return "whole: every checksum is right"
        if info.version == 1:
            return "whole by its sizes; format version 1 has no checksums"
        return "whole by its sizes; --verify reads the checksums"
    if info.health == "damaged":
        return f"damaged: {len(info.problems)} file" + "s" * (len(info.problems) != 1)
    return info.health


def _world(info: CheckpointInfo) -> str | None:
    if info.world_size is None:
        return None
    replicas = info.replicate_size or 1
    text = f"{info.world_size} rank" + "s" * (info.world_size != 1)
    return text + (f" in {replicas} replicas" if replicas > 1 else "")


def _model(index: int, group: Group) -> str:
    came_in = f", came in {', '.join(group.came_in)}" if group.came_in else ""
    return (
        f"{index}: {group.parameters:,} parameters in {group.tensors} tensors, "
        f"{_size(group.bytes)} ({', '.join(group.dtypes)}{came_in})"
    )


def _optimizer(index: int, group: Group) -> str:
    if not group.tensors:
        return f"{index}: no state"
    return (
        f"{index}: state of {group.parameters} parameters in {group.tensors} tensors, "
        f"{_size(group.bytes)} ({', '.join(group.dtypes)})"
    )


def _sizes(sizes: Mapping[str, int]) -> str | None:
    if not sizes:
        return None
    parts = [f"{kind} {_size(sizes[kind])}" for kind in ("model", "optimizer", "other")]
    return f"{_size(sizes['total'])}: {', '.join(parts)}"


def _size(count: int) -> str:
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count} bytes"


# -- A folder of checkpoints ----------------------------------------------------------------------


def _folder_lines(folder: FolderInfo) -> Iterable[str]:
    yield f"{folder.path}: {len(folder.checkpoints)} checkpoints, newest first"
    width = max((len(info.path.name) for info in folder.checkpoints), default=0)
    for info in folder.checkpoints:
        facts = [
            info.health,
            None if info.step is None else f"step {info.step}",
            info.saved_at,
            _size(info.bytes["total"]) if info.bytes else None,
        ]
        marker = "*" if info.path == folder.resume else " "
        text = ", ".join(fact for fact in facts if fact is not None)
        yield f"{marker} {info.path.name:{width}}  {text}"
        yield from (f"      {name}: {wrong}" for name, wrong in info.problems)
    yield (
        "none is whole: a run could not be resumed"
        if folder.resume is None
        else f"* a resumed run takes {folder.resume.name}"
    )
