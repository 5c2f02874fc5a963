"""Data loaders of a resumable sharded run: same order on all ranks, same order after a resume."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler
from accelerate.utils import broadcast_object_list, gather_object
from torch.utils.data import DataLoader, IterableDataset

from shardplug.errors import ConfigError
from shardplug.integrations.data.even import fetch_in_step, reads_in_step

__all__ = [
    "advance_past_skipped",
    "agree_on_order",
    "keep_in_step",
    "load_loader_state",
    "loader_state",
    "refuse_uneven",
]

_SKIPPED = "_shardplug_skipped"


def agree_on_order(loader: DataLoader[Any]) -> None:
    """Make every rank shuffle like rank 0, whatever seed the ranks were given."""
    sampler = _seedable_sampler(loader)
    if sampler is not None:
        seed = [sampler.initial_seed]
        broadcast_object_list(seed)
        sampler.initial_seed = seed[0]


def keep_in_step(loader: DataLoader[Any]) -> None:
    """Let a loader of streamed data end on every rank when the first rank ends. Collective.

    Raises:
        ConfigError: On every rank, when the streams say that their lengths differ.
    """
    inner = getattr(loader, "base_dataloader", None)
    if isinstance(loader, DataLoaderShard) and isinstance(inner, DataLoader):
        # Inside of Accelerate's loader, which reads one batch ahead to know the last one.
        if isinstance(inner.dataset, IterableDataset):
            together = fetch_in_step(inner)
            if together is not None:
                loader.base_dataloader = reads_in_step(inner, together)


def refuse_uneven(loader: DataLoader[Any]) -> None:
    """Refuse a loader that gives the ranks different numbers of batches.

    Every forward and backward of a sharded model is a collective: a rank that runs out of batches
    early leaves the others waiting for it.

    Raises:
        ConfigError: On every rank, with the numbers.
    """
    try:
        own = len(loader)
    except TypeError:
        return
    lengths = gather_object([own])
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"Expected every rank to get as many batches, got {lengths} with even_batches=False: "
            "the ranks that run out first would leave the others waiting. Leave even_batches at "
            "True, or use drop_last=True and a dataset that divides by the number of ranks."
        )


def advance_past_skipped(loader: DataLoader[Any], skipped: DataLoader[Any]) -> None:
    """Let `skipped` stand for the current epoch of `loader`, which goes on with the next one.

    Args:
        loader: A prepared loader.
        skipped: The rest of its current epoch, as made by Accelerate's `skip_first_batches`.
    """
    if not isinstance(loader, (DataLoaderShard, DataLoaderDispatcher)):
        return
    if hasattr(skipped, "iteration"):
        skipped.iteration = loader.iteration  # older Accelerate starts it at epoch 0
    # Without it both would shuffle alike, and the epoch would be seen twice.
    loader.iteration += 1
    setattr(loader, _SKIPPED, weakref.ref(skipped))
    inner = getattr(skipped, "base_dataloader", skipped)
    if inner.generator is None:
        # An iterator draws its workers' seed from the default generator. In the middle of an epoch
        # that draw is not in the uninterrupted run, and dropout masks would part from there.
        inner.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)


def loader_state(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what a loader needs to shuffle the current epoch again: epoch and seed."""
    reference = getattr(loader, _SKIPPED, None)
    skipped = reference() if reference is not None else None
    active: Any = loader
    if skipped is not None and _is_running(skipped):
        active = skipped
    epoch = getattr(active, "iteration", 0)
    if _is_running(active) and active.end_of_dataloader:
        epoch += 1  # the last batch is out: what follows is the next epoch
    sampler = _seedable_sampler(loader)
    return {"epoch": epoch, "seed": None if sampler is None else sampler.initial_seed}


def load_loader_state(loader: DataLoader[Any], state: Mapping[str, Any]) -> None:
    """Bring a prepared loader to the epoch and the seed of `loader_state`."""
    if hasattr(loader, "iteration"):
        loader.iteration = state["epoch"]
    sampler = _seedable_sampler(loader)
    if sampler is not None and state["seed"] is not None:
        sampler.initial_seed = state["seed"]


def _is_running(loader: Any) -> bool:
    gradient_state = getattr(loader, "gradient_state", None)
    if gradient_state is None:
        return False
    return any(loader is running for running in gradient_state.dataloader_references)


def _seedable_sampler(loader: Any) -> SeedableRandomSampler | None:
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else None
    return sampler if isinstance(sampler, SeedableRandomSampler) else None
