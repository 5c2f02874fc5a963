"""Says what is in a checkpoint folder, and whether it is whole. Reads no tensor into memory."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardplug.checkpoint.foreign.foreign_folders import Foreign, foreign_source, identify
from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.commit import MANIFEST, is_leftover, locate
from shardplug.checkpoint.format.durable import verify_file
from shardplug.checkpoint.read.resume import candidates, resume_point
from shardplug.checkpoint.read.stored_tensors import check_content
from shardplug.errors import CheckpointError

__all__ = ["CheckpointInfo", "FolderInfo", "Group", "inspect", "inspect_folder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The tensors of one model, or of one optimizer's state."""

    tensors: int
    """How many tensors."""

    parameters: int
    """For a model the numbers in its tensors; for an optimizer the parameters that have state."""

    bytes: int
    """Size of the tensors."""

    dtypes: Mapping[str, int]
    """Bytes by dtype."""

    came_in: tuple[str, ...] = ()
    """For a model the other dtypes that its parameters came in, and are exported in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What is in a checkpoint."""

    path: Path
    kind: str
    """"shardplug", or what else it is, like "dcp" or "deepspeed"."""

    health: str
    """"whole", "damaged", "unfinished", "newer" (written by a later version), or "foreign"."""

    verified: bool = False
    """Whether checksums were compared, and not only sizes."""

    problems: tuple[tuple[str, str], ...] = ()
    """Damaged files, and what is wrong with each."""

    description: str = ""
    advice: str = ""
    """What to do, for folders that are not shardplug's."""

    loads: bool = True
    """Whether it can be loaded, apart from damage."""

    version: int | None = None
    framework: str | None = None
    stage: int | None = None
    world_size: int | None = None
    replicate_size: int | None = None
    step: int | None = None
    torch: str | None = None
    saved_at: str | None = None
    saved_at_seconds: float | None = None
    models: tuple[Group, ...] = ()
    optimizers: tuple[Group, ...] = ()
    hugging_face: tuple[str, ...] = ()
    """Classes of the Hugging Face models, with the prefix of their names, like "llama."."""

    bytes: Mapping[str, int] = field(default_factory=dict)
    """Size by kind: "model", "optimizer", "other" and "total"."""

    tensors: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Shape and dtype by name; optimizer state under "optimizer_<i>/<name>/<key>"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderInfo:
    """The checkpoints in a folder."""

    path: Path
    checkpoints: tuple[CheckpointInfo, ...]
    """Newest first."""

    resume: Path | None
    """The one that a resumed run takes, or None where none is whole."""


def inspect(path: str | os.PathLike[str], *, verify: bool = False) -> CheckpointInfo:
    """Say what is in a checkpoint folder, and whether it is whole. Never changes anything.

    Args:
        path: A checkpoint folder of shardplug or of another tool, or anything else.
        verify: Read every file and compare its checksums; else only sizes are compared.

    Returns:
        What was found; what is wrong is in `health` and `problems`.

    Raises:
        CheckpointError: When there is nothing at the path.
    """
    path = locate(path)
    if not path.exists():
        raise CheckpointError(f"Expected a checkpoint at {path}, found nothing.")
    if not (path / MANIFEST).is_file():
        return _foreign(path, identify(path))
    try:
        manifest = manifests.content(path)
    except ValueError as error:
        return CheckpointInfo(
            path=path, kind="shardplug", health="damaged", problems=((MANIFEST, str(error)),)
        )
    if manifest["version"] > manifests.VERSION:
        return CheckpointInfo(
            path=path,
            kind="shardplug",
            health="newer",
            version=manifest["version"],
            description=f"a checkpoint of format version {manifest['version']}",
            advice=f"This shardplug reads up to {manifests.VERSION}: install a newer one.",
            loads=False,
        )
    problems = _problems(path, manifest, verify)
    if verify and not problems:
        try:
            check_content(path)
        except CheckpointError as error:
            problems = ((path.name, str(error).removeprefix(f"{path} is damaged: ")),)
    checked = verify and any("crc32" in entry for entry in manifest["files"].values())
    return _described(
        path,
        manifest,
        kind="shardplug",
        health="damaged" if problems else "whole",
        verified=checked,
        problems=problems,
        description="a checkpoint of shardplug",
        total=sum(entry["bytes"] for entry in manifest["files"].values()),
    )


