"""Running a block from other random states than the present ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardplug.checkpoint.state.rank_rng import rng_state, set_rng_state

__all__ = ["replaying", "rng_state", "set_rng_state"]


@contextmanager
def replaying(state: dict[str, Any] | None) -> Iterator[None]:
    """Run a block from `state`, and put the present states back afterwards; None runs it as is."""
    if state is None:
        yield
        return
    present = rng_state()
    set_rng_state(state)
    try:
        yield
    finally:
        set_rng_state(present)
