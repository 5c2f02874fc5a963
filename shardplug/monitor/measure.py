"""Memory of this process, where the caller gives none."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

__all__ = ["memory_bytes"]

_STATM = Path("/proc/self/statm")


def memory_bytes() -> int | None:
    """Return the peak of the device's allocator, or the resident memory of a CPU rank.

    None where the system does not tell.
    """
    if torch.accelerator.is_available():
        return int(torch.accelerator.max_memory_allocated())
    try:
        return int(_STATM.read_text().split()[1]) * _page_bytes()
    except OSError:
        return None


@cache
def _page_bytes() -> int:
    import resource  # not on Windows, where there is no /proc either

    return resource.getpagesize()
