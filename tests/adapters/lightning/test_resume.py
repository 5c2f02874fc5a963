"""Checkpoints through the Trainer: exact resume, other layouts, ordinary files."""

from __future__ import annotations

import enum
import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shardplug.checkpoint import Reader
from shardplug.errors import CheckpointError
from tests.adapters.lightning.modules import (
    Data,
    Plain,
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
from tests.support.models import TinyLM, lm_loss


def saver(folder: str, step: int, hook: str = "on_train_batch_end") -> Any:
    """Save once, after optimizer step `step`."""

    def save(run: Any, *unused: Any) -> None:
        if run.global_step == step and not run.sanity_checking and not os.path.exists(folder):
            run.save_checkpoint(folder)

    return type("Save", (pl.Callback,), {hook: staticmethod(save)})()


class Stream(IterableDataset[Any]):
    """Samples of this rank, without a length."""

    def __iter__(self) -> Any:
        data = Data()
        for index in range(int(os.environ["RANK"]), len(data), int(os.environ["WORLD_SIZE"])):
            yield data[index]


class KeepsItsPlace(DataLoader[Any]):
    """Saves and loads its position itself, as torchdata's StatefulDataLoader does."""

    place = 0

    def __iter__(self) -> Any:
        first = self.place
        for index, batch in enumerate(super().__iter__()):
            if index >= first:
                self.place = index + 1
                yield batch
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def loader(kind: str) -> DataLoader[Any]:
    if kind == "workers":
        # The ranks of the pool are daemons, which may not have children of their own.
        multiprocessing.current_process()._config["daemon"] = False
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    if kind == "own place":
        return KeepsItsPlace(Data(), batch_size=4, shuffle=True)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"} if kind == "workers" else {}
    return DataLoader(Data(), batch_size=4, shuffle=True, **workers)


def continue_exactly(
    folder: str, strategy: str, step: int, kind: str, options: dict[str, Any]
) -> None:
    """Run 13 of 2x6 steps straight, and again from a checkpoint; nothing may differ."""
    path, hook = f"{folder}/saved", options.pop("hook", "on_train_batch_end")
    data = [in_order(size=16)] if hook == "on_validation_end" else []
    straight = build(dropout=0.3)
    run = trainer(strategy, max_epochs=3, callbacks=[saver(path, step, hook)], **options)
    torch.manual_seed(50 + rank())
    run.fit(straight, loader(kind), *data)
    assert len(straight.losses) > step + 3
    resumed = build(dropout=0.3)
    again = trainer(strategy, max_epochs=3, **options)
    torch.manual_seed(900 + rank())  # the random state has to come from the checkpoint
    torch.rand(17)
    again.fit(resumed, loader(kind), *data, ckpt_path=path)
    skipped = len(straight.losses) - len(resumed.losses)
    assert skipped == step * options.get("accumulate_grad_batches", 1)
    assert resumed.samples == straight.samples[skipped:]
    assert resumed.losses == straight.losses[skipped:]
    assert run.global_step == again.global_step
    assert_close(whole(resumed), whole(straight), 0.0)


@pytest.mark.parametrize(
    ("strategy", "step", "kind", "world", "options"),
    [
        ("zero1", 4, "plain", 2, {}),
        ("zero2", 7, "plain", 2, {}),
        ("zero3", 6, "plain", 2, {}),  # the end of an epoch
        ("zero3", 9, "plain", 2, {}),
        ("zero3", 4, "plain", 2, {"accumulate_grad_batches": 2}),
        ("zero3", 7, "plain", 2, {"max_steps": 15}),
        ("zero3", 4, "plain", 2, {"limit_train_batches": 4}),  # its end, not the data's
        ("zero3", 7, "plain", 2, {"limit_train_batches": 4}),
        ("zero2", 9, "plain", 2, {"val_check_interval": 3, "hook": "on_validation_end"}),
        ("zero2", 6, "plain", 2, {"hook": "on_validation_end"}),
        ("zero2", 6, "plain", 2, {"hook": "on_train_epoch_end"}),
        ("zero1", 12, "plain", 1, {"hook": "on_train_epoch_end"}),
        ("zero3", 7, "plain", 1, {}),  # RandomSampler: its seed comes from the random state
        ("zero3", 7, "plain", 2, {"use_distributed_sampler": False}),
        ("zero3", 8, "workers", 2, {}),
        ("zero3", 8, "stream", 2, {}),
        ("zero3", 8, "own place", 2, {}),
    ],
)
def test_mid_epoch_resume_is_exact(
    pool: Any,
    tmp_path: Path,
    strategy: str,
    step: int,
    kind: str,
    world: int,
    options: dict[str, Any],
) -> None:
    pool.run(continue_exactly, world, str(tmp_path), strategy, step, kind, options)


def save_at_five(folder: str, strategy: str, batch_size: int) -> Any:
    module = build()
    run = trainer(strategy, max_steps=10, max_epochs=-1, callbacks=[saver(folder, 5)])
    run.fit(module, in_order(batch_size))
    return whole(module)


def resume_to_ten(folder: str, strategy: str, batch_size: int, expected: Any) -> None:
    from shardplug.lightning import ZeroStrategy

    made = ZeroStrategy(stage=3, replicate_size=2) if strategy == "hsdp" else strategy
    module = build()
    run = trainer(made, max_steps=10, max_epochs=-1)
    run.fit(module, in_order(batch_size), ckpt_path=folder)
    assert len(module.losses) == 5 and run.global_step == 10
    assert_close(whole(module), expected, 1e-6)


def resume_accumulating(folder: str, expected: Any) -> None:
    module = build()
    run = trainer("zero3", max_steps=10, max_epochs=-1, accumulate_grad_batches=2)
    run.fit(module, in_order(2), ckpt_path=folder)
    assert (len(module.losses), run.global_step) == (10, 10)
    assert_close(whole(module), expected, 1e-6)
    odd = trainer("zero3", max_steps=10, max_epochs=-1, accumulate_grad_batches=2)
    with pytest.raises(CheckpointError, match="whole windows of accumulate_grad_batches=2"):
        odd.fit(build(), in_order(4), ckpt_path=folder)


class Unreadable(DataLoader[Any]):
    def __iter__(self) -> Any:
        raise KeyError("torn")


def data_that_cannot_be_read(folder: str) -> None:
    """The error is the one that was raised, not one of Lightning's that follows from it."""
    with pytest.raises(CheckpointError, match="Expected the 40 samples used") as caught:
        trainer("zero3", max_steps=10, max_epochs=-1).fit(build(), in_order(3), ckpt_path=folder)
    assert caught.value.__context__ is None
    for world in ("train", "val", "test"):
        run, bad = trainer("zero3", max_epochs=1), Unreadable(Data(), batch_size=4)
        with pytest.raises(KeyError, match="torn"):
            if world == "test":
                run.test(build(), bad, verbose=False)
            else:
                loaders = {"train": (bad, None), "val": (in_order(4), bad)}[world]
                run.fit(build(), *loaders)


def test_resume_with_more_and_smaller_micro_batches(pool: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    expected = pool.run(save_at_five, 2, folder, "zero3", 4)[0]
    pool.run(resume_accumulating, 2, folder, expected)
    pool.run(data_that_cannot_be_read, 2, folder)


@pytest.mark.parametrize(
    ("world", "stage", "other_world", "other_stage"),
    [(2, "zero3", 1, "zero1"), (1, "zero1", 2, "zero2"), (2, "zero1", 4, "hsdp")],
)
def test_resume_at_another_world_size_and_stage(
    pool: Any, tmp_path: Path, world: int, stage: str, other_world: int, other_stage: str
) -> None:
    folder = str(tmp_path / "saved")
    expected = pool.run(save_at_five, world, folder, stage, 8 // world)[0]
    pool.run(resume_to_ten, other_world, folder, other_stage, 8 // other_world, expected)


def save_changes_nothing(folder: str) -> None:
    """Saving before the first step, and the learning rate finder, leave no trace."""

    class SaveFirst(pl.Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            run.save_checkpoint(f"{folder}/first")

    from lightning.pytorch.callbacks import LearningRateFinder

    # Lightning's finder draws the loader's seed in an isolated state: no dropout with it.
    for dropout, callback in (
        (0.2, SaveFirst()),
        (0.0, LearningRateFinder(num_training_steps=10, update_attr=False)),
    ):
        results = []
        for callbacks in ([], [callback]):
            module = build(dropout=dropout)
            torch.manual_seed(3 + rank())
            run = trainer(max_steps=3, max_epochs=-1, callbacks=callbacks)
            run.fit(module, loader("plain"))
            steps = {float(s["step"]) for s in run.optimizers[0].state.values()}
            assert steps == {3.0}
            results.append((whole(module), module.losses))
        assert_moved(module, reference())
        assert_close(results[0][0], results[1][0], 0.0)
        assert results[0][1] == results[1][1][-3:]
    assert len(callback.optimal_lr.results["lr"]) == 10


def test_saving_and_lr_find_change_nothing(pool: Any, tmp_path: Path) -> None:
    pool.run(save_changes_nothing, 2, str(tmp_path))


class Kind(enum.Enum):
    GOOD = 1


@dataclass
class Settings:
    depth: int = 2


class Configured(Plain):
    def __init__(self, settings: Any = None, kind: Any = None, where: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: dict[str, Any] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"count": 3, "weight": self.net.head.weight}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = dict(checkpoint)
        checkpoint["state_dict"]["shift"] = torch.full((3,), 7.0)

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-2)


def lightning_checkpoint(folder: str) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    module = build(Configured, settings=Settings(), kind=Kind.GOOD, where=Path("x/y"))
    keep = ModelCheckpoint(
        folder, monitor="val_loss", save_top_k=2, save_last="link", filename="{epoch}"
    )
    run = trainer(max_epochs=3, enable_checkpointing=True, callbacks=[keep])
    run.fit(module, in_order(), in_order(size=16))
    final = whole(module)
    assert_moved(module, reference(Configured))
    run.strategy.barrier()
    assert sorted(os.listdir(folder)) == sorted(["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"])
    assert os.path.islink(f"{folder}/last.ckpt")
    best = run.test(module, in_order(size=16), ckpt_path="best", verbose=False)
    last = run.test(module, in_order(size=16), ckpt_path="last", verbose=False)
    assert best == last
    # Hooks see what they see with DDP, and what they change is loaded.
    assert module.seen["mine"]["count"] == 3 and module.seen["epoch"] == 2
    assert torch.equal(module.seen["mine"]["weight"], final["net.head.weight"])
    assert {"state_dict", "callbacks", "loops"} <= set(module.seen)
    assert float(whole(module)["shift"].min()) == 7.0

    more = build(Configured)
    path = f"{folder}/last.ckpt"
    again = trainer(max_epochs=4)
    again.fit(more, in_order(), ckpt_path=path)
    assert again.current_epoch == 4 and again.global_step == 24
    assert "settings" not in more.seen["hyper_parameters"], "pickled, not needed, left out"
    assert more.seen["hyper_parameters"]["where"] == Path("x/y")
    with pytest.raises(RuntimeError, match=r"'settings'\] \(.*Settings\).*weights_only=False"):
        trainer(max_epochs=4).fit(build(Configured), in_order(), ckpt_path=path, weights_only=True)
    trusting = build(Configured)
    trainer(max_epochs=4).fit(trusting, in_order(), ckpt_path=path, weights_only=False)
    assert trusting.seen["hyper_parameters"]["settings"] == Settings()
    assert trusting.seen["hyper_parameters"]["kind"] is Kind.GOOD

    weights = f"{folder}/weights"
    run.save_checkpoint(weights, weights_only=True)
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(max_epochs=4).fit(build(Configured), in_order(), ckpt_path=weights)
    loaded = build(Configured)
    trainer().validate(loaded, in_order(size=16), ckpt_path=weights, verbose=False)
    assert_close(
        {k: v for k, v in whole(loaded).items() if k != "shift"},
        {k: v for k, v in final.items() if k != "shift"},
        0.0,
    )


def test_model_checkpoint_hooks_and_hyper_parameters(pool: Any, tmp_path: Path) -> None:
    from shardplug.errors import CheckpointError
    from shardplug.lightning import load_from_checkpoint

    pool.run(lightning_checkpoint, 2, str(tmp_path))
    quiet()
    path = tmp_path / "last.ckpt"
    with pytest.raises(CheckpointError, match="not a|Expected"):
        load_from_checkpoint(Plain, tmp_path / "nothing")
    module = load_from_checkpoint(Configured, path, weights_only=False)
    assert type(module.net.head.weight) is torch.nn.Parameter
    assert module.hparams["settings"] == Settings() and module.hparams["kind"] is Kind.GOOD
    assert module.hparams["where"] == Path("x/y")
    assert float(module.shift.detach().min()) == 7.0  # on_load_checkpoint's change
    replaced = load_from_checkpoint(Configured, path, settings=4)
    assert replaced.hparams["settings"] == 4
    batch = whole_batches(world=1)[0]
    assert torch.equal(module.loss(batch), replaced.loss(batch))
    plain = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tested = plain.test(module, DataLoader(Data(16), batch_size=16), verbose=False)[0]
    assert abs(tested["test_loss"] - float(module.loss(whole_batches(16, 16, 1)[0]))) < 1e-6


def continue_from_file(path: str, expected: Any) -> None:
    module = build()
    run = trainer("zero2", max_epochs=2)
    run.fit(module, in_order(), ckpt_path=path)
    assert run.global_step == 12
    assert_close(whole(module), expected)
    with pytest.raises(RuntimeError, match="found nothing"):
        trainer().fit(build(), in_order(), ckpt_path=path + ".not")
    with pytest.raises(RuntimeError, match="another kind of folder, with plain.ckpt in it"):
        trainer().fit(build(), in_order(), ckpt_path=os.path.dirname(path))


def test_resume_from_an_ordinary_lightning_file(pool: Any, tmp_path: Path) -> None:
    quiet()
    options: Any = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    batches = DataLoader(Data(), batch_size=8)
    torch.manual_seed(11)
    module = Plain()
    run = pl.Trainer(max_epochs=1, **options)
    run.fit(module, batches)
    path = str(tmp_path / "plain.ckpt")
    run.save_checkpoint(path)
    torch.manual_seed(0)
    straight = Plain()
    pl.Trainer(max_epochs=2, **options).fit(straight, batches, ckpt_path=path)
    pool.run(continue_from_file, 2, path, dict(straight.state_dict()))


class Parts(Plain):
    """`late` is used from step 4 on; moments of a frozen part have to survive."""

    def __init__(self) -> None:
        super().__init__()
        self.late = torch.nn.Linear(3, 3, bias=False)

    def loss(self, batch: Any) -> torch.Tensor:
        loss = super().loss(batch)
        if self._trainer is not None and self.trainer.global_step >= 4:
            loss = loss + self.late(batch[1]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        rest = [p for n, p in self.named_parameters() if not n.startswith("late")]
        groups = [
            {"params": rest},
            {"params": self.late.parameters(), "lr": 3e-3},
            {"params": [], "lr": 5e-3},
        ]
        return make_optimizer("adamw", groups, 1e-2)


class Freeze(pl.Callback):
    def on_train_batch_start(self, run: Any, module: Any, *unused: Any) -> None:
        module.net.blocks[0].requires_grad_(not 6 <= run.global_step < 8)


def life_of_state(folder: str) -> Any:
    straight = build(Parts)
    saves = [saver(f"{folder}/{step}", step) for step in (3, 7)]
    run = trainer(max_steps=11, max_epochs=-1, callbacks=[Freeze(), *saves])
    run.fit(straight, in_order())
    steps = {n: float(run.optimizers[0].state[p]["step"]) for n, p in straight.named_parameters()}
    assert steps["late.weight"] == 7 and steps["net.head.weight"] == 11
    assert steps["net.blocks.0.up.weight"] == 9
    resume_parts(folder, whole(straight), steps, 4, 0.0)
    return whole(straight), steps


def resume_parts(
    folder: str, weights: Any, steps: dict[str, float], batch_size: int, tolerance: float
) -> None:
    for step in (3, 7):
        resumed = build(Parts)
        again = trainer("zero2", max_steps=11, max_epochs=-1, callbacks=[Freeze()])
        again.fit(resumed, in_order(batch_size), ckpt_path=f"{folder}/{step}")
        assert len(resumed.losses) == 11 - step
        assert_close(whole(resumed), weights, tolerance)
        state = again.optimizers[0].state
        assert {n: float(state[p]["step"]) for n, p in resumed.named_parameters()} == steps
        assert [g["lr"] for g in again.optimizers[0].param_groups] == [1e-2, 3e-3, 5e-3]


def test_unused_and_frozen_parts_keep_their_state(pool: Any, tmp_path: Path) -> None:
    weights, steps = pool.run(life_of_state, 2, str(tmp_path))[0]
    pool.run(resume_parts, 1, str(tmp_path), weights, steps, 8, 1e-6)


class Tied(pl.LightningModule):
    """Head and embedding are one parameter; rows do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.model = TinyLM(tied=True)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        tokens = (batch[0].abs() * 60).long() % 257
        return lm_loss(self.model(tokens), tokens)

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-3)


def tied_weights(folder: str) -> Any:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    module, path = build(Tied), f"{folder}/saved"
    callbacks = [EMAWeightAveraging(decay=0.5), saver(path, 8)]
    trainer("zero3", max_epochs=2, callbacks=callbacks).fit(module, in_order())
    resumed = build(Tied)
    callbacks = [EMAWeightAveraging(decay=0.5)]
    trainer("zero2", max_epochs=2, callbacks=callbacks).fit(resumed, in_order(), ckpt_path=path)
    assert_close(whole(resumed), whole(module), 0.0)
    assert resumed.model.head.weight is resumed.model.embed.weight
    reader = Reader(path)
    assert "model.head.weight" not in reader.manifest["models"][0], "saved once"
    # The average is saved as the weights, the current ones beside it.
    assert len(reader.manifest["models"]) == 2
    return whole(module)


def test_tied_weights(pool: Any, tmp_path: Path) -> None:
    from shardplug.lightning import load_from_checkpoint

    pool.run(tied_weights, 2, str(tmp_path))
    quiet()
    module = load_from_checkpoint(Tied, tmp_path / "saved")
    assert module.model.head.weight is module.model.embed.weight
    assert set(module.state_dict()) == set(Tied().state_dict())


def save_on_rank_zero_only(folder: str) -> str:
    from datetime import timedelta

    from shardplug.lightning import ZeroStrategy

    module = build()
    run = trainer(ZeroStrategy(stage=3, timeout=timedelta(seconds=2)))
    run.fit(module, in_order())
    if rank() == 0:
        with pytest.raises(RuntimeError, match="under `if rank == 0`"):
            run.save_checkpoint(folder)
    assert not os.path.exists(folder)
    return "done"


def save_to_remote_storage() -> None:
    module = build()
    run = trainer()
    run.fit(module, in_order())
    with pytest.raises(ValueError, match="local or mounted folder"):
        run.save_checkpoint("s3://bucket/x")
    with pytest.raises(ValueError, match="no storage_options"):
        run.save_checkpoint("x", storage_options={"a": 1})
    module.on_save_checkpoint = lambda checkpoint: checkpoint.update(bad=[lambda: 0] * rank())
    with pytest.raises(RuntimeError, match=r"checkpoint\['bad'\]\[0\] to be something that can"):
        run.save_checkpoint("x")  # on every rank, though only one has it
    assert not os.path.exists("x")


def test_saving_to_remote_storage_is_refused(pool: Any) -> None:
    pool.run(save_to_remote_storage, 2)


def test_saving_on_one_rank_is_refused(pool: Any, tmp_path: Path) -> None:
    assert pool.run(save_on_rank_zero_only, 2, str(tmp_path / "x")) == ["done", "done"]
