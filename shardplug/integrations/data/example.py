"""One batch out of a data loader, to plan with, without disturbing the loader."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

__all__ = ["example_batch"]


def example_batch(loader: Any) -> Any:
    """Return a batch as large as a loader's, or None where that would use samples up.

    The first samples are collated here: no worker is started, no sampler advanced, and the random
    states of torch and Python are as before.

    Args:
        loader: A DataLoader over a dataset with positions; of others nothing is taken.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    before = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            if size is None:
                return loader.collate_fn(dataset[0])
            return loader.collate_fn([dataset[n % len(dataset)] for n in range(size)])
    finally:
        random.setstate(before)
