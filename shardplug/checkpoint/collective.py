"""What every rank must do or fail at together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardplug.errors import CheckpointError

__all__ = ["rank_and_size", "together"]

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def together(action: Callable[[], T], doing: str, *, alone: bool = False) -> T:
    """Run `action` on every rank, and raise on all of them when it failed on one. Collective.

    Args:
        action: What to do; it may contain collectives that themselves fail on every rank.
        doing: What a message says has failed, like "Saving".
        alone: Do not ask the other ranks.

    Returns:
        What `action` returned on this rank.

    Raises:
        CheckpointError: On every rank, naming the first rank that failed and why.
    """
    value: T | None = None
    failure: tuple[int | None, str] | None = None
    cause: BaseException | None = None
    try:
        value = action()
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        failure, cause = _describe(error), error
    failures = [failure]
    if not alone and rank_and_size()[1] > 1:
        failures = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
    found = [(rank, *entry) for rank, entry in enumerate(failures) if entry is not None]
    if not found:
        return value  # type: ignore[return-value]
    rank, inner, text = found[0]
    if (
        isinstance(cause, CheckpointError)
        and len(found) == len(failures)
        and {entry[2] for entry in found} == {text}
    ):
        raise cause
    rank = rank if inner is None else inner
    raise CheckpointError(f"{doing} failed on rank {rank}: {text}") from cause


def _describe(error: BaseException) -> tuple[int | None, str]:
    """Return the rank that an error names, if any, and its text."""
    if isinstance(error, CheckpointError):
        return None, str(error)
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        inner = error.failures[rank][0]
        return rank, f"{type(inner).__name__}: {inner}"
    return None, f"{type(error).__name__}: {error}"
