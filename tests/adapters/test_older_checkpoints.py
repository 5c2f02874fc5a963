"""Checkpoints that an older shardplug wrote load as they did; see older/README.md."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardplug.checkpoint import Reader, inspect, state_of_optimizer
from shardplug.checkpoint.state.frozen_base import check_base, describe_base
from shardplug.errors import CheckpointError
from tests.adapters.accelerate.common import accelerator
from tests.adapters.lightning.modules import WIDTH, Plain, build, in_order, rank, trainer

FOLDER = Path(__file__).parent / "older"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)
        self.second = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class SmallModule(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.scale, self.shift = Small(), None, None
        self.seen: dict[str, torch.Tensor] = {}

    def loss(self, batch: Any) -> torch.Tensor:
        return (self.net(batch[0]) - batch[1]).square().mean()

    def on_train_start(self) -> None:
        self.seen = values(self, self.optimizers().optimizer)


def values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the parameters and the optimizer's state, whole. Collective."""
    found: dict[str, Any] = dict(model.named_parameters())
    for name, state in state_of_optimizer([model], optimizer)["state"].items():
        found |= {f"{name} {key}": value for key, value in state.items()}
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in found.items()
    }


def prepared() -> tuple[Any, ...]:
    run = accelerator(cpu=True, zero="zero3")
    model = build(Small)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return run, *run.prepare(model, optimizer, scheduler)


def save_with_lightning() -> dict[str, torch.Tensor]:
    module = build(SmallModule)
    run = trainer("zero2", max_steps=3)
    run.fit(module, in_order())
    run.save_checkpoint("lightning")
    return values(module, module.optimizers().optimizer)


def save_with_accelerate() -> dict[str, torch.Tensor]:
    run, model, optimizer, scheduler = prepared()
    for x, y, _ in list(in_order())[:3]:
        run.backward((model(x) - y).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    run.save_state("accelerate")
    return values(model, optimizer.optimizer)


def save(root: str, door: str) -> None:
    """Write a folder and the values in it, from `root`, so that no path is in the files."""
    os.chdir(root)
    found = {"lightning": save_with_lightning, "accelerate": save_with_accelerate}[door]()
    if rank() == 0:
        save_file(
            {name: value.contiguous() for name, value in found.items()}, f"{door}.safetensors"
        )


def same(found: dict[str, torch.Tensor], door: str) -> None:
    expected = load_file(FOLDER / f"{door}.safetensors")
    assert found.keys() == expected.keys() and len(expected) == 12, found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def load_with_lightning(strategy: str) -> None:
    module = build(SmallModule)
    run = trainer(strategy, max_steps=4, max_epochs=2)
    run.fit(module, in_order(), ckpt_path=str(FOLDER / "lightning"))
    same(module.seen, "lightning")
    assert run.global_step == 4


def load_with_accelerate() -> None:
    run, model, optimizer, scheduler = prepared()
    run.load_state(str(FOLDER / "accelerate"))
    same(values(model, optimizer.optimizer), "accelerate")
    assert scheduler.get_last_lr() == [0.01 / 10]  # Accelerate takes a step for each rank


def test_folders_of_lightning_and_accelerate(pool: Any) -> None:
    for name, world_size in (("lightning", 2), ("accelerate", 3)):
        assert inspect(FOLDER / name, verify=True).health == "whole"
        assert Reader(FOLDER / name).manifest["world_size"] == world_size
    pool.run(load_with_lightning, 2, "zero3")
    pool.run(load_with_lightning, 1, "zero1")
    pool.run(load_with_accelerate, 3)


def test_sums_of_a_base_that_was_left_out() -> None:
    """Older ones do not depend on the place of a value, and are compared all the same."""
    for dtype in (torch.float32, torch.bfloat16):
        base = {"a": torch.arange(12.0).view(4, 3).to(dtype), "b": torch.tensor(2.0, dtype=dtype)}
        integer = torch.int32 if dtype == torch.float32 else torch.int16
        older = {
            name: {
                "dtype": str(dtype).removeprefix("torch."),
                "sum_of_bits": int(tensor.view(integer).sum(dtype=torch.int64)) % 2**64,
            }
            for name, tensor in base.items()
        }
        swapped = {**base, "a": base["a"].flip(0)}
        changed = {**base, "a": base["a"] * 1.5}
        for saved in (older, describe_base(base), {**older, "a": describe_base(base)["a"]}):
            check_base("it", base, saved)
            with pytest.raises(CheckpointError, match=r"1 of its 2 tensors differ here: a\."):
                check_base("it", changed, saved)
        check_base("it", swapped, older)
        with pytest.raises(CheckpointError, match=r"1 of its 2 tensors differ here: a\."):
            check_base("it", swapped, describe_base(base))
