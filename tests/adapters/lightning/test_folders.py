"""Folders that are damaged, moved aside or made with other names; Lightning's own tools."""

from __future__ import annotations

import enum
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from shardplug.checkpoint import resume_point
from shardplug.errors import CheckpointError
from tests.adapters.lightning.modules import (
    Data,
    Plain,
    assert_close,
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

ROOT = Path(__file__).parents[3]


def saves(folder: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    return ModelCheckpoint(
        folder, every_n_train_steps=2, filename="{step}", save_last="link", save_top_k=-1
    )


def run_for(folder: str, steps: int, strategy: Any = "zero3") -> Any:
    return trainer(
        strategy,
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[saves(folder)],
    )


def break_file(folder: Path) -> None:
    path = sorted(folder.glob("*.distcp"))[-1]
    path.write_bytes(path.read_bytes()[:-9])


def damaged_newest(folder: str) -> None:
    first = build()
    run_for(folder, 6).fit(first, in_order())
    if rank() == 0:
        break_file(Path(folder, "step=6.ckpt"))
        # A save over step=4.ckpt was killed between its two renames.
        Path(folder, "step=4.ckpt").rename(Path(folder, ".step=4.ckpt.old-0123abcd"))
    again = run_for(folder, 8)
    again.strategy.barrier()
    message = r"step=6.ckpt is damaged|last.ckpt is damaged"
    with pytest.raises(CheckpointError, match=message) as error:
        again.fit(build(), in_order(), ckpt_path="last")
    assert "step=4.ckpt.old-0123abcd (step 4)" in str(error.value)
    with pytest.raises(CheckpointError, match="found nothing.*step=4.ckpt"):
        again.fit(build(), in_order(), ckpt_path=f"{folder}/step=60.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        point = resume_point(folder)
    assert point is not None and (point.step, len(point.passed_over)) == (4, 1)
    assert point.path.name == ".step=4.ckpt.old-0123abcd"
    for path in (str(point.path), f"{folder}/step=4.ckpt"):  # what was moved aside is found
        module = build()
        run = trainer("zero2", max_steps=8, max_epochs=-1)
        run.fit(module, in_order(), ckpt_path=path)
        assert (len(module.losses), run.global_step) == (4, 8)
    straight = build()
    trainer("zero2", max_steps=8, max_epochs=-1).fit(straight, in_order())
    assert_close(whole(module), whole(straight), 1e-6)
    # The next save into the folder brings it back under its name.
    more = run_for(folder, 8)
    more.fit(build(), in_order(), ckpt_path=str(point.path))
    more.strategy.barrier()
    assert sorted(os.listdir(folder)) == [
        "last.ckpt",
        "step=2.ckpt",
        "step=4.ckpt",
        "step=6-v1.ckpt",
        "step=6.ckpt",
        "step=8.ckpt",
    ]
    assert os.readlink(f"{folder}/last.ckpt") == "step=8.ckpt"


def test_a_damaged_newest_checkpoint_names_the_whole_one(pool: Any, tmp_path: Path) -> None:
    pool.run(damaged_newest, 2, str(tmp_path))


class Other(Plain):
    """`Plain` with its network under another name."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(lr=lr)
        self.body = self.net
        del self.net

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        return (self.body(x) * self.scale + self.shift - y).square().mean()


def new_names(folder: str) -> None:
    from shardplug.lightning import ZeroStrategy

    old = build()
    run = run_for(folder, 2)
    run.fit(old, in_order())
    path, rename = f"{folder}/step=2.ckpt", {"net": "body", "shift": "shift"}
    with pytest.raises(CheckpointError, match="body.head.weight"):
        run_for(folder, 4).fit(build(Other), in_order(), ckpt_path=path)
    with pytest.raises(CheckpointError, match="has no nett"):
        strategy = ZeroStrategy(load_rename={"nett": "body"})
        run_for(folder, 4, strategy).fit(build(Other), in_order(), ckpt_path=path)
    module = build(Other)
    run_for(folder, 4, ZeroStrategy(load_rename=rename)).fit(module, in_order(), ckpt_path=path)
    straight = build()
    trainer(max_steps=4, max_epochs=-1).fit(straight, in_order())
    expected = {name.replace("net.", "body."): value for name, value in whole(straight).items()}
    assert_close(whole(module), expected, 1e-6)
    # The same script is started again: what it saved has the new names already.
    again = build(Other)
    run = run_for(folder, 6, ZeroStrategy(stage=2, load_rename=rename))
    run.fit(again, in_order(), ckpt_path="last")
    assert (len(again.losses), run.global_step) == (2, 6)


def test_new_names(pool: Any, tmp_path: Path) -> None:
    from shardplug.lightning import load_from_checkpoint

    pool.run(new_names, 2, str(tmp_path))
    quiet()
    module = load_from_checkpoint(Other, tmp_path / "step=2.ckpt", load_rename={"net": "body"})
    assert "body.head.weight" in module.state_dict()
    file = tmp_path / "file.ckpt"
    plain = pl.Trainer(accelerator="cpu", devices=1, max_epochs=0, logger=False)
    plain.fit(Plain(), DataLoader(Data(8)))
    plain.save_checkpoint(file)
    module = load_from_checkpoint(Other, file, load_rename={"net": "body"}, weights_only=True)
    assert "body.head.weight" in module.state_dict()
    with pytest.raises(CheckpointError, match="has no nett"):
        load_from_checkpoint(Other, file, load_rename={"nett": "body"}, weights_only=True)


class Headed(Plain):
    """`Plain` with one more head, and optionally one of another size."""

    def __init__(self, strict: bool = True, size: int = 3) -> None:
        super().__init__()
        self.strict_loading = strict
        self.more = nn.Linear(3, 2)
        self.shift = nn.Parameter(torch.full((size,), 0.1))
        self.scale = nn.Parameter(torch.tensor(9.0))

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-2)


def strict_and_not(folder: str) -> None:
    first = build()
    run_for(folder, 2).fit(first, in_order())
    saved, path = whole(first), f"{folder}/step=2.ckpt"

    def validate(module: Any) -> Any:
        trainer("zero2").validate(module, in_order(size=16), ckpt_path=path, verbose=False)
        return module

    with pytest.raises(CheckpointError, match="Missing in the checkpoint: more.weight, more.bias"):
        validate(build(Headed))
    with pytest.raises(CheckpointError, match=r"shift.*\[4\].*\[3\]|shift.*\(3,\)"):
        validate(build(Headed, strict=False, size=4))
    loaded = whole(validate(build(Headed, strict=False)))
    fresh = reference(Headed, strict=False).state_dict()
    expected = {**saved, "more.weight": fresh["more.weight"], "more.bias": fresh["more.bias"]}
    assert_close(loaded, expected, 0.0)
    headed = build(Headed, strict=False)
    more = trainer("zero2", max_steps=4, max_epochs=-1)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        more.fit(headed, in_order(), ckpt_path=path)
    assert rank() or any("more.weight, more.bias" in str(w.message) for w in log)
    state = more.optimizers[0].state
    steps = {n: float(state[p]["step"]) for n, p in headed.named_parameters() if p in state}
    assert steps["net.head.weight"] == 4.0 and steps.get("more.weight", 0.0) == 0.0


def test_strict_loading(pool: Any, tmp_path: Path) -> None:
    pool.run(strict_and_not, 2, str(tmp_path))


class Kind(enum.Enum):
    GOOD = 1


@dataclass
class Settings:
    depth: int = 2


class Configured(Plain):
    """Hyper-parameters of many kinds; `net` is a part of the model, `extra` is not."""

    def __init__(
        self,
        settings: Any = None,
        kind: Any = None,
        where: Any = None,
        part: Any = None,
        extra: Any = None,
        width: int = 3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.part = part if part is not None else nn.Linear(3, width)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + self.part(batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-2)


def hyper_parameters(folder: str) -> Any:
    module = build(
        Configured,
        settings=Settings(),
        kind=Kind.GOOD,
        where=Path("x/y"),
        part=nn.Linear(3, 4),
        extra=nn.Linear(2, 2),
        width=4,
    )
    run = run_for(folder, 4)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        run.fit(module, in_order())
    said = [str(w.message) for w in log if "Left out of the checkpoint" in str(w.message)]
    assert not rank() or not said
    assert rank() or (said and "hyper_parameters: part, part of the sharded model" in said[0])
    path = f"{folder}/step=4.ckpt"
    assert run.test(module, in_order(size=16), ckpt_path="last", verbose=False)
    final = whole(module)
    for options in ({}, {"weights_only": False}):
        again = build(Configured, part=nn.Linear(3, 4))
        on = trainer("zero2", max_steps=6, max_epochs=-1)
        on.fit(again, in_order(), ckpt_path=path, **options)
        assert on.global_step == 6
    return final


def test_hyper_parameters_of_all_kinds(pool: Any, tmp_path: Path) -> None:
    from shardplug.lightning import load_from_checkpoint

    final = pool.run(hyper_parameters, 2, str(tmp_path))[0]
    quiet()
    path, part = tmp_path / "step=4.ckpt", nn.Linear(3, 4)
    module = load_from_checkpoint(Configured, path, weights_only=False, part=part)
    assert_close(dict(module.state_dict()), final, 0.0)
    assert module.hparams["settings"] == Settings() and module.hparams["kind"] is Kind.GOOD
    assert isinstance(module.hparams["extra"], nn.Linear)
    assert (module.hparams["where"], module.hparams["width"]) == (Path("x/y"), 4)
    with pytest.warns(UserWarning, match=r"'settings'\], .*'kind'\], .*'extra'\]"):
        module = load_from_checkpoint(Configured, path, part=part)
    assert module.hparams["settings"] is None and module.hparams["width"] == 4

    file = consolidate(path)
    loaded = torch.load(file, weights_only=True)
    assert_close(loaded["state_dict"], final, 0.0)
    assert loaded["hyper_parameters"]["where"] == "x/y" and "kind" not in loaded["hyper_parameters"]
    module = Configured.load_from_checkpoint(file, part=part, settings=Settings())
    assert_close(dict(module.state_dict()), final, 0.0)
    assert module.hparams["width"] == 4 and module.hparams["settings"] == Settings()
    plain = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Data(16), batch_size=16)
    tested = plain.test(module, data, ckpt_path=file, verbose=False)[0]
    assert abs(tested["test_loss"] - float(module.loss(whole_batches(16, 16, 1)[0]))) < 1e-6


def consolidate(path: Path) -> Path:
    """Run Lightning's own tool as its users do."""
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint"]
    done = subprocess.run(
        [*command, str(path)], capture_output=True, text=True, timeout=120, cwd=path.parent
    )
    assert done.returncode == 0, done.stderr
    return path.with_name(f"{path.name}.consolidated")
