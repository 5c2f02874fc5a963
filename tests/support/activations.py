"""Activation offload on models whose tensors are too small to be moved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardplug.core.activations import activation_offload as activations

__all__ = ["small_ones_move"]


@contextmanager
def small_ones_move() -> Iterator[None]:
    """Move tensors of any size."""
    before = activations.LEAST_BYTES
    activations.LEAST_BYTES = 1
    try:
        yield
    finally:
        activations.LEAST_BYTES = before
