"""Moving averages of sharded weights: torch's AveragedModel, sharded like the model (case 42)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from shardplug import ZeroConfig, ZeroEngine
from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.lightning.modules import (
    Data,
    Plain,
    assert_close,
    build,
    in_order,
    pl,
    quiet,
    trainer,
    whole,
)

DECAY, STEPS, SAVED = 0.9, 10, 6


class Fives(nn.Module):
    """Five rows over two and three ranks; a parameter without dimension; a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.inp, self.out = nn.Linear(5, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return self.out(torch.tanh(self.inp(x))) * self.scale


def average(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY), use_buffers=True)


def rows(step: int) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(step))


def train(
    model: Any,
    ema: Any,
    optimizer: Any,
    backward: Callable[[torch.Tensor], None],
    first: int,
    last: int,
) -> None:
    """Train on this rank's rows; the average follows every step."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(first, last):
        batch = rows(step)[rank * 6 // world :][: 6 // world]
        backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ema.update_parameters(model)


def alone() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train one process; return its weights and their average after the last step."""
    model = Fives()
    ema, optimizer = average(model), torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, ema, optimizer, lambda loss: loss.backward(), 0, STEPS)
    return dict(model.state_dict()), dict(ema.state_dict())


def check_validation(model: Any, ema: Any) -> None:
    """Validate with the average itself: nothing is swapped, so nothing has to be put back."""
    before = whole(model)
    ema.eval()
    with pytest.raises(ValueError, match="in validation"), torch.no_grad():
        assert torch.isfinite(ema(rows(0))).all()
        raise ValueError("in validation")
    assert_close(whole(model), before, 0.0)


def with_engine(folder: str, first: int, last: int) -> tuple[Any, Any]:
    engine = ZeroEngine(ZeroConfig(stage=3 if first else 1))
    model = Fives()
    ema = average(model)  # a copy, so before the model is sharded
    engine.shard(model)
    engine.shard(ema)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    if first:
        engine.load(folder, optimizers=[optimizer])
    train(model, ema, optimizer, lambda loss: loss.backward(), first, last)
    check_validation(model, ema)
    if not first:
        engine.save(folder, optimizers=[optimizer], async_save=True)
        engine.wait_for_save()
    return whole(model), whole(ema)


def with_fabric(folder: str, first: int, last: int) -> tuple[Any, Any]:
    run = fabric(f"zero{3 if first else 2}")
    net = Fives()
    average_net = average(net)
    model, optimizer = run.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    ema = run.setup(average_net)
    state = {"model": model, "ema": ema, "optimizer": optimizer}
    if first:
        run.load(folder, state)
    train(model, ema, optimizer, run.backward, first, last)
    check_validation(net, average_net)
    if not first:
        run.save(folder, state)
    return whole(net), whole(average_net)


def with_accelerate(folder: str, first: int, last: int) -> tuple[Any, Any]:
    acc = accelerator(zero=f"zero{2 if first else 3}")
    model = Fives()
    ema = average(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, ema, optimizer = acc.prepare(model, ema, optimizer)
    if first:
        acc.load_state(folder)
    train(model, ema, optimizer, acc.backward, first, last)
    check_validation(model, ema)
    if not first:
        acc.save_state(folder)
    return whole(model), whole(ema)


RUNS = {"engine": with_engine, "fabric": with_fabric, "accelerate": with_accelerate}


@pytest.mark.parametrize("name", list(RUNS))
def test_the_average_equals_one_process(pool: Any, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "saved")
    pool.run(RUNS[name], 2, folder, 0, SAVED)
    weights, ema = pool.run(RUNS[name], 3, folder, SAVED, STEPS)[0]
    expected_weights, expected_ema = alone()
    assert float(expected_ema["n_averaged"]) == STEPS
    assert_close(weights, expected_weights, 1e-6)
    assert_close(ema, expected_ema, 1e-6)
    gap = ema["module.inp.weight"] - weights["inp.weight"]
    assert float(gap.abs().max()) > 1e-3, "the average is not the weights"


# -- Lightning's callback, which swaps the weights for validation ---------------------------------


class Looks(Plain):
    """Remembers the weights outside of validation, and breaks one validation off."""

    def __init__(self, break_at: int | None = None) -> None:
        super().__init__()
        self.break_at = break_at
        self.before: dict[str, torch.Tensor] = {}
        self.averages: list[dict[str, torch.Tensor]] = []

    def on_validation_start(self) -> None:
        self.before = whole(self)  # the callback swaps after this

    def on_validation_batch_start(self, batch: Any, index: int, *unused: Any) -> None:
        if index == 0:
            self.averages.append(whole(self))

    def validation_step(self, batch: Any, index: int) -> None:
        if self.trainer.global_step == self.break_at:
            raise ValueError("in validation")
        super().validation_step(batch, index)


def callback() -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    return EMAWeightAveraging(decay=DECAY)


def trainer_saves(folder: str) -> None:
    module = build(Looks, break_at=8)
    run = trainer("zero3", max_steps=STEPS, max_epochs=-1, callbacks=[callback()])
    with pytest.raises(ValueError, match="in validation"):
        run.fit(module, in_order(6), in_order(size=24))
    assert len(module.averages) == 2
    gap = module.averages[1]["net.head.weight"] - module.before["net.head.weight"]
    assert float(gap.abs().max()) > 1e-4
    assert_close(whole(module), module.before, 0.0)  # put back, though validation raised
    module = build(Looks)
    run = trainer("zero1", max_steps=SAVED, max_epochs=-1, callbacks=[callback(), SaveAt(folder)])
    run.fit(module, in_order(6), in_order(size=24))


class SaveAt(pl.Callback):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, run: Any, *unused: Any) -> None:
        if run.global_step == SAVED:
            run.save_checkpoint(self.folder)


def trainer_resumes(folder: str) -> tuple[Any, Any, Any]:
    module = build(Looks)
    run = trainer("zero2", max_steps=STEPS, max_epochs=-1, callbacks=[callback()])
    run.fit(module, in_order(4), in_order(size=24), ckpt_path=folder)
    assert len(module.losses) == STEPS - SAVED and len(module.averages) == 1
    return whole(module), module.before, module.averages[0]


def test_lightnings_callback_equals_one_process(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    pool.run(trainer_saves, 2, folder)
    found = pool.run(trainer_resumes, 3, folder)[0]
    quiet()
    torch.manual_seed(11)
    module = Looks()
    run = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        callbacks=[callback()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )
    batches = torch.utils.data.DataLoader(Data(), batch_size=12)
    run.fit(module, batches, torch.utils.data.DataLoader(Data(24), batch_size=8))
    expected = whole(module), module.before, module.averages[-1]
    for left, right in zip(found, expected, strict=True):  # at the end, at step 8 and its average
        assert_close(left, right, 2e-6)
