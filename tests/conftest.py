"""Fixtures for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from tests.support.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Resident gloo ranks, shared by the whole session."""
    ranks = RankPool()
    yield ranks
    ranks.close()
