"""A run that begins in one framework and ends in the other, at another stage and world size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.adapters.accelerate.common import accelerator, largest_difference, seeded_model
from tests.support.models import lm_loss, tokens
from tests.support.pool import RankPool

STEPS, SAVED = 10, 5
LEARNING_RATE = 1e-3


def local_batches(first: int) -> list[torch.Tensor]:
    """This rank's rows of the global batch of four, from step `first` on."""
    rows = 4 // dist.get_world_size()
    both = [torch.cat([tokens(step, 0, part) for part in range(2)]) for step in range(STEPS)]
    return [batch[rows * dist.get_rank() :][:rows] for batch in both[first:]]


def with_accelerate(
    stage: int, load: str | None, save: str | None
) -> dict[str, torch.Tensor] | None:
    acc = accelerator(zero=f"zero{stage}")
    net = seeded_model(70 if load else 7)
    net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE))
    if load:
        acc.load_state(load)
        assert acc.completed_steps == SAVED
    for batch in local_batches(SAVED if load else 0)[: SAVED if save else STEPS]:
        acc.backward(lm_loss(net(batch), batch))
        optimizer.step()
        optimizer.zero_grad()
    if save:
        acc.save_state(save)
    return acc.get_state_dict(net)


def with_lightning(
    stage: int, load: str | None, save: str | None
) -> dict[str, torch.Tensor] | None:
    from tests.adapters.lightning.modules import pl, trainer

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module = seeded_model(70 if load else 7)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return lm_loss(self.model(batch), batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    # A list of batches: both frameworks then see the same rows, whatever sampler they add.
    batches: Any = DataLoader(local_batches(SAVED if load else 0), batch_size=None)
    module = Module()
    steps = SAVED if save else STEPS
    run = trainer(f"zero{stage}", max_steps=steps, max_epochs=-1, use_distributed_sampler=False)
    run.fit(module, batches, ckpt_path=load)
    assert run.global_step == steps
    if save:
        run.save_checkpoint(save)
    state = {
        name.removeprefix("model."): value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in module.state_dict().items()
    }
    return state if dist.get_rank() == 0 else None


def one_process() -> dict[str, torch.Tensor]:
    net = seeded_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE)
    for step in range(STEPS):
        batch = torch.cat([tokens(step, 0, part) for part in range(2)])
        lm_loss(net(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict()


@pytest.mark.parametrize("first", ["accelerate", "lightning"])
def test_the_other_framework_goes_on(pool: RankPool, tmp_path: Path, first: str) -> None:
    folder = str(tmp_path / "state")
    runs = {"accelerate": with_accelerate, "lightning": with_lightning}
    second = next(name for name in runs if name != first)
    pool.run(runs[first], 2, 3, None, folder)
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    assert (manifest["framework"], manifest["step"]) == (first, SAVED)
    assert manifest["world_size"] == 2
    ours = pool.run(runs[second], 1, 1, folder, None)[0]
    assert largest_difference(ours, one_process()) <= 2e-6
