"""Generation inside evaluation, through each adapter (case 48)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.lightning.modules import assert_at_rest, assert_close, pl, trainer, whole
from tests.dist.test_generation import llama, options, prompt
from tests.support.models import tokens

STEPS = 4


class Writer(pl.LightningModule):
    """Validates by generating: rank 0 one token, rank 1 twelve, and none in the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = llama()
        self.written: list[torch.Tensor] = []
        self.held = False

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.lm(input_ids=batch, labels=batch).loss
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)
        rank = dist.get_rank()
        if not self.held:
            self.written.append(self.lm.generate(prompt(rank), **options(rank)))
            return
        with self.trainer.strategy.gathered(self.lm):
            if index == 0 or rank == 0:
                self.written.append(self.lm.generate(prompt(rank), **options(rank)))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def batches(rank: int) -> list[torch.Tensor]:
    return [tokens(step, 0, rank) for step in range(STEPS)]


def loader(rank: int, number: int = STEPS) -> Any:
    return DataLoader(batches(rank)[:number], batch_size=None)  # type: ignore[arg-type]


@torch.enable_grad()
def reference(steps: int) -> Any:
    """Train one process on the batches of both ranks."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        for rank in range(2):
            (model(input_ids=(b := batches(rank)[step]), labels=b).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def expected(steps: int, rank: int) -> torch.Tensor:
    found: torch.Tensor = reference(steps).generate(prompt(rank), **options(rank))
    return found


def with_lightning(strategy: str, held: bool) -> None:
    rank = dist.get_rank()
    module = Writer()
    module.held = held
    run = trainer(
        strategy, num_sanity_val_steps=1, val_check_interval=2, use_distributed_sampler=False
    )
    run.fit(module, loader(rank), loader(rank, 2))
    number = 1 + 2 * 2 if rank == 0 or not held else 1 + 2
    assert len(module.written) == number
    states = [0] + [s for s in (2, 4) for _ in range(2 if rank == 0 or not held else 1)]
    for found, steps in zip(module.written, states, strict=True):
        assert torch.equal(found, expected(steps, rank)), steps
    assert_close(whole(module.lm), reference(STEPS).state_dict())
    assert_at_rest(module)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_lightning_validation_generates(pool: Any, strategy: str, held: bool) -> None:
    pool.run(with_lightning, 2, strategy, held, timeout=60)


def with_fabric() -> None:
    rank = dist.get_rank()
    run = fabric("zero3")
    bare = llama()
    model, optimizer = run.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-3))
    model.mark_forward_method("generate")
    for step, batch in enumerate(batches(rank)):
        run.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with run.strategy.gathered(model):
                if rank == 1:
                    found = model.generate(prompt(rank), **options(rank))
                    assert torch.equal(found, expected(2, rank))
    assert_close(whole(bare), reference(STEPS).state_dict())


def test_fabric_generates(pool: Any) -> None:
    pool.run(with_fabric, 2, timeout=60)


def with_accelerate(zero: str) -> None:
    rank = dist.get_rank()
    run = accelerator(cpu=True, zero=zero)
    model: Any = llama()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = run.prepare(model, optimizer)
    for step, batch in enumerate(batches(rank)):
        run.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            found = model.generate(prompt(rank), **options(rank))
            assert torch.equal(found, expected(2, rank))
            with run.gathered(model):
                if rank == 1:
                    found = run.unwrap_model(model).generate(prompt(rank), **options(rank))
                    assert torch.equal(found, expected(2, rank))
    state = run.get_state_dict(model)
    if rank == 0:
        assert_close(state, reference(STEPS).state_dict())


@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_accelerate_generates(pool: Any, zero: str) -> None:
    pool.run(with_accelerate, 2, zero, timeout=60)
