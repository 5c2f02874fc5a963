"""Writes a checkpoint folder: aside first, manifest last, then one rename."""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.agree import check_agreement, check_content, check_readable
from shardplug.checkpoint.collective import rank_and_size, together
from shardplug.checkpoint.manifest import (
    MANIFEST,
    describe,
    file_sizes,
    optimizer_key,
    state_key,
)
from shardplug.checkpoint.rng import rng_state
from shardplug.errors import CheckpointError

__all__ = ["PARAM_GROUPS", "write"]

PARAM_GROUPS = "shardplug_param_groups"
"""Key in meta.pt for what the optimizers hold besides tensors."""

_SAVING = "Saving"


def write(
    path: str | os.PathLike[str],
    *,
    models: Sequence[Mapping[str, torch.Tensor]],
    optimizers: Sequence[Mapping[str, Any]],
    meta: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    side_files: Callable[[Path], None] | None = None,
) -> None:
    """Write one checkpoint. Collective; all ranks succeed or all raise.

    Tensors that are whole on every rank (buffers, counters) are taken from rank 0.

    Args:
        path: The folder to make; rank 0's counts. A checkpoint there is replaced; another
            non-empty folder, or a file, is not.
        models: For each model its tensors by name (see `state_of_model`).
        optimizers: For each optimizer its state by name (see `state_of_optimizer`).
        meta: What else to keep, made of plain types and tensors; rank 0's counts.
        run: Facts about the run for the manifest, made of plain types (stage, framework, step).
        side_files: Called on every rank with the folder being written, to add files to it.

    Raises:
        CheckpointError: On every rank, naming the first rank that failed and why. What was at
            `path` is still there then, and nothing else is left behind.
    """
    target, work = _agree_on_paths(path)
    whole = {**meta, PARAM_GROUPS: [_besides_tensors(optimizer) for optimizer in optimizers]}
    together(lambda: _check(optimizers, whole), _SAVING)
    check_agreement(models, optimizers)
    run = {"world_size": rank_and_size()[1], **(run or {})}
    try:
        together(lambda: _prepare(target, work), _SAVING)
        together(lambda: _write_tensors(work, models, optimizers), _SAVING)
        together(lambda: _write_rest(work, whole, side_files), _SAVING)
        together(lambda: _publish(target, work, models, optimizers, run), _SAVING)
    except CheckpointError:
        if rank_and_size()[0] == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise


def _besides_tensors(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "class": optimizer.get("class"),
        "param_groups": list(optimizer["param_groups"]),
        "plain_state": {
            name: {k: v for k, v in values.items() if not isinstance(v, torch.Tensor)}
            for name, values in optimizer["state"].items()
        },
    }


def _check(optimizers: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> None:
    check_content(optimizers)
    if rank_and_size()[0] == 0:
        check_readable(meta)


def _agree_on_paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    def absolute() -> str:
        target = Path(path).absolute()
        if not target.name:
            raise CheckpointError(f"Expected the path of a folder to make, got {target}.")
        return str(target)

    box: list[Any] = [together(absolute, _SAVING), uuid.uuid4().hex[:8]]
    if rank_and_size()[1] > 1:
        dist.broadcast_object_list(box, src=0)
    target = Path(box[0])
    return target, target.with_name(f".{target.name}.tmp-{box[1]}")


def _prepare(target: Path, work: Path) -> None:
    if rank_and_size()[0]:
        return
    if target.is_file():
        raise CheckpointError(
            f"Expected a new path or an older checkpoint of shardplug, but {target} is a file. "
            "Choose another path, or remove it."
        )
    if target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).is_file():
        raise CheckpointError(
            f"Expected a new path or an older checkpoint of shardplug, but {target} is a folder "
            "with other things in it. Choose another path, or empty it."
        )
    work.mkdir(parents=True)


def _write_tensors(
    work: Path,
    models: Sequence[Mapping[str, torch.Tensor]],
    optimizers: Sequence[Mapping[str, Any]],
) -> None:
    rank, size = rank_and_size()

    def mine(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        # torch would spread whole tensors over the ranks; buffers may differ between them.
        return {
            key: value
            for key, value in values.items()
            if isinstance(value, DTensor) or (rank == 0 and isinstance(value, torch.Tensor))
        }

    tensors: dict[str, Any] = {state_key(i): mine(model) for i, model in enumerate(models)}
    for index, optimizer in enumerate(optimizers):
        tensors[optimizer_key(index)] = {
            "state": {name: mine(values) for name, values in optimizer["state"].items()}
        }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save_tensors(tensors, checkpoint_id=work, no_dist=size == 1)


def _write_rest(
    work: Path, meta: Mapping[str, Any], side_files: Callable[[Path], None] | None
) -> None:
    rank = rank_and_size()[0]
    torch.save(rng_state(), work / f"rng_{rank}.pt")
    if rank == 0:
        torch.save(dict(meta), work / "meta.pt")
    if side_files is not None:
        side_files(work)


def _publish(
    target: Path,
    work: Path,
    models: Sequence[Mapping[str, torch.Tensor]],
    optimizers: Sequence[Mapping[str, Any]],
    run: Mapping[str, Any],
) -> None:
    if rank_and_size()[0]:
        return
    manifest = {**describe(models, optimizers, run), "files": file_sizes(work)}
    draft = work / f"{MANIFEST}.tmp"
    with draft.open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(work / MANIFEST)
    if target.is_symlink():
        target.unlink()
    if not target.is_dir():
        work.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{work.name[-8:]}")
    target.rename(old)
    try:
        work.rename(target)
    except OSError:
        old.rename(target)
        raise
    try:
        shutil.rmtree(old)
    except OSError as error:
        warnings.warn(
            f"The new checkpoint is at {target}, but the one it replaced could not be removed "
            f"from {old}: {error}.",
            UserWarning,
            stacklevel=2,
        )
