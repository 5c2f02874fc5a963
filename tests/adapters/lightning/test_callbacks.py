"""Each built-in callback works on shards, or is refused at set-up with the way out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from tests.adapters.lightning.modules import (
    Net,
    Plain,
    assert_at_rest,
    assert_close,
    assert_moved,
    build,
    in_order,
    make_optimizer,
    pl,
    quiet,
    rank,
    reference,
    trainer,
    whole,
    whole_batches,
)
from tests.adapters.lightning.test_resume import saver


class LRs(Plain):
    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer("adamw", self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")
        self.written: list[Any] = []

    def write_on_epoch_end(self, run: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((predictions, indices))


def plain_reference(module: Plain, epochs: int, lrs: list[float], windows: list[int]) -> None:
    optimizer = make_optimizer("adamw", module.parameters(), 1e-2)
    for epoch in range(epochs):
        optimizer.param_groups[0]["lr"] = lrs[epoch]
        batches = whole_batches()
        for index, batch in enumerate(batches):
            (module.loss(batch) / windows[epoch]).backward()
            if (index + 1) % windows[epoch] == 0 or index + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()


def watchers(folder: str) -> None:
    module, writer, timer = build(LRs), Writer(), Timer()
    accumulation = GradientAccumulationScheduler({0: 1, 1: 4})
    monitor, summary = LearningRateMonitor("step"), ModelSummary(max_depth=-1)
    run = trainer(
        "zero2",
        max_epochs=2,
        logger=CSVLogger(folder),
        log_every_n_steps=1,
        callbacks=[DeviceStatsMonitor(), accumulation, monitor, summary, timer, writer],
    )
    run.fit(module, in_order(), in_order(size=16))
    expected = reference(LRs)
    plain_reference(expected, 2, [1e-2, 5e-3], [1, 4])
    assert_close(whole(module), expected.state_dict())
    assert timer.time_elapsed("train") > 0
    assert summary._summary(run, module).total_parameters == sum(
        p.numel() for p in expected.parameters()
    )
    run.predict(module, in_order(size=16))
    predictions, indices = writer.written[0]
    assert sum(p.shape[0] for p in predictions) == 8
    assert sorted(i for batch in indices[0] for i in batch) == list(range(rank(), 16, 2))


def test_callbacks_that_watch(pool: Any, tmp_path: Path) -> None:
    pool.run(watchers, 2, str(tmp_path))


def averaging(kind: str, folder: str) -> None:
    """Average as one process does; swap for the validation; save and resume at the same point."""
    make = {
        "ema": lambda: EMAWeightAveraging(decay=0.9),
        "mean": WeightAveraging,
    }[kind]
    path = f"{folder}/saved"
    module, expected = build(), reference()
    callback = make()
    run = trainer(
        "zero3", max_epochs=2, num_sanity_val_steps=1, callbacks=[callback, saver(path, 8)]
    )
    run.fit(module, in_order(), in_order(size=16))
    from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

    average = AveragedModel(expected, avg_fn=get_ema_avg_fn(0.9) if kind == "ema" else None)
    optimizer: Any = expected.configure_optimizers()
    for _ in range(2):
        for batch in whole_batches():
            expected.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(expected)
    shown = float(run.callback_metrics["val_loss"])
    with torch.no_grad():
        right = torch.stack([average.module.loss(b) for b in whole_batches(size=16)]).mean()
    assert abs(shown - float(right)) <= 1e-5
    assert_close(whole(module), average.module.state_dict(), 1e-6)
    assert_at_rest(module)
    gap = (whole(module)["shift"] - expected.shift.detach()).abs().max()
    assert gap > 1e-4, "the average must differ from the last weights"
    # A checkpoint holds the average as the weights, and the current ones beside them.
    resumed = build()
    again = trainer("zero1", max_epochs=2, callbacks=[make()])
    again.fit(resumed, in_order(), in_order(size=16), ckpt_path=path)
    assert len(resumed.losses) == 12 - 8
    assert_close(whole(resumed), whole(module), 0.0)
    with pytest.raises(ValueError, match="sharded already cannot be copied"):
        trainer(max_epochs=2, callbacks=[make()]).fit(module, in_order())


@pytest.mark.parametrize("kind", ["ema", "mean"])
def test_weight_averaging(pool: Any, tmp_path: Path, kind: str) -> None:
    pool.run(averaging, 2, kind, str(tmp_path))


def swa(folder: str) -> dict[str, torch.Tensor]:
    module = build()
    callback = StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1)
    run = trainer("zero3", max_epochs=4, callbacks=[callback, saver(f"{folder}/saved", 21)])
    run.fit(module, in_order())
    assert_at_rest(module)
    resumed = build()
    callback = StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1)
    again = trainer("zero2", max_epochs=4, callbacks=[callback])
    again.fit(resumed, in_order(), ckpt_path=f"{folder}/saved")
    assert len(resumed.losses) == 24 - 21
    assert_close(whole(resumed), whole(module), 0.0)
    return whole(module)


def test_stochastic_weight_averaging(pool: Any, tmp_path: Path) -> None:
    ours = pool.run(swa, 2, str(tmp_path))[0]
    quiet()
    from torch.utils.data import DataLoader

    from tests.adapters.lightning.modules import Data

    torch.manual_seed(11)
    expected = Plain()
    start = {name: value.clone() for name, value in expected.state_dict().items()}
    callback = StochasticWeightAveraging(swa_lrs=5e-3, swa_epoch_start=2, annealing_epochs=1)
    pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=4,
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(expected, DataLoader(Data(), batch_size=8))
    assert not torch.equal(start["shift"], expected.shift)
    assert_close(ours, dict(expected.state_dict()), 1e-5)


class Backboned(Plain):
    @property
    def backbone(self) -> nn.Module:
        return self.net.blocks

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", [p for p in self.parameters() if p.requires_grad], 1e-2)


class Phases(BaseFinetuning):
    """Unfreeze the backbone in epoch 1, freeze it again in epoch 2."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net.blocks)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net.blocks, optimizer, lr=2e-3)
        if epoch == 2:
            self.freeze(module.net.blocks)


