"""Weights that are changed while training, through each adapter."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.lightning.modules import assert_close, pl, trainer, whole
from tests.support.models import Block, TinyLM, lm_loss, tokens

STEPS = 4


class Net(TinyLM):
    """Has a teacher of its first block, which is moved in the context or in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Block(18, 37).requires_grad_(False)

    def move(self) -> None:
        pairs = zip(self.teacher.parameters(), self.blocks[0].parameters(), strict=True)
        for teacher, student in pairs:
            teacher.data.lerp_(student.data, 0.1)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        self.head.weight.data.clamp_(-0.15, 0.15)  # the root's, which is gathered here
        loss: torch.Tensor = lm_loss(self(batch), batch)
        with torch.no_grad():
            self.teacher(self.embed(batch))
        return loss


def net() -> Net:
    torch.manual_seed(3)
    return Net()


@torch.enable_grad()
def reference() -> dict[str, torch.Tensor]:
    model = net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in range(2):
            (model.loss(tokens(step, 0, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.move()
    found = model.state_dict()
    changed = ("teacher.up.weight", "head.weight")
    assert all(not torch.equal(found[name], before[name]) for name in changed)
    return found


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net.loss(batch)

    def on_train_batch_end(self, *_: Any) -> None:
        with self.trainer.strategy.gathered(self.net, modify=True):
            self.net.move()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[torch.Tensor]:
    return [tokens(step, 0, dist.get_rank()) for step in range(STEPS)]


def with_lightning(strategy: str) -> dict[str, torch.Tensor]:
    module = Module()
    data: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    run = trainer(strategy, use_distributed_sampler=False)
    run.fit(module, data)
    return whole(module.net)


def with_fabric(strategy: str) -> dict[str, torch.Tensor]:
    run = fabric(strategy)
    bare = net()
    model, optimizer = run.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    model.mark_forward_method("loss")
    for batch in batches():
        run.backward(model.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        with run.strategy.gathered(model, modify=True, src=1):
            if dist.get_rank() == 1:
                bare.move()
    return whole(bare)


class Called(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net.loss(batch)


def with_accelerate(strategy: str) -> dict[str, torch.Tensor]:
    run = accelerator(cpu=True, zero=strategy)
    model: Any = Called()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    for batch in batches():
        run.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
        with run.gathered(model, modify=True, src=0):
            if dist.get_rank() == 0:
                run.unwrap_model(model).net.move()
    return whole(run.unwrap_model(model).net)


def run_all(strategy: str) -> None:
    expected = reference()
    for door in (with_lightning, with_fabric, with_accelerate):
        assert_close(door(strategy), expected)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_weights_are_changed_through_each_adapter(pool: Any, strategy: str) -> None:
    pool.run(run_all, 2, strategy)
