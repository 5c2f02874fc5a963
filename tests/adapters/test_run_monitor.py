"""Monitors and targets through a plain loop, the Trainer, Accelerate and Hugging Face's Trainer."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ConfigError
from shardplug.monitor import Monitor
from tests.adapters.lightning.modules import Plain, build, in_order, pl, trainer, whole
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

HEALTHY = {"seconds": 0.5, "busy_seconds": 0.4}  # a timing is never a test


def same_everywhere(value: Any) -> Any:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values
    return value


# -- a plain loop ---------------------------------------------------------------------------------


class Loop:
    """A sharded language model and its monitor."""

    def __init__(self, monitor: Monitor) -> None:
        torch.manual_seed(3)
        self.engine = ZeroEngine(ZeroConfig(stage=2, units=()))
        self.model = self.engine.shard(TinyLM(width=12, hidden=16))
        self.optimizer = self.engine.prepare_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        )
        self.monitor = monitor
        self.step = 0

    def train(self, scale: float = 1.0, **told: Any) -> Any:
        """Train one step, of a loss times `scale`, and look at it."""
        self.step += 1
        batch = tokens(self.step % 5, 0, self.engine.rank, batch=4)
        with self.engine.micro_step():
            loss = lm_loss(self.model(batch), batch) * scale
            loss.backward()
        norm = self.engine.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        told = {**HEALTHY, **told} if "seconds" not in told else told
        return self.monitor.step(
            self.step, loss=loss.detach(), grad_norm=norm, tokens=batch.numel(), **told
        )

    def save(self, folder: str) -> None:
        self.engine.save(
            f"{folder}/step-{self.step}", optimizers=[self.optimizer], extra={"step": self.step}
        )

    def resume(self, path: Path) -> None:
        self.step = self.engine.load(path, optimizers=[self.optimizer])["step"]


def _clean_then_faults() -> dict[str, list[str]]:
    loop = Loop(Monitor())
    clean = [loop.train() for _ in range(200)]
    assert clean[0].row.loss > 5 > clean[-1].row.loss  # it learns
    assert len(clean[-1].row.memory_bytes) == 2 and clean[-1].row.tokens_per_second == 144
    found = {"clean": [alert.kind for report in clean for alert in report.alerts]}
    spike = loop.train(scale=20.0 if loop.engine.rank else 1.0)
    found["spike"] = [alert.kind for alert in spike.alerts]
    broken = loop.train(scale=float("inf") if loop.engine.rank else 1.0)
    found["nonfinite"] = [f"{alert.kind}: {alert.text}" for alert in broken.alerts]
    return same_everywhere(found)


def test_a_clean_run_of_200_steps_is_silent_and_faults_are_found(pool: RankPool) -> None:
    (found, _) = pool.run(_clean_then_faults, 2)
    assert found["clean"] == []
    assert found["spike"] == ["loss_spike"]
    (text,) = found["nonfinite"]
    assert text.startswith("nonfinite: not finite: loss of rank 1, grad_norm of rank 0")


def _rank_1_is_slow() -> list[str]:
    options = {"window": 10, "warmup": 2}
    others = ("loss_spike", "grad_norm_drift", "throughput_drift", "memory_growth")
    loop = Loop(Monitor({**options, **{name: None for name in others}}))
    texts: list[str] = []
    loop.monitor.begin()
    for _ in range(6):
        if loop.engine.rank == 1:
            time.sleep(1.0)  # far above what a busy machine adds to the other rank
        report = loop.train(seconds=None)
        assert len(report.row.busy_seconds) == 2
        texts += [alert.text for alert in report.alerts]
    return same_everywhere(texts)


def test_a_rank_that_the_others_wait_for_is_named(pool: RankPool) -> None:
    (texts, _) = pool.run(_rank_1_is_slow, 2)
    assert texts and all(text.startswith("rank 1 works") for text in texts)


def _roll_back(folder: str) -> tuple[list[int], list[str]]:
    options = {"actions": {"nonfinite": "rollback"}, "max_rollbacks": 1}
    loop = Loop(Monitor(options, folder=folder))
    for _ in range(4):
        loop.train()
        if loop.step in (2, 4):
            loop.save(folder)
    saved = {name: value.clone() for name, value in whole(loop.model).items()}
    loop.train()
    report = loop.train(scale=float("nan") if loop.engine.rank else 1.0)
    assert report.action == "rollback"
    loop.resume(report.resume.path)
    assert loop.step == 4 == report.resume.step
    now = whole(loop.model)
    assert saved and all(torch.equal(saved[name], now[name]) for name in saved)
    steps = [loop.step]
    assert loop.train().action == "none"
    steps.append(loop.step)
    again = loop.train(scale=float("nan"))
    return same_everywhere((steps, [again.action]))


def test_a_rollback_returns_all_ranks_to_the_last_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    ((steps, last), _) = pool.run(_roll_back, 2, str(tmp_path))
    assert steps == [4, 5]
    assert last == ["stop"]  # once was declared


# -- Lightning ------------------------------------------------------------------------------------


class Poisoned(Plain):
    """One batch of one rank, once, has a loss that is not finite."""

    poison = 5

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        if index == self.poison and dist.get_rank() == 1:
            return loss * float("nan")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Watch(pl.Callback):
    """Notes the step count and the learning rate behind each batch."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.steps.append(trainer.global_step)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def _fit(folder: str, action: str) -> Any:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shardplug.lightning import RunMonitor

    monitor = RunMonitor({"actions": {"nonfinite": action}, "throughput_drift": None})
    watch = Watch()
    saver = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    run = trainer(
        callbacks=[monitor, watch, saver],
        enable_checkpointing=True,
        default_root_dir=folder,
        max_epochs=1,
    )
    module = build(Poisoned)
    run.fit(module, in_order(batch_size=2, size=40))  # 10 batches for each of 2 ranks
    assert monitor.monitor is not None
    finite = all(bool(value.isfinite().all()) for value in whole(module).values())
    rates = [round(rate, 6) for rate in watch.rates]
    return same_everywhere((watch.steps, rates, finite, monitor.monitor.rollbacks))


