"""ZeroStrategy(async_save=True): training goes on while a checkpoint is written."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.checkpoint import Reader, is_checkpoint, resume_point
from shardplug.errors import CheckpointError, ConfigError
from tests.adapters.lightning.modules import (
    assert_close,
    build,
    in_order,
    pl,
    rank,
    trainer,
    whole,
)
from tests.support.held_saves import Gate, held_saves

STEPS = 8


def strategy(stage: int = 3, **options: Any) -> Any:
    from shardplug.lightning import ZeroStrategy

    return ZeroStrategy(stage=stage, async_save=True, **options)


def keep(folder: str, **options: Any) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    defaults = {"every_n_train_steps": 2, "filename": "{step}", "save_last": "link"}
    return ModelCheckpoint(folder, **{**defaults, **options})


def run_for(made: Any, *callbacks: Any, steps: int = STEPS, **options: Any) -> Any:
    return trainer(
        made,
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=list(callbacks),
        **options,
    )


class Watch(pl.Callback):
    """Looks at the folder one step after each save, and then lets that save go on."""

    def __init__(self, folder: str, gate: Gate) -> None:
        self.folder = Path(folder)
        self.gate = gate
        self.seen: list[tuple[int, list[str], str | None]] = []

    def on_train_batch_end(self, run: Any, *unused: Any) -> None:
        if run.global_step % 2 and run.global_step > 1:
            run.strategy.barrier()
            names = sorted(p.name for p in self.folder.glob("step*"))
            link = self.folder / "last.ckpt"
            last = link.resolve().name if os.path.lexists(link) else None
            self.seen.append((run.global_step, names, last))
            for name in names:
                Reader(self.folder / name, alone=True).whole_state()  # every byte is compared
            run.strategy.barrier()
            self.gate.release()

    def on_train_end(self, *unused: Any) -> None:
        self.gate.release()


def keep_the_newest(folder: str) -> None:
    module = build()
    with held_saves() as gate:
        watch = Watch(folder, gate)
        # The callbacks of the user's come before ModelCheckpoint.
        run = run_for(strategy(), watch, keep(folder, save_top_k=1))
        run.fit(module, in_order())
    assert run.global_step == STEPS
    # While a save is pending the one before it is there, whole, and the link leads to it.
    assert watch.seen == [
        (3, [], None),
        (5, ["step=2.ckpt"], "step=2.ckpt"),
        (7, ["step=4.ckpt"], "step=4.ckpt"),
    ]
    assert run.strategy.engine.memory()["snapshot"] == 0
    run.strategy.barrier()
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step=8.ckpt"]
    assert os.readlink(f"{folder}/last.ckpt") == "step=8.ckpt"
    assert Reader(f"{folder}/last.ckpt").manifest["step"] == STEPS
    more = build()
    again = run_for(strategy(stage=1), keep(folder, save_top_k=1), steps=STEPS + 2)
    again.fit(more, in_order(), ckpt_path="last")
    straight = build()
    run_for("zero3", steps=STEPS + 2).fit(straight, in_order())
    assert len(more.losses) == 2 and again.global_step == STEPS + 2
    assert_close(whole(more), whole(straight), 1e-6)
    again.strategy.barrier()
    assert again.test(more, in_order(size=16), ckpt_path="best", verbose=False)


def test_the_one_before_stays_until_the_new_one_is_there(pool: Any, tmp_path: Path) -> None:
    pool.run(keep_the_newest, 2, str(tmp_path))


class Edits(pl.Callback):
    """Writes what it knows into the checkpoint, and changes it in the next step."""

    def __init__(self) -> None:
        self.count = torch.zeros(2)

    def on_train_batch_end(self, *unused: Any) -> None:
        self.count += 1

    def on_save_checkpoint(self, run: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count
        checkpoint["copy"] = dict(checkpoint["state_dict"])


class ReleaseLater(pl.Callback):
    """Lets a save write only when training has changed everything since."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_batch_end(self, run: Any, *unused: Any) -> None:
        if run.global_step % 3 == 1 and run.global_step > 1:
            self.gate.release()

    def on_train_end(self, *unused: Any) -> None:
        self.gate.release()


