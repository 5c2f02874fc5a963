"""What every front door sends in a window, in which dtype, and what is gathered when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardplug import ZeroConfig, ZeroEngine
from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.hf_trainer import common as hf
from tests.adapters.lightning.modules import pl, trainer
from tests.adapters.test_square import Body, batch_of
from tests.support.pool import RankPool
from tests.support.traffic import Traffic

MICRO = 3
KINDS = ("gather", "reduce")


def batches() -> Any:
    return DataLoader([batch_of(step) for step in range(MICRO)], batch_size=None)


def sgd(body: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(body.parameters(), lr=0.1)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.body(batch).float().square().mean()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.body(batch)

    def configure_optimizers(self) -> Any:
        return sgd(self.body)


class Gathered(pl.Callback):
    """Bytes of gathered copies after each micro-batch and at the start of each evaluation."""

    def __init__(self) -> None:
        self.after_micro_batch: list[int] = []
        self.in_evaluation: list[int] = []

    def on_train_batch_end(self, run: Any, *unused: Any) -> None:
        self.after_micro_batch.append(run.strategy.engine.memory()["gathered"])

    def on_validation_batch_start(self, run: Any, *unused: Any) -> None:
        self.in_evaluation.append(run.strategy.engine.memory()["gathered"])


def with_trainer(stage: int, **options: Any) -> None:
    run = trainer(
        f"zero{stage}",
        precision="bf16-mixed",
        accumulate_grad_batches=MICRO,
        use_distributed_sampler=False,
        **options,
    )
    run.fit(Module(), batches(), *([batches()] if "val_check_interval" in options else []))


def with_fabric(stage: int) -> None:
    run = fabric(f"zero{stage}", precision="bf16-mixed")
    body = Body()
    model, optimizer = run.setup(body, sgd(body))
    for index, batch in enumerate(batches()):
        with run.no_backward_sync(model, enabled=index + 1 < MICRO):
            run.backward(model(batch).float().square().mean())
    optimizer.step()


def with_accelerate(stage: int) -> None:
    run = accelerator(
        zero=f"zero{stage}", mixed_precision="bf16", gradient_accumulation_steps=MICRO
    )
    body = Body()
    body, optimizer = run.prepare(body, sgd(body))
    for batch in batches():
        with run.accumulate(body):
            run.backward(body(batch).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()


def with_engine(stage: int, micro: int = MICRO) -> None:
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="bf16"))  # type: ignore[arg-type]
    body = engine.shard(Body())
    optimizer = engine.prepare_optimizer(sgd(body))
    for index, batch in enumerate(batches()):
        if index < micro:
            with engine.micro_step(last=index + 1 == micro):
                body(batch).float().square().mean().backward()
    optimizer.step()


def hf_with_engine(stage: int) -> None:
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = engine.shard(hf.build())
    for index in range(MICRO):
        rows = {name: value[None] for name, value in hf.rows(MICRO)[index].items()}
        with engine.micro_step(last=index + 1 == MICRO):
            model(**rows).loss.backward()


def hf_with_trainer(stage: int, folder: str) -> None:
    with hf.launched(f"zero{stage}"):
        hf.run(
            Path(folder) / str(dist.get_rank()),
            hf.build(),
            world_size=dist.get_world_size(),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=MICRO,
            max_steps=1,
            max_grad_norm=0.0,
            save_strategy="no",
        )


def measured(run: Callable[..., None], *args: Any) -> tuple[dict[str, int], dict[str, Any]]:
    """Return bytes and dtypes of a run's gathers and reductions."""
    with Traffic() as traffic:
        run(*args)
    return {k: traffic.bytes[k] for k in KINDS}, {k: traffic.dtypes[k] for k in KINDS}


def compare(stage: int, folder: str) -> None:
    expected = measured(with_engine, stage)
    assert expected[1] == {"gather": {torch.bfloat16}, "reduce": {torch.float32}}
    one = measured(with_engine, stage, 1)[0]
    assert all(one.values())
    if stage == 1:  # gathered once and reduced once in a window
        assert expected[0] == one
    for door in (with_trainer, with_fabric, with_accelerate):
        assert measured(door, stage) == expected, door.__name__
    expected = measured(hf_with_engine, stage)
    assert expected[1] == {kind: {torch.float32} for kind in KINDS}
    assert measured(hf_with_trainer, stage, folder) == expected


def evaluate_within_a_window() -> tuple[list[int], list[int]]:
    look = Gathered()
    with_trainer(1, val_check_interval=1, callbacks=[look])
    return look.after_micro_batch, look.in_evaluation


def test_doors_send_what_the_engine_sends(pool: RankPool, tmp_path: Path) -> None:
    for stage in (1, 3):
        pool.run(compare, 2, stage, str(tmp_path))


def test_evaluation_within_a_window_begins_from_shards(pool: RankPool) -> None:
    after, within = pool.run(evaluate_within_a_window, 2)[0]
    assert after[0] > 0 and len(within) == MICRO * MICRO
    assert within[::MICRO] == [0] * MICRO