def test_a_fit_goes_back_and_goes_on(pool: RankPool, tmp_path: Path) -> None:
    ((steps, rates, finite, rollbacks), _) = pool.run(_fit, 2, str(tmp_path), "rollback")
    # The sixth batch is poisoned: back to step 4, and on with the seventh.
    assert steps == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert rates[5] == rates[3] and rates[6] == rates[4]
    assert finite and rollbacks == 1


def test_a_fit_stops_on_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    ((steps, _, finite, _), _) = pool.run(_fit, 2, str(tmp_path), "stop")
    assert steps == [1, 2, 3, 4, 5, 6]
    assert not finite


def _refused(folder: str) -> None:
    from shardplug.lightning import RunMonitor

    for strategy, options, text in (
        ("ddp", {}, "strategy of shardplug for RunMonitor"),
        ("zero3", {"actions": {"nonfinite": "rollback"}}, "Expected a folder of checkpoints"),
    ):
        with pytest.raises(ConfigError, match=text):
            run = trainer(strategy, callbacks=[RunMonitor(options)], default_root_dir=folder)
            run.fit(build(), in_order())


def test_what_the_callback_cannot_do_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_refused, 2, str(tmp_path))


# -- Accelerate, Hugging Face, W&B ----------------------------------------------------------------


def _accelerate(folder: str) -> list[str]:
    from shardplug.accelerate import make_monitor
    from tests.adapters.accelerate.common import accelerator, seeded_model

    os.environ.update(WANDB_MODE="offline", WANDB_DIR=folder, WANDB_SILENT="true")
    acc = accelerator(cpu=True, zero="zero2", log_with="wandb")
    acc.init_trackers("monitored", init_kwargs={"wandb": {"dir": folder}})  # not an earlier one
    model = seeded_model()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    options = {
        "actions": {"nonfinite": "rollback"},
        "targets": {"tokens_per_second": {"limit": 1e9}, "memory_gib": {"limit": 1e6}},
        "warmup": 2,
    }
    monitor = make_monitor(acc, options, f"{folder}/checkpoints")
    actions = []
    for step in range(1, 8):
        batch = tokens(step, 0, acc.process_index)
        loss = lm_loss(model(batch), batch) * (float("nan") if step == 4 else 1.0)
        acc.backward(loss)
        norm = acc.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report = monitor.step(
            acc.completed_steps, loss=loss.detach(), grad_norm=norm, tokens=18, **HEALTHY
        )
        acc.log({"train_loss": 1.0}, step=step)
        actions.append(report.action)
        if step == 2:
            acc.save_state(f"{folder}/checkpoints/two")
        assert monitor.targets.get("tokens_per_second") in ((False,) if step in (3, 7) else (None,))
        if report.resume is not None:
            acc.load_state(report.resume.path)
            assert acc.completed_steps == 2
    monitor.close()
    if acc.is_main_process:
        summary = acc.get_tracker("wandb", unwrap=True).summary
        assert summary["target_memory_gib"] == "met"
    same_everywhere(actions)
    acc.end_training()
    return actions


def test_accelerate_goes_back_and_wandb_has_the_alerts(pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    from tests.unit.memory.wandb_file import read_history, read_records

    (actions, _) = pool.run(_accelerate, 2, str(tmp_path))
    assert actions == ["none", "none", "warn", "rollback", "none", "none", "warn"]
    records = read_records(tmp_path)
    alerts = [
        (r.alert.title, r.alert.level) for r in records if r.WhichOneof("record_type") == "alert"
    ]
    assert alerts == [
        ("shardplug: target/tokens_per_second", "WARN"),
        ("shardplug: nonfinite", "ERROR"),
        ("shardplug: target/tokens_per_second", "WARN"),
    ]
    history = read_history(tmp_path)
    assert sum("train_loss" in row for row in history) == 7  # none is lost to ours
    rows = [row for row in history if "monitor/step" in row]
    assert [row["monitor/step"] for row in rows] == [1, 2, 3, 4, 3, 4, 5]
    assert rows[2]["targets/tokens_per_second"] == 0 and rows[2]["targets/memory_gib"] == 1
    assert rows[2]["alerts/tokens_per_second"] == 1 and rows[1]["monitor/step_seconds"] == 0.5


def _trainer_stops(folder: str) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from shardplug.hf import RunMonitor

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=97,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(32)]
    args = TrainingArguments(
        folder, max_steps=8, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        per_device_train_batch_size=2, save_strategy="no",
    )  # fmt: skip
    options = {"targets": {"loss": {"limit": 1e-3, "from_step": 3, "action": "stop"}}}
    run = Trainer(
        model=LlamaForCausalLM(config), args=args, train_dataset=rows,
        callbacks=[RunMonitor(options)],
    )  # fmt: skip
    run.train()
    for refused in ({"actions": {"nonfinite": "rollback"}}, {"every_n_steps": 2}):
        with pytest.raises(ConfigError, match="Expected"):
            RunMonitor(refused)
    return int(run.state.global_step)


def test_hugging_faces_trainer_stops(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_trainer_stops, 1, str(tmp_path)) == [3]
