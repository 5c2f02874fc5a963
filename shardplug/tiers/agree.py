"""Errors of one rank, raised on all."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardplug.errors import ShardplugError

__all__ = ["raise_together"]


def raise_together(
    error: Exception | None, kind: type[ShardplugError], doing: str, group: dist.ProcessGroup
) -> None:
    """Raise on every rank what went wrong on one. Collective.

    Costs one reduction of one number where nothing went wrong.

    Args:
        error: What this rank has to report.
        kind: Class of the exception on the ranks that had no error.
        doing: What a message says has failed, like "The optimizer step".
        group: The ranks, with messages on the CPU.

    Raises:
        ShardplugError: `kind`, naming the first rank that failed and why; this rank's own error,
            where it is of that kind and no rank had another one.
    """
    if dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed, op=dist.ReduceOp.SUM, group=group)
    if not int(failed):
        return
    texts: list[Any] = [None] * dist.get_world_size(group)
    own = None
    if error is not None:
        own = (
            str(error) if isinstance(error, ShardplugError) else f"{type(error).__name__}: {error}"
        )
    dist.all_gather_object(texts, own, group=group)
    if isinstance(error, kind) and set(texts) == {own}:
        raise error
    rank = next(rank for rank, text in enumerate(texts) if text is not None)
    raise kind(f"{doing} failed on rank {rank}: {texts[rank]}") from error
