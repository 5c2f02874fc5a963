"""How long this rank has waited for messages of the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["waited_seconds", "waiting"]

_total_seconds = 0.0


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time inside; on CPU ranks, where waiting is done by the thread that computes."""
    global _total_seconds
    begin = time.perf_counter()
    try:
        yield
    finally:
        _total_seconds += time.perf_counter() - begin


def waited_seconds() -> float:
    """Return the time counted since the process began."""
    return _total_seconds
