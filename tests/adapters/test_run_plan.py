"""A run through Fabric or Accelerate, offloaded or not, holds what its own plan says."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.core.precision import PLAIN_FORWARD
from shardplug.memory import (
    MODEL_STATE_KINDS,
    FirstStep,
    JsonlSink,
    MemoryTracker,
    RunPlan,
    read_jsonl,
)
from shardplug.plan.run.run_plan import RunPlanner, predicted_phases
from tests.adapters.accelerate.common import accelerator, loader, samples, seeded_model
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

MICRO_BATCHES = 2


def _with_accelerate(folder: Path, zero: str) -> RunPlan | None:
    acc = accelerator(zero=zero, gradient_accumulation_steps=MICRO_BATCHES)
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = acc.prepare(model, optimizer, loader(samples(6)))
    tracker = MemoryTracker(acc.engine, [JsonlSink(folder / "memory.jsonl")])
    with torch.no_grad():  # an evaluation before the training is no micro-batch
        model.eval()(tokens(0, 0, 0))
    model.train()
    for batch in batches:
        with acc.accumulate(model):
            acc.backward(lm_loss(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
    tracker.close()
    return tracker.plan


def _fabric_steps(run: Any, model: Any, optimizer: Any, steps: int) -> None:
    for step in range(steps):
        for micro in range(MICRO_BATCHES):
            batch = tokens(step, micro, run.global_rank)
            with run.no_backward_sync(model, enabled=micro != MICRO_BATCHES - 1):
                run.backward(lm_loss(model(batch), batch))
        optimizer.step()
        optimizer.zero_grad()


def _with_fabric(folder: Path, zero: str) -> RunPlan | None:
    pytest.importorskip("lightning")
    from tests.adapters.fabric.test_fabric import fabric

    run = fabric(zero)
    model = seeded_model()
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    tracker = MemoryTracker(run.strategy.engine, [JsonlSink(folder / "memory.jsonl")])
    _fabric_steps(run, model, optimizer, 3)
    tracker.close()
    return tracker.plan


@pytest.mark.parametrize("zero", ["zero1", "zero3", "zero2_cpu"])
@pytest.mark.parametrize("host", [_with_accelerate, _with_fabric])
def test_books_are_the_plans(pool: RankPool, tmp_path: Path, host: Any, zero: str) -> None:
    plan, other = pool.run(host, 2, tmp_path, zero)
    assert plan is not None and plan == other and plan.traced
    assert plan.accumulate == MICRO_BATCHES
    rows = [row for row in read_jsonl(tmp_path / "memory.jsonl") if row.step == 3]
    assert len(rows) == 2 * 3
    for row in rows:
        planned = predicted_phases(plan.walk_of(row.rank))[row.phase]
        for kind in (*MODEL_STATE_KINDS, "optimizer_state_cpu"):
            assert {**row.by_kind, **row.by_tier}[kind] == planned[kind], (row.phase, kind)
    assert "cross entropy" in plan.notes[0]


def _plan_mixed() -> tuple[bool, bool, int, int]:
    """Plan a step under Accelerate's autocast; nothing is computed in low precision."""
    acc = accelerator(zero="zero3", mixed_precision="bf16")
    model = seeded_model()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    forward = model.forward
    call = ((tokens(0, 0, acc.process_index),), {})
    planner = RunPlanner(acc.engine, FirstStep(model=model, batch=call, loss=None))
    plan = planner.plan()
    same = model.forward is forward and PLAIN_FORWARD in vars(model)
    states = acc.engine.memory()
    timeline = plan.walk_of(acc.process_index)
    return plan.traced, same, states["master_shards"], timeline.phases["at_rest"]["master_shards"]


def test_a_step_under_autocast_is_traced(pool: RankPool) -> None:
    for traced, same, held, planned in pool.run(_plan_mixed, 2):
        assert traced and same and held == planned > 0


