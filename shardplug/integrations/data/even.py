"""Data that may end earlier on one rank than on others: all stop together, or none starts."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from shardplug.errors import ConfigError
from shardplug.windows import Together, fetched

__all__ = ["fetch_in_step", "reads_in_step"]


def fetch_in_step(loader: DataLoader[Any], limit: int | float | None = None) -> Together | None:
    """Return how to read batches in step, or None where lengths say that it is not needed.

    Collective.

    Args:
        loader: This rank's loader.
        limit: Most batches that are read of it; a fraction says nothing here.

    Raises:
        ConfigError: On every rank, when the loaders' lengths differ.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    try:
        own: int | None = len(loader)
    except TypeError:  # of an IterableDataset without a length
        own = None
    if own is not None and isinstance(limit, int):
        own = min(own, limit)
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, own)
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Expected every rank to get as many batches, got {lengths} by rank: the ranks that "
            "run out first would leave the others waiting. Use a DistributedSampler or "
            "drop_last=True, or limit the batches to the smallest number."
        )
    if not isinstance(loader.dataset, IterableDataset):
        return None
    return Together(type(loader.dataset).__name__)


def reads_in_step(loader: DataLoader[Any], together: Together) -> DataLoader[Any]:
    """Return a copy of `loader`, of a subclass of its class, that reads with the other ranks."""
    copied = copy.copy(loader)
    kind = type(loader)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    copied.__class__ = type(kind.__name__, (_InStep, kind), body)
    vars(copied)["_together"] = together
    return copied


class _InStep(DataLoader[Any]):
    _together: Together

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._together.begin()
        yield from fetched(self._together.fetch, super().__iter__())
