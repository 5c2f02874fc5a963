"""What the Accelerate tests share: fresh state, models, and the one-process reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from shardplug.accelerate import Accelerator
from tests.support.models import TinyLM, lm_loss, tokens

WORLD = 2
MICRO_BATCHES = 7  # per rank and epoch: with a window of 3 the last one is short
MAX_NORM = 0.2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
}


def fresh() -> None:
    """Forget the Accelerator of an earlier test in this resident process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerator(**kwargs: Any) -> Accelerator:
    """Build an Accelerator as a first one in its process."""
    fresh()
    return Accelerator(**kwargs)


def samples(micro_batches: int = MICRO_BATCHES, ranks: int = WORLD) -> torch.Tensor:
    """Token rows for `micro_batches` batches of 2 on each rank, all different."""
    return torch.cat([tokens(0, index, 0) for index in range(micro_batches * ranks)])


def loader(data: torch.Tensor, **kwargs: Any) -> DataLoader[torch.Tensor]:
    """Batches of 2 rows."""
    return DataLoader(data, batch_size=2, **kwargs)  # type: ignore[arg-type]


def seeded_model(seed: int = 7, **kwargs: Any) -> TinyLM:
    """The same small language model wherever the seed is the same."""
    torch.manual_seed(seed)
    return TinyLM(**kwargs)


def reference(
    optimizer_name: str, window: int, epochs: int, *, model: nn.Module | None = None
) -> dict[str, Any]:
    """Train one process, plain torch, on both ranks' batches together."""
    model = seeded_model() if model is None else model
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    batches = samples().split(2 * WORLD)
    losses, norms = [], []
    for _ in range(epochs):
        for index, batch in enumerate(batches):
            loss = lm_loss(model(batch), batch)
            (loss / window).backward()
            losses.append(loss.item())
            if (index + 1) % window == 0 or index + 1 == len(batches):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                norms.append(norm.item())
                optimizer.step()
                optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "state": model.state_dict()}


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors, which must have the same names."""
    assert ours.keys() == theirs.keys() and ours
    assert sum(tensor.numel() for tensor in ours.values()) > 1000
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