def finetuning(strategy: str, folder: str) -> None:
    module, expected = build(Backboned), reference(Backboned)
    seen: list[dict[str, torch.Tensor]] = []

    class Look(pl.Callback):
        def on_train_epoch_end(self, run: Any, module: Any) -> None:
            seen.append({k: v for k, v in whole(module).items() if ".blocks." in k})

    saves = [saver(f"{folder}/{step}", step) for step in (4, 9, 15)]
    run = trainer(strategy, max_epochs=3, callbacks=[Phases(), Look(), *saves])
    run.fit(module, in_order())
    start = {k: v for k, v in reference(Backboned).state_dict().items() if ".blocks." in k}
    assert_close(seen[0], start, 0.0)
    assert_close(seen[2], seen[1], 0.0)
    assert not torch.equal(seen[1]["net.blocks.0.up.weight"], start["net.blocks.0.up.weight"])
    expected.net.blocks.requires_grad_(False)
    optimizer: Any = expected.configure_optimizers()
    for epoch in range(3):
        if epoch == 1:
            expected.net.blocks.requires_grad_(True)
            optimizer.add_param_group(
                {"params": list(expected.net.blocks.parameters()), "lr": 2e-3}
            )
        if epoch == 2:
            expected.net.blocks.requires_grad_(False)
        for batch in whole_batches():
            expected.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict())
    for step in (4, 9, 15):
        resumed = build(Backboned)
        again = trainer(strategy, max_epochs=3, callbacks=[Phases()])
        again.fit(resumed, in_order(), ckpt_path=f"{folder}/{step}")
        assert len(resumed.losses) == 18 - step
        assert [g["lr"] for g in again.optimizers[0].param_groups] == [1e-2, 2e-3]
        assert_close(whole(resumed), whole(module), 0.0)


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_freezing_and_unfreezing_with_resume(pool: Any, tmp_path: Path, strategy: str) -> None:
    pool.run(finetuning, 2, strategy, str(tmp_path))


def backbone_finetuning() -> None:
    module = build(Backboned)
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)
    run = trainer("zero2", max_epochs=3, callbacks=[callback])
    run.fit(module, in_order())
    assert len(run.optimizers[0].param_groups) == 2
    assert_moved(module, reference(Backboned))


def test_backbone_finetuning(pool: Any) -> None:
    pool.run(backbone_finetuning, 2)


class Uneven(Plain):
    """A metric that differs by rank and is not reduced."""

    def validation_step(self, batch: Any, index: int) -> None:
        value = (self.trainer.current_epoch * 3) % 5 * (1 if rank() == 0 else -1)
        self.log("uneven", float(value))


def uneven_metric(folder: str) -> Any:
    module = build(Uneven)
    best = ModelCheckpoint(folder, monitor="uneven", save_top_k=2, filename="{epoch}")
    stop = EarlyStopping("uneven", patience=4)
    run = trainer("zero1", max_epochs=5, enable_checkpointing=True, callbacks=[best, stop])
    run.fit(module, in_order(), in_order(size=16))
    return sorted(os.listdir(folder)), run.current_epoch


def test_a_metric_that_differs_by_rank_does_not_hang(pool: Any, tmp_path: Path) -> None:
    left, right = pool.run(uneven_metric, 2, str(tmp_path))
    assert left == right and len(left[0]) == 2


def refused() -> None:
    def attempt(callback: Any, match: str, error: Any = ValueError) -> None:
        with pytest.raises(error, match=match):
            trainer(callbacks=[callback], enable_checkpointing=True).fit(build(), in_order())

    attempt(ModelPruning("l1_unstructured"), "ModelPruning cannot be used.*prune the model before")
    attempt(OnExceptionCheckpoint("."), "OnExceptionCheckpoint cannot.*every_n_train_steps")
    attempt(ModelCheckpoint(save_on_exception=True), "save_on_exception=True")
    attempt(BatchSizeFinder(), "distributed", Exception)
    module = build()
    trainer().fit(module, in_order())  # the ranks are fine after all these refusals
    assert_moved(module, reference())


def test_callbacks_that_cannot_work_are_refused(pool: Any) -> None:
    assert Net is not None
    pool.run(refused, 2)


def log_to_wandb(folder: str) -> None:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="test", save_dir=folder, offline=True)
    run = trainer("zero3", max_epochs=1, logger=logger, log_every_n_steps=1)
    run.fit(build(), in_order(), in_order(size=16))
    if rank() == 0:
        logger.experiment.finish()


def test_one_wandb_run_for_all_ranks(pool: Any, tmp_path: Path) -> None:
    pool.run(log_to_wandb, 2, str(tmp_path))
    runs = [p for p in (tmp_path / "wandb").iterdir() if p.name.startswith("offline-run")]
    assert len(runs) == 1 and list(runs[0].glob("*.wandb"))
