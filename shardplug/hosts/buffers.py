"""Buffers such as BatchNorm's running statistics, which sharding leaves alone on each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["share_buffers"]


@torch.no_grad()
def share_buffers(module: nn.Module) -> None:
    """Give every rank rank 0's buffers. Collective.

    Each rank updates running statistics from its own batches. DDP sends rank 0's out before every
    forward; since a training forward does not read them, sending them before an evaluation and
    before a save gives the same result.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    for buffer in module.buffers():
        dist.broadcast(buffer, src=0)
