"""Weights out, as a Hugging Face folder: from a checkpoint without ranks, or from a live model.

Tensors pass through memory a few at a time, on the rank that writes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from shardplug.checkpoint.export.export_files import Item
from shardplug.checkpoint.export.export_folder import (
    ExportFolder,
    could_not_be_written,
    prepare_folder,
    write_files,
)
from shardplug.checkpoint.export.export_plan import ExportPlan, plan_export
from shardplug.checkpoint.format.plain import UNREADABLE, why
from shardplug.checkpoint.read.stored_tensors import Source, open_source
from shardplug.checkpoint.state.planners import LoadPlanner
from shardplug.errors import CheckpointError, ShardplugError

__all__ = ["Exported", "export", "export_checkpoint"]

_BATCH_BYTES = 256 * 2**20
"""Tensors that are read together: many small ones lie in one block of a checked file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export wrote."""

    path: Path
    files: tuple[str, ...]
    num_bytes: int
    is_adapter: bool
    notes: tuple[str, ...]


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "source",
    max_shard_bytes: int = 5 * 10**9,
    module: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    adapter_only: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the weights of a checkpoint as a Hugging Face folder. Needs no process group.

    The folder holds what `save_pretrained` writes: config, generation config, the tokenizer's
    files, safetensors, an index where there are several; tied tensors once. Of a model with PEFT
    adapters the adapters are written, as PEFT does, and not the base. Memory: less than one
    output file and the largest tensor. Checksums are compared while reading. In a distributed run
    call it on one rank.

    Args:
        checkpoint: A checkpoint of shardplug, a plain torch.distributed.checkpoint folder, or a
            folder of safetensors.
        out: The folder to make; it appears when it is whole.
        dtype: "source" writes each tensor in the dtype it came in, "float32", "bfloat16",
            "float16" or "float64" all of them in that one.
        max_shard_bytes: Size of one file, in bytes; only a tensor larger than that exceeds it.
        module: Which part, by the prefix of its names ("llama."), where there are several
            Hugging Face models or none; "model1::llama." in the second model.
        tokenizer: A folder with the tokenizer's files; None looks where the model came from.
        adapter_only: Raise where there are no adapters.
        overwrite: Replace an older export.

    Returns:
        The folder. What is missing in it is warned of.

    Raises:
        ConfigError: For options that cannot be honoured, or a path that is taken.
        CheckpointError: For a checkpoint that cannot be read. Nothing is left behind then.
    """
    done = export_checkpoint(
        checkpoint,
        out,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        module=module,
        tokenizer=tokenizer,
        adapter_only=adapter_only,
        overwrite=overwrite,
    )
    for note in done.notes:
        warnings.warn(f"Exported {checkpoint}, but {note}.", UserWarning, stacklevel=2)
    return done.path


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Exported:
    """Do what `export` does, and say what was written."""
    source = open_source(Path(checkpoint))
    plan = plan_export(source.manifest, **options)
    folder = prepare_folder(Path(out), plan, tokenizer=tokenizer, overwrite=overwrite)
    try:
        write_files(folder, plan, _TensorReader(source, plan.model, Path(checkpoint)).read)
        folder.publish()
    except OSError as error:
        failure = could_not_be_written(folder.target, plan, error)
        folder.discard()
        raise failure from error
    except BaseException:
        folder.discard()
        raise
    return describe_export(folder, plan)


def describe_export(folder: ExportFolder, plan: ExportPlan) -> Exported:
    """List what is in a published export."""
    files = sorted(path for path in folder.target.rglob("*") if path.is_file())
    return Exported(
        path=folder.target,
        files=tuple(path.relative_to(folder.target).as_posix() for path in files),
        num_bytes=sum(path.stat().st_size for path in files),
        is_adapter=plan.is_adapter,
        notes=tuple(plan.notes),
    )


class _TensorReader:
    """Reads tensors of a checkpoint a few at a time, its metadata once."""

    def __init__(self, source: Source, model: int, path: Path) -> None:
        self._source = source
        self._model = model
        self._path = path
        self._reader = source.storage_reader()
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, True)

    def read(self, items: Sequence[Item]) -> Iterator[torch.Tensor]:
        """Yield tensors in the order and the dtypes of the items."""
        for batch in _batches(items):
            # torch's loader converts while it copies: a whole tensor is held in its new dtype
            # only, the old one in the pieces that the ranks wrote.
            targets = {
                self._source.model_key(self._model, item.source): torch.empty(
                    item.shape, dtype=item.dtype
                )
                for item in batch
            }
            self._fill(dict(targets))
            for key in list(targets):
                yield targets.pop(key)  # nothing here holds it while the next ones are read

    def _fill(self, targets: dict[str, Any]) -> None:
        planner = LoadPlanner(flatten_state_dict=False)
        try:
            planner.set_up_planner(targets, self._metadata, True)
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            plan = planner.create_global_plan([plan])[0]
            plan = self._reader.prepare_global_plan([plan])[0]
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except ShardplugError:
            raise
        except (*UNREADABLE, CheckpointException) as error:
            raise CheckpointError(f"{self._path} cannot be read: {why(error)}.") from error


def _batches(items: Sequence[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    seen: set[str] = set()
    for item in items:
        if batch and (size + item.size_bytes > _BATCH_BYTES or item.source in seen):
            yield batch
            batch, size, seen = [], 0, set()
        batch.append(item)
        size += item.size_bytes
        seen.add(item.source)
    if batch:
        yield batch
