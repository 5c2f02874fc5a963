"""Weights out of a model that is being trained: every rank sends its rows, rank 0 writes them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardplug.checkpoint.export.export_files import Item
from shardplug.checkpoint.export.export_folder import (
    ExportFolder,
    TensorFile,
    prepare_folder,
    room_for,
)
from shardplug.checkpoint.export.export_plan import ExportPlan, plan_export
from shardplug.checkpoint.format.manifest import describe
from shardplug.checkpoint.state.model_state import state_and_aliases
from shardplug.checkpoint.state.optimizer_state import models_of
from shardplug.collective import (
    from_rank_0,
    message_group,
    rank_and_size,
    together,
)
from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import ConfigError

__all__ = ["export_model"]

T = TypeVar("T")

_PIECE_BYTES = 8 * 2**20
"""Largest message; what rank 0 holds of a tensor at a time."""

_EXPORTING = "Exporting"


def export_model(
    model: Any,
    out: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "source",
    max_shard_bytes: int = 5 * 10**9,
    module: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    adapter_only: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write a sharded (or plain) model as a Hugging Face folder, without a checkpoint. Collective.

    The files are those of `export`, byte for byte. No rank holds the model, or even a tensor, as
    a whole: rows go to rank 0 in small messages and from there to the file.

    Args:
        model: An engine, a model or models. It is not changed.
        out: The folder to make; rank 0's counts.
        dtype: As for `export`.
        max_shard_bytes: As for `export`.
        module: As for `export`.
        tokenizer: As for `export`.
        adapter_only: As for `export`.
        overwrite: As for `export`.

    Returns:
        The folder.

    Raises:
        ConfigError: On every rank, for options that cannot be honoured, or a path that is taken.
        CheckpointError: On every rank, when it could not be written. Nothing is left behind then.
    """
    options = {
        "dtype": dtype,
        "max_shard_bytes": max_shard_bytes,
        "module": module,
        "adapter_only": adapter_only,
    }
    plan, states = _unless_refused(together(lambda: _plan(model, options), _EXPORTING))

    def prepare() -> ExportFolder | ConfigError | None:
        if rank_and_size()[0]:
            return None
        try:
            return prepare_folder(Path(out), plan, tokenizer=tokenizer, overwrite=overwrite)
        except ConfigError as error:
            return error

    folder = _unless_refused(together(prepare, _EXPORTING))

    def room(error: BaseException) -> str:
        words = room_for(Path(out).absolute(), plan, error)
        return f"{words}." if words else ""

    try:
        together(lambda: _write(folder, plan, states[plan.model]), _EXPORTING, explain=room)
        together(lambda: folder.publish() if folder else None, _EXPORTING, explain=room)
    except BaseException:
        if folder is not None:
            folder.discard()
        raise
    for note in plan.notes if folder is not None else ():
        warnings.warn(f"Exported the model, but {note}.", UserWarning, stacklevel=2)
    return Path(from_rank_0(str(out)))


def _plan(
    model: Any, options: Mapping[str, Any]
) -> tuple[ExportPlan, list[dict[str, torch.Tensor]]] | ConfigError:
    """Plan the export of what a checkpoint of the model would hold; equal on every rank."""
    owners = models_of(model)
    states = [state_and_aliases(owner, pack=False)[0] for owner in owners]
    content = describe(states, [], {}, owners)
    try:
        return plan_export(content, **options), states
    except ConfigError as error:
        return error


def _unless_refused(found: T | ConfigError) -> T:
    """Raise rank 0's refusal on every rank, as what it is. Collective."""
    text = from_rank_0(str(found) if isinstance(found, ConfigError) else None)
    if text is not None:
        raise ConfigError(text)
    assert not isinstance(found, ConfigError), "the plan is the same on every rank"
    return found


def _write(folder: ExportFolder | None, plan: ExportPlan, state: dict[str, torch.Tensor]) -> None:
    """Write all files. Where rank 0 cannot write, all ranks stop before the next tensor."""
    failure: OSError | None = None
    for part in plan.folders:
        for name, items in part.files.items():
            file: TensorFile | None = None
            try:
                if folder is not None and failure is None:
                    file = TensorFile(folder.folder / part.name / name, items)
            except OSError as error:
                failure = error
            for item in items:
                if not _goes_on(failure is None):
                    break
                for piece in _pieces(state[item.source], item):
                    try:
                        if file is not None and failure is None:
                            file.write(piece)
                    except OSError as error:  # the others are in the middle of sending
                        failure = error
            if file is not None:
                file.close()
    if failure is not None:
        raise failure


def _goes_on(fine: bool) -> bool:
    """Tell every rank whether rank 0 is still fine."""
    group = message_group()
    if group is None:
        return fine
    flag = torch.tensor([fine], dtype=torch.uint8)
    dist.broadcast(flag, src=0, group=group)
    return bool(flag.item())


def _pieces(tensor: torch.Tensor, item: Item) -> Iterator[torch.Tensor]:
    """Yield a tensor's rows in order, in the item's dtype, on rank 0; send them elsewhere."""
    rank = rank_and_size()[0]
    if not isinstance(tensor, DTensor):
        if rank == 0:
            yield tensor.detach().to("cpu", item.dtype)
        return
    *replicas, last = tensor.placements
    if last == Shard(0) and all(isinstance(placement, Replicate) for placement in replicas):
        yield from _rows(tensor, item)
        return
    with torch.no_grad():
        whole = tensor.full_tensor()  # sharded in another way
    if rank == 0:
        yield whole.to("cpu", item.dtype)


def _rows(tensor: DTensor, item: Item) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor that is sharded on dim 0, shard by shard."""
    rank, group = rank_and_size()[0], message_group()
    mesh = tensor.device_mesh.mesh
    owners = mesh.reshape(-1, mesh.shape[-1])[0].tolist()  # of the first replica
    count, inner = item.shape[0], item.shape[1:]
    per_owner = -(-count // len(owners))
    row_bytes = item.size_bytes // count if count else 0
    step = max(1, _PIECE_BYTES // max(1, row_bytes))
    for number, owner in enumerate(owners):
        rows = max(0, min(count - number * per_owner, per_owner))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            if rank == owner:
                own = local_tensor(tensor)[start:stop].detach().to("cpu", item.dtype).contiguous()
                if rank == 0:
                    yield own
                elif own.numel():
                    dist.send(own.view(-1).view(torch.uint8), dst=0, group=group)
            elif rank == 0:
                piece = torch.empty((stop - start, *inner), dtype=item.dtype)
                if piece.numel():
                    dist.recv(piece.view(-1).view(torch.uint8), src=owner, group=group)
                    yield piece
