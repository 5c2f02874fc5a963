"""A collective that not all ranks take part in, said in words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardplug.errors import ScheduleError, ShardplugError

__all__ = ["on_every_rank"]


@contextmanager
def on_every_rank(call: str) -> Iterator[None]:
    """Say what call has failed where a rank is gone, or does not make it.

    Args:
        call: The call that every rank makes, as the user wrote it.

    Raises:
        ScheduleError: In place of the error of torch's backend.
    """
    try:
        yield
    except RuntimeError as error:
        of_backend = isinstance(error, dist.DistError) or "gloo/" in str(error)
        if isinstance(error, ShardplugError) or not of_backend:
            raise
        raise ScheduleError(
            f"{call} failed. Another rank is gone, did not answer in time, or makes another call. "
            "Make this call on every rank, and saves, forwards and clipping too: a rank that "
            "makes one alone, under `if rank == 0:`, waits for the others. "
            f"({str(error).partition(chr(10))[0]})"
        ) from error