def same_content(folder: str) -> None:
    """What is written is the state at the save, whatever training has changed since."""
    for name, made in (("async", strategy(2)), ("sync", "zero2")):
        saves = keep(
            f"{folder}/{name}",
            save_top_k=-1,
            filename="same",
            monitor="step",
            mode="max",
            every_n_train_steps=3,
        )
        module = build(dropout=0.2)
        torch.manual_seed(7 + rank())
        with held_saves() as gate:
            run_for(made, Edits(), ReleaseLater(gate), saves, steps=9).fit(module, in_order())
            assert gate.count == (3 if name == "async" else 0)
        if name == "async":
            assert not {"file_exists", "_link_checkpoint"} & set(vars(saves))
    names = ["last.ckpt", "same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]
    for name in ("async", "sync"):
        assert sorted(os.listdir(f"{folder}/{name}")) == names
    for step, name in zip((3, 6, 9), ("same.ckpt", "same-v1.ckpt", "same-v2.ckpt"), strict=True):
        left, right = Reader(f"{folder}/async/{name}"), Reader(f"{folder}/sync/{name}")
        assert left.manifest["step"] == right.manifest["step"] == step
        assert left.num_models == right.num_models == 2
        for index in (0, 1):
            assert_close(left.whole_state(index), right.whole_state(index), 0.0)
        assert left.meta["count"].tolist() == right.meta["count"].tolist() == [step, step]
        for name, expected in left.optimizer_state(0, [build()])["state"].items():
            found = right.optimizer_state(0, [build()])["state"][name]
            assert torch.equal(expected["exp_avg"], found["exp_avg"])
            assert float(expected["step"]) == float(found["step"]) == step


def test_an_asynchronous_save_is_the_synchronous_one(pool: Any, tmp_path: Path) -> None:
    pool.run(same_content, 2, str(tmp_path))


def fail_while_training(folder: str) -> str:
    with held_saves(fail_on_save=2, failing=rank() == 1) as gate:
        watch = Watch(folder, gate)
        run = run_for(strategy(), watch, keep(folder, save_top_k=1))
        with pytest.raises(CheckpointError, match=r"background failed.*rank 1.*No space") as error:
            run.fit(build(), in_order())
        assert "step=4.ckpt" in str(error.value), "says which save"
        assert run.global_step in (5, 6)
        gate.release()
    run.strategy.barrier()
    # Nothing was removed, nothing left behind, and the link leads to the one that is whole.
    assert sorted(os.listdir(folder)) == ["last.ckpt", "step=2.ckpt"]
    point = resume_point(folder)
    assert point is not None and point.step == 2 and not point.passed_over
    module = build()
    again = run_for(strategy(), keep(folder, save_top_k=1))
    again.fit(module, in_order(), ckpt_path="last")
    assert len(module.losses) == STEPS - 2
    again.strategy.barrier()
    # Lightning finds last.ckpt taken and makes last-v1.ckpt; the old link does not dangle.
    assert sorted(os.listdir(folder)) == ["last-v1.ckpt", "last.ckpt", "step=8.ckpt"]
    assert os.readlink(f"{folder}/last.ckpt") == os.readlink(f"{folder}/last-v1.ckpt")
    return str(error.value)


def test_a_failed_save_ends_training_on_every_rank(pool: Any, tmp_path: Path) -> None:
    first, second = pool.run(fail_while_training, 2, str(tmp_path))
    assert first == second


def fail_at_the_end(folder: str) -> None:
    with held_saves(fail_on_save=1, failing=rank() == 0) as gate:
        gate.release()
        run = run_for(strategy(), keep(folder), steps=2)
        with pytest.raises(CheckpointError, match="step=2.ckpt"):
            run.fit(build(), in_order())
    run.strategy.barrier()
    assert os.listdir(folder) == []


def test_a_failed_last_save_fails_fit(pool: Any, tmp_path: Path) -> None:
    pool.run(fail_at_the_end, 2, str(tmp_path))


class Raises(pl.Callback):
    def on_train_batch_start(self, run: Any, *unused: Any) -> None:
        if run.global_step == 3:
            self.gate.release()
            raise ValueError("my own")


def own_error(folder: str) -> None:
    for fail_on in (None, 1):
        path = f"{folder}/{fail_on}"
        with held_saves(fail_on_save=fail_on) as gate, warnings.catch_warnings(record=True) as log:
            stop = Raises()
            stop.gate = gate
            run = run_for(strategy(), keep(path), stop)
            warnings.simplefilter("always")
            with pytest.raises(ValueError, match="my own"):
                run.fit(build(), in_order())
            said = [str(w.message) for w in log if "No space left" in str(w.message)]
        run.strategy.barrier()
        if fail_on is None:
            assert is_checkpoint(f"{path}/last.ckpt") and not said
        else:
            assert not os.path.lexists(f"{path}/last.ckpt") and "After ValueError" in said[0]
            assert resume_point(path) is None


def test_an_error_of_the_users_is_the_one_that_is_seen(pool: Any, tmp_path: Path) -> None:
    pool.run(own_error, 2, str(tmp_path))


def other_saves(folder: str) -> None:
    """Saves that are not part of training, weights alone, and the learning rate finder."""
    from lightning.pytorch.callbacks import LearningRateFinder

    saves = keep(f"{folder}/weights", save_weights_only=True, save_top_k=-1)
    finder = LearningRateFinder(num_training_steps=5, update_attr=False)
    run = run_for(strategy(), saves, finder, steps=4)
    module = build()
    run.fit(module, in_order())
    assert is_checkpoint(f"{folder}/weights/step=4.ckpt")
    with held_saves():  # nothing waits in it: there is no training to go on with
        run.save_checkpoint(f"{folder}/final")
    assert is_checkpoint(f"{folder}/final")
    run.save_checkpoint(f"{folder}/light", weights_only=True)
    for name in ("final", "light", "weights/step=4.ckpt"):
        loaded = build(lr=0.5)
        trainer().validate(loaded, in_order(size=16), ckpt_path=f"{folder}/{name}", verbose=False)
        assert_close(whole(loaded), whole(module), 0.0)
    with pytest.raises(ConfigError, match="names that it does not rename again"):
        strategy(load_rename={"a": "b", "b": "c"})


def test_saves_besides_training(pool: Any, tmp_path: Path) -> None:
    pool.run(other_saves, 2, str(tmp_path))
