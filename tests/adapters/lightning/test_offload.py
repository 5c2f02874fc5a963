"""Optimizer state outside the device through the Trainer: the same weights, bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from shardplug.lightning import MemoryCurve, ZeroStrategy
from shardplug.memory import read_jsonl
from shardplug.tiers import PATH_VARIABLE
from tests.adapters.lightning.modules import Plain, build, in_order, trainer, whole
from tests.support.activations import small_ones_move
from tests.support.pool import RankPool


class Scheduled(Plain):
    """Has a scheduler, and looks at the optimizer's state while it trains."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.optimizers().state
        assert all(float(values["step"]) == self.global_step for values in state.values())


def strategy_of(tier: str, root: str) -> Any:
    if tier == "nvme":
        return ZeroStrategy(stage=3, offload_optimizer="nvme", nvme_path=root)
    if tier == "both":
        return ZeroStrategy(
            stage=3, offload_optimizer="nvme", nvme_path=root, offload_cpu_gib=4096 / 2**30
        )
    os.environ[PATH_VARIABLE] = root
    return {"none": "zero3", "cpu": "zero3_cpu", "infinity": "zero3_infinity"}[tier]


def fit(tier: str, root: str, *, steps: int, resume: str | None = None, **options: Any) -> Any:
    module = build(Scheduled)
    run = trainer(
        strategy_of(tier, root),
        max_epochs=-1,
        max_steps=steps,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        **options,
    )
    run.fit(module, in_order(), ckpt_path=resume)
    return module, run


def equal(one: Any, two: Any) -> None:
    ours, theirs = whole(one), whole(two)
    assert ours and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def train(root: str) -> None:
    expected, _ = fit("none", root, steps=6)
    for tier in ("cpu", "nvme", "infinity", "both"):
        module, run = fit(tier, root, steps=6)
        equal(module, expected)
    states = run.strategy.engine.memory()
    assert 0 < states["optimizer_state_cpu"] <= 4096 and states["optimizer_state_nvme"] > 0
    resumed = []
    for before, after in (("none", "none"), ("nvme", "infinity"), ("infinity", "cpu")):
        _, run = fit(before, root, steps=3)
        run.save_checkpoint(f"{root}/{before}-{after}.ckpt")  # after fit, as users do
        module, _ = fit(after, root, steps=6, resume=f"{root}/{before}-{after}.ckpt")
        resumed.append(module)
    for module in resumed[1:]:
        equal(module, resumed[0])
    for name in ("zero1_cpu", "zero2_cpu", "zero2_offload", "zero3_offload"):
        config = trainer(name).strategy.config
        assert config.offload_optimizer == "cpu" and config.stage == int(name[4])


def test_trainer(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path))


class Traceable(Plain):
    """Looks at no values."""

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch)


def run_has_plan(lines: list[str]) -> bool:
    """Whether what was planned for activations in CPU memory is what was there."""
    rows = [json.loads(line) for line in lines]
    return bool(rows) and all(
        row["predicted_activations_cpu_bytes"] == row.get("activations_cpu_bytes", 0)
        for row in rows
    )


def activations(root: str) -> None:
    def fit_with(**options: Any) -> Any:
        module, callback = build(Traceable), MemoryCurve(root)
        strategy = ZeroStrategy(stage=3, **options)
        run = trainer(strategy, max_steps=4, accumulate_grad_batches=2, callbacks=[callback])
        run.fit(module, in_order())
        return module, strategy.engine

    with small_ones_move():
        expected, _ = fit_with()
        module, engine = fit_with(offload_activations="cpu")
    equal(module, expected)
    traffic = engine.traffic()
    assert traffic["bytes_read"] == traffic["bytes_written"] > 0
    if engine.rank == 0:
        assert run_has_plan(Path(f"{root}/memory.jsonl").read_text().splitlines())
        found = read_jsonl(f"{root}/memory.jsonl")
        # The backward has not begun when the forward has ended, and is over after it.
        assert found and all(
            (row.activations_cpu_bytes > 0) == (row.phase == "after_forward") for row in found
        )


def test_activations_in_cpu_memory(pool: RankPool, tmp_path: Path) -> None:
    pool.run(activations, 2, str(tmp_path))


def curve(root: str) -> None:
    callback = MemoryCurve(root, every_n_steps=1)
    os.environ[PATH_VARIABLE] = root
    strategy = ZeroStrategy(stage=2, offload_optimizer="nvme")
    trainer(strategy, max_steps=3, callbacks=[callback]).fit(build(Plain), in_order())
    if strategy.engine.rank == 0:
        rows = read_jsonl(callback.jsonl_path)
        last = [row for row in rows if row.step == 3 and row.phase == "after_step"]
        assert len(last) == 2
        for row in last:
            assert row.by_tier["optimizer_state_nvme"] > 0 and row.by_tier["staging"] > 0
            assert row.tiers_measured_bytes == row.by_tier["staging"]
            assert row.optimizer_state_bytes < 200 and row.gradients_bytes == 0
        assert callback.png_path.is_file()


def test_memory_curve_shows_the_tier(pool: RankPool, tmp_path: Path) -> None:
    pool.run(curve, 2, str(tmp_path))
