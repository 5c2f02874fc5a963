"""Embeddings that scale rows down in their forward (`max_norm`), over all ranks' batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardplug.core.gathered.writes import renormalises
from shardplug.core.hooks import outside_of_graphs

__all__ = ["renormalise_together"]


def renormalise_together(model: nn.Module, is_held: Callable[[], bool]) -> None:
    """Let every rank scale down the rows that any rank's batch uses, as one process would.

    A rank keeps only its own rows of what it writes, and its batch may use other ranks' rows.

    Args:
        model: The sharded model.
        is_held: Whether parameters are held whole, where forwards exchange nothing.
    """
    for module in model.modules():
        if renormalises(module):
            hook = outside_of_graphs(functools.partial(_renormalise, is_held))
            module.register_forward_pre_hook(hook, with_kwargs=True)


@torch.no_grad()
def _renormalise(
    is_held: Callable[[], bool], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if is_held():
        return
    indices: torch.Tensor = args[0] if args else kwargs["input"]
    used = torch.zeros(module.num_embeddings, dtype=torch.uint8, device=indices.device)
    used[indices.reshape(-1).long()] = 1
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    rows = used.nonzero().reshape(-1)
    torch.embedding_renorm_(module.weight.detach(), rows, module.max_norm, module.norm_type)
