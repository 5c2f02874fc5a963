"""Norms and clipping of gradients that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardplug.core._torch.tensors import clamp_all, local_tensor, multiply_all
from shardplug.core.ranks.every_rank import on_every_rank
from shardplug.core.tier_tensor import in_tier

__all__ = ["clip_by_value", "global_norm", "scale_to_norm"]


def global_norm(
    parameters: Iterable[torch.Tensor], norm_type: float, group: dist.ProcessGroup
) -> float:
    """Return the norm of all gradients together, equal on every rank.

    Sums run in fp64: an fp32 sum over 1e8 elements is off by about 2e-5.

    Args:
        parameters: Sharded (DTensor) and replicated parameters; those without gradient count 0.
        norm_type: p of the p-norm; may be `math.inf`.
        group: The ranks that shards are spread over.
    """
    shards: list[torch.Tensor] = []
    replicas: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None:
            kind = shards if isinstance(parameter.grad, DTensor) else replicas
            kind.append(local_tensor(parameter.grad))
    device = (shards + replicas)[0].device if shards or replicas else torch.device("cpu")
    total = _power_sum(shards, norm_type, device)
    if dist.get_world_size(group) > 1:
        op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        # A group of accelerators cannot reduce a CPU scalar, which an empty rank would hold.
        total = total.to(_group_device(group))
        with on_every_rank("Clipping or grad_norm()"):
            dist.all_reduce(total, op=op, group=group)
    rest = _power_sum(replicas, norm_type, total.device)
    if math.isinf(norm_type):
        return float(torch.maximum(total, rest))
    return float((total + rest) ** (1.0 / norm_type))


def _group_device(group: dist.ProcessGroup) -> torch.device:
    if "nccl" in dist.get_backend(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _power_sum(tensors: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([_norm(tensor, norm_type) for tensor in tensors]).to(device)
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def _norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    stored = in_tier(tensor)
    if stored is not None:
        return stored.p_norm(norm_type)
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dtype=dtype)
    return norm


def scale_to_norm(parameters: Iterable[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients so that their global norm, which is `norm`, becomes at most `max_norm`.

    The factor is torch's: max_norm / (norm + 1e-6), at most 1.
    """
    factor = max_norm / (norm + 1e-6)
    if factor >= 1.0:
        return

    def scale(grads: list[torch.Tensor]) -> None:
        stored = in_tier(grads[0])
        if stored is None:
            multiply_all(grads, factor)
        else:
            stored.scale(factor)

    _foreach(parameters, scale)


def clip_by_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every element of the gradients to [-clip_value, clip_value]."""

    def clamp(grads: list[torch.Tensor]) -> None:
        clamp_all(grads, -clip_value, clip_value)

    _foreach(parameters, clamp)


def _foreach(parameters: Iterable[torch.Tensor], change: object) -> None:
    by_kind: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local_tensor(parameter.grad)
            # Those in a tier one by one: each is read into memory to be changed.
            kind = (grad.device, grad.dtype, grad if in_tier(grad) is not None else None)
            by_kind.setdefault(kind, []).append(grad)
    with torch.no_grad():
        for grads in by_kind.values():
            change(grads)  # type: ignore[operator]
