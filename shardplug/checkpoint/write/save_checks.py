"""Checks before a save: every rank has the same, and everything can be read back."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.format.plain import culprit
from shardplug.checkpoint.state.extra_state import is_extra, is_packed
from shardplug.collective import gather, rank_and_size
from shardplug.errors import CheckpointError

__all__ = ["check_agreement", "check_content", "check_readable", "extra_state_by_rank"]


def check_content(optimizers: Sequence[Mapping[str, Any]]) -> None:
    """Refuse optimizer state that cannot be written rank by rank.

    Raises:
        CheckpointError: Naming the parameter and the key.
    """
    for index, optimizer in enumerate(optimizers):
        for name, values in optimizer["state"].items():
            for key, value in values.items():
                where = f"{key} of {name} in optimizer {index}"
                if isinstance(value, DTensor) and any(p.is_partial() for p in value.placements):
                    raise CheckpointError(
                        f"Expected whole or sharded optimizer state, but {where} is only partly "
                        f"reduced over the ranks (placements {value.placements})."
                    )
                if not isinstance(value, torch.Tensor) and _holds_tensor(value):
                    raise CheckpointError(
                        f"Expected optimizer state made of tensors and plain values, but {where} "
                        f"is a {type(value).__name__} that holds tensors: it cannot be saved in "
                        "shards. Use another optimizer, or save without this one."
                    )


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_tensor(item) for item in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_tensor(item) for item in value)
    return isinstance(value, torch.Tensor)


def check_agreement(
    models: Sequence[Mapping[str, torch.Tensor]], optimizers: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse ranks that hold different names, shapes or counters. Collective.

    One folder describes all ranks. State that a rank keeps for its own shard as a plain tensor
    would be saved from rank 0 alone, so plain state of sharded parameters must be equal.

    Raises:
        CheckpointError: On every rank, naming the first difference.
    """
    rank, size = rank_and_size()
    if size == 1:
        return
    lines = sorted(_facts(models, optimizers))
    mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = gather(mine, "Saving")
    if len(set(digests)) == 1:
        return
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    everyone = gather(lines if rank in (0, other) else [], "Saving")
    here, there = set(everyone[0]), set(everyone[other])
    raise CheckpointError(
        "Expected every rank to save the same tensors, but "
        f"rank 0 has {min(here - there, default='fewer')} and "
        f"rank {other} has {min(there - here, default='nothing in its place')}. Give every rank "
        "the same models and optimizers; state kept for a rank's own shard must be a DTensor."
    )


def _facts(
    models: Sequence[Mapping[str, torch.Tensor]], optimizers: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    yield f"{len(models)} models and {len(optimizers)} optimizers"
    sharded = set()
    for index, model in enumerate(models):
        for name, value in model.items():
            if isinstance(value, DTensor):
                sharded.add((f"model{index}::" if index else "") + name)
            layout = "" if is_extra(name) else _layout(value)
            yield f"model {index}: {name} {layout}"
    for index, optimizer in enumerate(optimizers):
        for name, values in optimizer["state"].items():
            yield f"optimizer {index}: {name}"
            for key, value in values.items():
                content = ""
                if isinstance(value, torch.Tensor):
                    content = _layout(value)
                    if name in sharded and not isinstance(value, DTensor):
                        content += f" with checksum {_checksum(value):08x}"
                elif value is None or isinstance(value, (bool, int, float, str)):
                    content = repr(value)
                yield f"optimizer {index}: {name}.{key} {content}"


def extra_state_by_rank(models: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, list[int]]]:
    """Find extra state of modules that is not the same on every rank. Collective.

    Args:
        models: For each model its tensors by name; the same names on every rank.

    Returns:
        For each model the names of such states, with their size in bytes on each rank.
    """
    own = [
        {
            name: (len(v), _checksum(v))
            for name, v in model.items()
            if is_extra(name) and is_packed(v)
        }
        for model in models
    ]
    everyone = gather(own, "Saving") if any(own) else [own]
    return [
        {
            name: [states[index][name][0] for states in everyone]
            for name in model
            if len({states[index][name] for states in everyone}) > 1
        }
        for index, model in enumerate(own)
    ]


def _layout(value: torch.Tensor) -> str:
    kind = "sharded" if isinstance(value, DTensor) else "whole"
    return f"{kind} {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _checksum(value: torch.Tensor) -> int:
    flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = bytearray(flat.numel())
    if data:
        torch.frombuffer(data, dtype=torch.uint8).copy_(flat)
    return zlib.crc32(data)


def check_readable(meta: Mapping[str, Any]) -> None:
    """Refuse what would not be read back without running code from the file.

    Raises:
        CheckpointError: Naming the entry.
    """
    found = culprit("meta", meta)
    if found is not None:
        where, value = found
        raise CheckpointError(
            f"Expected what is saved besides the weights to be made of plain types and tensors, "
            f"but {where} is a {type(value).__name__}: the checkpoint could not be loaded again. "
            "Convert it (a dictionary, a string, a list), or leave it out."
        )