def inspect_folder(path: str | os.PathLike[str], *, verify: bool = False) -> FolderInfo | None:
    """List the checkpoints in a folder.

    Args:
        path: A folder of checkpoints, such as a run's.
        verify: As for `inspect`.

    Returns:
        None where the folder is a checkpoint itself, or holds none.
    """
    path = Path(path)
    if not path.is_dir() or identify(path).kind not in ("checkpoints", "unknown"):
        return None
    found = [inspect(inner, verify=verify) for inner in candidates(path)]
    if not found:
        return None
    found.sort(key=lambda info: (info.saved_at_seconds or 0.0, info.path.name), reverse=True)
    try:
        point = resume_point(path, verify=verify, warn=False)
    except CheckpointError:
        point = None
    return FolderInfo(
        path=path, checkpoints=tuple(found), resume=None if point is None else point.path
    )


def _problems(path: Path, manifest: Mapping[str, Any], verify: bool) -> tuple[tuple[str, str], ...]:
    found = []
    for name, entry in manifest["files"].items():
        expected = entry if verify else {"bytes": entry["bytes"]}
        wrong = verify_file(path / name, expected, manifest["block_bytes"])
        if wrong is not None:
            found.append((name, wrong))
    return tuple(found)


def _foreign(path: Path, kind: Foreign) -> CheckpointInfo:
    unfinished = kind.kind in ("unfinished", "unfinished_dcp") or (
        path.is_dir() and is_leftover(path)
    )
    facts: dict[str, Any] = {
        "kind": kind.kind,
        "health": "unfinished" if unfinished else "foreign",
        "description": kind.description,
        "advice": kind.advice,
        "loads": kind.loads,
    }
    try:
        source = foreign_source(path)
    except CheckpointError as error:
        facts |= {"health": "damaged", "problems": ((path.name, str(error)),)}
        source = None
    if source is None:
        return CheckpointInfo(path=path, **facts)
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return _described(path, source.manifest, total=total, **facts)


def _described(
    path: Path, manifest: Mapping[str, Any], *, total: int, **facts: Any
) -> CheckpointInfo:
    came_in = [*manifest.get("source_dtypes", ()), *({} for _ in manifest["models"])]
    models = tuple(
        _group(model, came_in=tuple(sorted(set(other.values()))))
        for model, other in zip(manifest["models"], came_in, strict=False)
    )
    optimizers = tuple(
        _group(
            {(name, key): entry for name, keys in state.items() for key, entry in keys.items()},
            owners=len(state),
        )
        for state in manifest["optimizers"]
    )
    sizes = {
        "model": sum(group.bytes for group in models),
        "optimizer": sum(group.bytes for group in optimizers),
    }
    sizes["other"] = max(0, total - sum(sizes.values()))
    known: dict[str, Any] = {
        key: manifest.get(key)
        for key in ("version", "framework", "stage", "replicate_size", "step", "torch")
    }
    if manifest["world_size"]:
        known["world_size"] = manifest["world_size"]
    return CheckpointInfo(
        path=path,
        models=models,
        optimizers=optimizers,
        bytes={**sizes, "total": total},
        tensors=_tensors(manifest),
        hugging_face=tuple(
            f"{entry.get('class') or 'a model'}"
            + (f" under {entry['prefix']}" if entry["prefix"] else "")
            + (f", adapters {', '.join(entry['peft'])}" if "peft" in entry else "")
            for entry in manifest.get("hugging_face", ())
        ),
        **_saved_at(path, manifest),
        **known,
        **facts,
    )


def _saved_at(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    if manifest.get("saved_at") and manifest.get("saved_at_seconds"):
        return {key: manifest[key] for key in ("saved_at", "saved_at_seconds")}
    file = path / MANIFEST
    seconds = (file if file.is_file() else path).stat().st_mtime
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    return {"saved_at": text, "saved_at_seconds": seconds}


def _group(
    entries: Mapping[Any, Mapping[str, Any]],
    *,
    owners: int | None = None,
    came_in: tuple[str, ...] = (),
) -> Group:
    dtypes: Counter[str] = Counter()
    numbers = 0
    for entry in entries.values():
        numel = math.prod(entry["shape"])
        dtypes[entry["dtype"]] += numel * manifests.dtype_of(entry).itemsize
        numbers += numel
    return Group(
        tensors=len(entries),
        parameters=numbers if owners is None else owners,
        bytes=sum(dtypes.values()),
        dtypes=dict(dtypes.most_common()),
        came_in=came_in,
    )


def _tensors(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for index, model in enumerate(manifest["models"]):
        front = f"model{index}::" if index else ""
        found |= {front + name: entry for name, entry in model.items()}
    for index, state in enumerate(manifest["optimizers"]):
        for name, keys in state.items():
            found |= {f"optimizer_{index}/{name}/{key}": entry for key, entry in keys.items()}
    return found
