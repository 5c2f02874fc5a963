"""What one step was like, on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["StepRow", "StepValues", "gather"]

_NAMES = ("loss", "grad_norm", "tokens", "busy_seconds", "memory_bytes")


@dataclass(frozen=True, slots=True)
class StepValues:
    """What one rank knows of a step; None is not known."""

    step: int
    seconds: float
    loss: float | None = None
    grad_norm: float | None = None
    tokens: float | None = None
    busy_seconds: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class StepRow:
    """What all ranks know of a step, the same on every rank; None is not known."""

    step: int
    """Optimizer steps done."""

    seconds: float
    """Time of one step, the slowest rank's."""

    loss: float | None
    """Mean of the ranks' losses; NaN or infinite when one is."""

    grad_norm: float | None
    """Largest of the ranks' gradient norms; NaN when one is."""

    tokens_per_second: float | None
    """Of all ranks together."""

    busy_seconds: tuple[float, ...]
    """Each rank's time in a step without waiting for the others; empty where one is not known."""

    memory_bytes: tuple[int, ...]
    """Each rank's memory; empty where one is not known."""

    nonfinite: tuple[tuple[int, str], ...]
    """Ranks, and which of their values is not finite: "loss" or "grad_norm"."""


def gather(values: StepValues, group: dist.ProcessGroup | None) -> StepRow:
    """Bring the ranks' values together, by one all-gather of 56 bytes. Collective.

    Args:
        values: This rank's.
        group: The ranks; None is all, and this process alone where no process group is up.
    """
    known = [getattr(values, name) for name in _NAMES]
    numbers = [float(values.seconds), *(0.0 if v is None else float(v) for v in known)]
    mask = sum(1 << index for index, v in enumerate(known) if v is not None)
    table = _all_gather([*numbers, float(mask)], group)
    columns: dict[str, list[float | None]] = {
        name: [row[1 + i] if int(row[-1]) >> i & 1 else None for row in table]
        for i, name in enumerate(_NAMES)
    }
    seconds = max(row[0] for row in table)
    losses, norms = _known(columns["loss"]), _known(columns["grad_norm"])
    tokens = _known(columns["tokens"])
    return StepRow(
        step=values.step,
        seconds=seconds,
        loss=sum(losses) / len(losses) if losses else None,
        grad_norm=(math.nan if any(map(math.isnan, norms)) else max(norms)) if norms else None,
        tokens_per_second=sum(tokens) / seconds if tokens and seconds > 0 else None,
        busy_seconds=_everybody(columns["busy_seconds"]),
        memory_bytes=tuple(int(v) for v in _everybody(columns["memory_bytes"])),
        nonfinite=tuple(
            (rank, name)
            for name in ("loss", "grad_norm")
            for rank, value in enumerate(columns[name])
            if value is not None and not math.isfinite(value)
        ),
    )


def _known(column: list[float | None]) -> list[float]:
    return [value for value in column if value is not None]


def _everybody(column: list[float | None]) -> tuple[float, ...]:
    known = _known(column)
    return tuple(known) if len(known) == len(column) else ()


def _all_gather(numbers: list[float], group: dist.ProcessGroup | None) -> list[list[float]]:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [numbers]
    on_gpu = "nccl" in dist.get_backend(group) and "gloo" not in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    own = torch.tensor(numbers, dtype=torch.float64, device=device)
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    return [[float(v) for v in row] for row in torch.stack(all_ranks).tolist()]
