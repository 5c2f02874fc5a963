"""The framework square: saved by the Trainer, Fabric, Accelerate or a plain loop, loaded by any."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import Reader
from tests.dist.checkpoint_runs import (
    assert_holds,
    batch_of,
    make_model,
    make_optimizer,
    snapshot,
)
from tests.support.models import lm_loss
from tests.support.pool import RankPool

FRAMEWORKS = ("trainer", "fabric", "accelerate", "plain")
SAVED_AT, END = 3, 6
STAGES = {2: 3, 3: 1}  # by world size: the first saves, the second loads

Look = Callable[[int, nn.Module, torch.optim.Optimizer], None]
"""Called with the step, the model and the optimizer before the first step and after each."""


def own_batch(step: int) -> torch.Tensor:
    return batch_of(step, dist.get_rank(), dist.get_world_size())


def fresh_model(loads: bool) -> nn.Module:
    return make_model("odd", (77 if loads else 5) + dist.get_rank())


def plain(stage: int, save: str | None, load: str | None, look: Look) -> None:
    engine = ZeroEngine(ZeroConfig(stage=stage))
    model = engine.shard(fresh_model(load is not None))
    optimizer = engine.prepare_optimizer(make_optimizer("odd", model))
    first = 0
    if load:
        engine.load(load, optimizers=[optimizer])
        first = Reader(load).manifest.get("step") or SAVED_AT
    look(first, model, optimizer)
    for step in range(first, END):
        lm_loss(model(own_batch(step)), own_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        look(step + 1, model, optimizer)
        if save and step + 1 == SAVED_AT:
            engine.save(save, optimizers=[optimizer], extra={"step": step + 1})


def fabric(stage: int, save: str | None, load: str | None, look: Look) -> None:
    from tests.adapters.fabric.test_fabric import fabric as launch

    run = launch(f"zero{stage}")
    model = fresh_model(load is not None)
    model, optimizer = run.setup(model, make_optimizer("odd", model))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if load:
        rest = run.load(load, state, strict=False)  # only our own folders have a "step" for it
        state["step"] = state["step"] or rest.get("global_step") or SAVED_AT
    inner, shards = model.module, optimizer.optimizer
    inner = getattr(inner, "module", inner)
    look(state["step"], inner, shards)
    for step in range(state["step"], END):
        run.backward(lm_loss(model(own_batch(step)), own_batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        look(step + 1, inner, shards)
        if save and step + 1 == SAVED_AT:
            run.save(save, {**state, "step": step + 1})


def accelerate(stage: int, save: str | None, load: str | None, look: Look) -> None:
    from tests.adapters.accelerate.common import accelerator

    acc = accelerator(zero=f"zero{stage}")
    model = fresh_model(load is not None)
    model, optimizer = acc.prepare(model, make_optimizer("odd", model))
    first = 0
    if load:
        acc.load_state(load)
        first = acc.completed_steps or SAVED_AT
    look(first, model, optimizer.optimizer)
    for step in range(first, END):
        acc.backward(lm_loss(model(own_batch(step)), own_batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        look(step + 1, model, optimizer.optimizer)
        if save and step + 1 == SAVED_AT:
            acc.save_state(save)


def trainer(stage: int, save: str | None, load: str | None, look: Look) -> None:
    from tests.adapters.lightning.modules import pl
    from tests.adapters.lightning.modules import trainer as make_trainer

    class Module(pl.LightningModule):
        """Its names have "model." in front."""

        def __init__(self) -> None:
            super().__init__()
            self.model = fresh_model(load is not None)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return lm_loss(self.model(own_batch(self.global_step)), own_batch(self.global_step))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer("odd", self)

        def on_train_start(self) -> None:
            self.look()

        def on_train_batch_end(self, *unused: Any) -> None:
            self.look()
            if save and self.global_step == SAVED_AT:
                self.trainer.save_checkpoint(save)

        def look(self) -> None:
            look(self.global_step, self.model, self.trainer.optimizers[0])

    run = make_trainer(f"zero{stage}", max_steps=END, max_epochs=-1)
    run.fit(Module(), DataLoader(range(1000), batch_size=1), ckpt_path=load)  # type: ignore[arg-type]


def save_by(framework: str, root: str) -> None:
    kept: dict[int, dict[str, Any]] = {}

    def keep(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept[step] = snapshot(model, optimizer)

    path = f"{root}/{framework}"
    globals()[framework](STAGES[dist.get_world_size()], path, None, keep)
    assert sorted(kept) == list(range(END + 1))
    torch.save((kept[SAVED_AT], kept[END]), f"{path}.expected-{dist.get_rank()}")


def load_from(saver: str, framework: str, root: str) -> None:
    path = f"{root}/{saver}"
    before, after = torch.load(f"{path}.expected-0")
    seen: list[int] = []

    def check(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        seen.append(step)
        where = (saver, framework, step)
        if step == SAVED_AT:
            assert_holds(before, model, optimizer, where=where)
        elif step == END:
            assert_holds(after, model, optimizer, close=1e-6, where=where)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what another framework's folder does not have
        globals()[framework](STAGES[dist.get_world_size()], None, path, check)
    assert seen == list(range(SAVED_AT, END + 1)), (saver, framework, seen)


def load_by(framework: str, root: str) -> int:
    for saver in FRAMEWORKS:
        load_from(saver, framework, root)
    return len(FRAMEWORKS)


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each framework, written by two ranks."""
    root = tmp_path_factory.mktemp("square")
    for framework in FRAMEWORKS:
        pool.run(save_by, 2, framework, str(root))
    return root


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_goes_on_from_every_other(
    pool: RankPool, saved: Path, framework: str
) -> None:
    assert pool.run(load_by, 3, framework, str(saved)) == [4, 4, 4]