def _two_models() -> tuple[list[str], int]:
    """A teacher beside the model, and a model that is trained by an optimizer of its own."""
    import warnings

    acc = accelerator(zero="zero3")
    model, teacher = seeded_model(), TinyLM().requires_grad_(False)
    model, optimizer, teacher = acc.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), teacher
    )
    tracker = MemoryTracker(acc.engine)
    batch = tokens(0, 0, acc.process_index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        acc.backward(lm_loss(model(batch), batch))
        optimizer.step()
    tracker.close()
    assert tracker.plan is not None
    planned = tracker.plan.walk_of(acc.process_index).phases["at_rest"]["master_shards"]
    said = [str(w.message) for w in caught if "plan" in str(w.message)]
    return said, planned - acc.engine.memory()["master_shards"]


def test_a_frozen_model_beside_is_counted(pool: RankPool) -> None:
    assert pool.run(_two_models, 2) == [([], 0), ([], 0)]


def _plain_accelerate(folder: Path) -> None:
    acc = accelerator(zero="zero3", gradient_accumulation_steps=MICRO_BATCHES)
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, batches = acc.prepare(model, optimizer, loader(samples(4)))
    for batch in batches:
        with acc.accumulate(model):
            acc.backward(lm_loss(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()


def _plain_trainer(folder: Path) -> None:
    pytest.importorskip("transformers")
    import torch.distributed as dist

    from tests.adapters.hf_trainer.common import build, launched, run

    with launched("zero3"):
        size = dist.get_world_size()
        run(folder, build(), rank=dist.get_rank(), world_size=size, max_steps=2)


def _plain_fabric(folder: Path) -> None:
    pytest.importorskip("lightning")
    from tests.adapters.fabric.test_fabric import fabric

    run = fabric("zero3")
    model = seeded_model()
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    _fabric_steps(run, model, optimizer, 2)


def _plain_lightning(folder: Path, curve: bool = False) -> None:
    pytest.importorskip("lightning")
    from shardplug.lightning import MemoryCurve
    from tests.adapters.lightning import modules

    callbacks = [MemoryCurve(folder, picture=False)] if curve else []
    module = modules.build()
    trainer = modules.trainer(
        callbacks=callbacks,
        max_steps=2,
        accumulate_grad_batches=MICRO_BATCHES,
        default_root_dir=folder,
    )
    trainer.fit(module, modules.in_order(batch_size=2))


def _lightning_with_a_curve(folder: Path) -> None:
    _plain_lightning(folder, curve=True)


def _lines(host: Any, folder: Path, switch: str) -> list[str]:
    printed = io.StringIO()
    logger = logging.getLogger("shardplug")
    before = logger.level
    if switch == "off":
        logger.setLevel(logging.WARNING)
    try:
        with contextlib.redirect_stdout(printed):
            host(folder)
    finally:
        logger.setLevel(before)
    return [line for line in printed.getvalue().splitlines() if "planned peak" in line]


HOSTS = [_plain_accelerate, _plain_trainer, _plain_fabric, _plain_lightning]


@pytest.mark.parametrize("host", [*HOSTS, _lightning_with_a_curve])
def test_every_run_prints_its_plan_at_its_start(pool: RankPool, tmp_path: Path, host: Any) -> None:
    first, other = pool.run(_lines, 2, host, tmp_path, "on")
    assert other == []
    assert first[-1].startswith("shardplug: planned peak ") and "per rank, in " in first[-1]
    assert f"micro-batches per step: {MICRO_BATCHES}," in first[-1]
    # Who cannot know the window before the first step says it again.
    assert len(first) == (2 if host in (_plain_fabric, _plain_trainer) else 1), first
    assert first[-1].endswith("replaces the line above: the first step had them") == (
        len(first) == 2
    )
    assert not list(tmp_path.rglob("plan.json")) or host is _lightning_with_a_curve


@pytest.mark.parametrize("host", [_plain_accelerate, _plain_lightning])
def test_a_plan_that_is_not_wanted_is_not_made(pool: RankPool, tmp_path: Path, host: Any) -> None:
    assert pool.run(_lines, 2, host, tmp_path, "off") == [[], []]
