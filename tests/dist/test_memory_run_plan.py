"""The plan that a run makes of itself, held against what its ranks then hold."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import (
    MODEL_STATE_KINDS,
    PHASES,
    JsonlSink,
    MemoryTracker,
    PlanSink,
    PngSink,
    RunPlan,
)
from shardplug.plan.run.run_plan import predicted_model_states, predicted_phases
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

MICRO_BATCHES = 2
STEPS = 3


class Follower(TinyLM):
    """Decides by a value it computes, which a trace does not have."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = super().forward(tokens)
        return logits * 2 if float(logits.detach().sum()) > 0 else logits


class Counter(TinyLM):
    """Writes to a tensor that is neither parameter nor buffer, nor made in the step."""

    seen = torch.zeros(())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        Counter.seen.add_(1)
        return super().forward(tokens)


def _adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-3)]


def _momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)]


def _centered(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, centered=True)]


def _two(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Two classes, and parameters that no optimizer has."""
    named = dict(model.named_parameters())
    down = [p for name, p in named.items() if "down" in name]
    rest = [p for name, p in named.items() if "down" not in name and "norm" not in name]
    return [torch.optim.SGD(down, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3, amsgrad=True)]


Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


def _run(
    folder: Path,
    config: ZeroConfig,
    model_class: type[TinyLM],
    make: Optimizers,
    plan: Any,
    keep: int = 0,
) -> tuple[RunPlan | None, list[float], list[str]]:
    """Train with a tracker; return the plan, the losses and what was warned of."""
    torch.manual_seed(0)
    engine = ZeroEngine(config)
    model = engine.shard(model_class(tied=True))
    optimizers = [engine.prepare_optimizer(optimizer) for optimizer in make(model)]
    tracker = MemoryTracker(engine, [JsonlSink(folder / "memory.jsonl")], plan=plan)
    kept, losses = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                with engine.micro_step(last=micro == MICRO_BATCHES - 1):
                    batch = tokens(step, micro, engine.rank)
                    loss = lm_loss(model(batch), batch)
                    if keep and engine.rank == engine.world_size - 1:
                        kept.append(torch.ones(keep, dtype=torch.uint8))
                    loss.backward()
                    losses.append(float(loss.detach()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        tracker.close()
    ours = ("plan", "rank", "Rank")
    return (
        tracker.plan,
        losses,
        [m for w in caught if any(o in (m := str(w.message)) for o in ours)],
    )


def _books_are_the_plans(folder: Path, plan: RunPlan, world_size: int) -> int:
    """Compare each rank's accounts of the last step with its plan, to the byte."""
    rows = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] == STEPS]
    assert len(rows) == world_size * len(PHASES)
    for row in rows:
        planned = predicted_model_states(plan.walk_of(row["rank"]))[row["phase"]]
        for kind in MODEL_STATE_KINDS:
            assert row[f"{kind}_bytes"] == planned[kind], (row["rank"], row["phase"], kind)
            assert row[f"predicted_{kind}_bytes"] == planned[kind]
        assert row["predicted_peak_bytes"] == plan.walk_of(row["rank"]).peak.total
    return len(rows)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_ranks_books_are_its_plan(
    pool: RankPool, tmp_path: Path, stage: int, world_size: int
) -> None:
    config = ZeroConfig(stage=stage)  # type: ignore[arg-type]
    ranks = pool.run(_run, world_size, tmp_path, config, TinyLM, _adamw, "auto")
    plan = ranks[0][0]
    assert plan is not None and plan.traced and plan.accumulate == MICRO_BATCHES
    assert plan.flops > 0 and plan.work.tokens == 18
    assert all(other == plan for other, _, _ in ranks), "the same on every rank"
    assert [said for _, _, said in ranks] == [[]] * world_size
    assert _books_are_the_plans(tmp_path, plan, world_size) > 0
    written = json.loads((tmp_path / "plan.json").read_text())
    assert (written["traced"], written["accumulate"]) == (True, MICRO_BATCHES)


@pytest.mark.parametrize("world_size", [1, 2])
def test_books_of_parameters_in_files_are_the_plan(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    config = ZeroConfig.preset("zero3_infinity", nvme_path=str(tmp_path))
    ranks = pool.run(_run, world_size, tmp_path, config, TinyLM, _adamw, "auto")
    plan = ranks[0][0]
    assert plan is not None and plan.traced
    assert not any("tier" in note or "rest in" in note for note in plan.notes)
    assert _books_are_the_plans(tmp_path, plan, world_size) > 0


@pytest.mark.parametrize("make", [_momentum, _centered])
def test_optimizers_of_other_classes_are_looked_at(
    pool: RankPool, tmp_path: Path, make: Optimizers
) -> None:
    (plan, _, said), _ = pool.run(_run, 2, tmp_path, ZeroConfig(stage=3), TinyLM, make, "auto")
    assert plan is not None and said == []
    assert _books_are_the_plans(tmp_path, plan, 2) > 0


def _two_states() -> tuple[int, int]:
    """Optimizer state of two optimizers with parameters of their own: planned, and held."""
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(TinyLM())
    optimizers = [engine.prepare_optimizer(optimizer) for optimizer in _two(model)]
    tracker = MemoryTracker(engine)
    batch = tokens(0, 0, engine.rank)
    with engine.micro_step():
        lm_loss(model(batch), batch).backward()
    for optimizer in optimizers:
        optimizer.step()
    tracker.close()
    planned = tracker.plan.walk_of(engine.rank).phases["at_rest"]["optimizer_state"]
    return planned, engine.memory()["optimizer_state"]


def test_state_of_several_optimizers_is_counted_one_by_one(pool: RankPool) -> None:
    for planned, held in pool.run(_two_states, 2):
        assert planned == held > 0


def test_a_step_that_cannot_be_traced_is_said_and_its_states_are_exact(
    pool: RankPool, tmp_path: Path
) -> None:
    config = ZeroConfig(stage=2)
    (plan, _, said), _ = pool.run(_run, 2, tmp_path, config, Follower, _adamw, "auto")
    assert plan is not None and not plan.traced
    (message,) = said
    assert "The step could not be traced" in message and "value" in message
    assert _books_are_the_plans(tmp_path, plan, 2) > 0
    assert "factor of 2" in json.loads((tmp_path / "plan.json").read_text())["notes"][0]


def _count(folder: Path) -> tuple[str, float]:
    Counter.seen.zero_()
    plan, _, _ = _run(folder, ZeroConfig(stage=3), Counter, _adamw, "auto")
    assert plan is not None
    return plan.failure, float(Counter.seen)


def test_a_step_that_writes_elsewhere_is_not_traced(pool: RankPool, tmp_path: Path) -> None:
    for failure, seen in pool.run(_count, 2, tmp_path):
        assert "writes to a tensor" in failure
        assert seen == STEPS * MICRO_BATCHES


def _flops(folder: Path, checkpointing: bool) -> tuple[int, int, bool]:
    config = ZeroConfig(stage=3, activation_checkpointing=checkpointing)
    plan, _, _ = _run(folder, config, TinyLM, _adamw, "auto")
    assert plan is not None
    return plan.flops, plan.walks[0].phases["after_forward"]["activations"], plan.traced


def test_what_is_computed_again_is_no_operation_of_the_model(
    pool: RankPool, tmp_path: Path
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    ((plain, kept, traced),) = pool.run(_flops, 1, tmp_path, False)
    ((again, fewer, traced_too),) = pool.run(_flops, 1, tmp_path, True)
    assert traced and traced_too and fewer < kept
    model, batch = TinyLM(tied=True), tokens(0, 0, 0)
    with FlopCounterMode(display=False) as counter:
        lm_loss(model(batch), batch).backward()
    assert plain == again == counter.get_total_flops() > 0


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_parameters_in_cpu_memory_are_planned(pool: RankPool, tmp_path: Path, tier: str) -> None:
    config = ZeroConfig(
        stage=3,
        offload_optimizer=tier,  # type: ignore[arg-type]
        offload_params="cpu",
        nvme_path=str(tmp_path) if tier == "nvme" else None,
    )
    for plan, _, said in pool.run(_run, 2, tmp_path, config, TinyLM, _adamw, "auto"):
        assert plan is not None and plan.traced and said == []
        assert not any("CPU memory" in note for note in plan.notes)
    rows = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    compared = 0
    for row in rows:
        if row["step"] == STEPS:
            planned = predicted_phases(plan.walk_of(row["rank"]))[row["phase"]]
            for kind in (*MODEL_STATE_KINDS, "master_shards_cpu", "gradients_cpu"):
                assert row[f"{kind}_bytes"] == planned[kind], (row["rank"], row["phase"], kind)
                compared += planned[kind] > 0
    assert compared > 2 * len(PHASES)


def test_training_is_the_same_with_and_without(pool: RankPool, tmp_path: Path) -> None:
    config = ZeroConfig(stage=3)
    planned = pool.run(_run, 2, tmp_path / "a", config, TinyLM, _adamw, "auto")
    without = pool.run(_run, 2, tmp_path / "b", config, TinyLM, _adamw, None)
    assert [losses for _, losses, _ in planned] == [losses for _, losses, _ in without]
    assert without[0][0] is None and not (tmp_path / "b" / "plan.json").exists()
    assert "predicted" not in (tmp_path / "b" / "memory.jsonl").read_text()


def test_a_rank_that_holds_more_is_named_within_a_step(pool: RankPool, tmp_path: Path) -> None:
    config = ZeroConfig(stage=3)
    ranks = pool.run(_run, 4, tmp_path, config, TinyLM, _adamw, "auto", 48 * 2**20)
    (said,) = [m for m in ranks[0][2] if "more than the others" in m]
    assert said.startswith("Rank 3 holds") and "of step 1" in said and "most of it other" in said


def _fit(folder: Path, module_class: Any, **options: Any) -> tuple[Any, list[str]]:
    from shardplug.lightning import MemoryCurve
    from tests.adapters.lightning import modules

    module = modules.build(module_class)
    curve = MemoryCurve(folder, picture=False)
    trainer = modules.trainer(callbacks=[curve], max_steps=STEPS, **options)
    before = random.getstate()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, modules.in_order(batch_size=2))
    same = random.getstate() == before
    said = [str(w.message) for w in caught if "plan" in str(w.message)]
    return (len(module.losses), len(module.samples), same, trainer.global_step), said


def _modules() -> tuple[Any, Any]:
    from tests.adapters.lightning import modules

    class Logging(modules.Plain):
        """Logs, keeps what it has computed, looks at its Trainer, draws numbers."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch) * (1 + self.trainer.current_epoch)
            self.log("loss", loss, sync_dist=True)
            self.losses.append(float(loss.detach()))
            self.samples.append([index])
            random.random()
            random.seed(index)
            return loss

    class Talking(modules.Plain):
        """Sends a message in its step."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            dist.all_reduce(loss.detach().clone())
            return loss

    return Logging, Talking


def _fit_logging(folder: Path, which: int) -> Any:
    return _fit(folder, _modules()[which])


def test_lightning_traces_the_users_step_and_leaves_no_trace(
    pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    (counts, said), (other, _) = pool.run(_fit_logging, 2, tmp_path, 0)
    assert counts == other and counts[:2] == (STEPS, STEPS) and counts[3] == STEPS
    assert said == []
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["traced"] and "values that the step reads" in written["notes"][0]
    rows = [json.loads(line) for line in (tmp_path / "memory.jsonl").read_text().splitlines()]
    last = [row for row in rows if row["step"] == STEPS]
    assert len(last) == 2 * len(PHASES)
    for row in last:
        for kind in MODEL_STATE_KINDS:
            assert row[f"{kind}_bytes"] == row[f"predicted_{kind}_bytes"], (row["phase"], kind)


def test_a_step_that_sends_messages_is_not_traced_and_does_not_hang(
    pool: RankPool, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    (counts, said), (other, _) = pool.run(_fit_logging, 2, tmp_path, 1)
    assert counts[3] == other[3] == STEPS
    (message,) = said
    assert "could not be traced" in message
    assert not json.loads((tmp_path / "plan.json").read_text())["traced"]


def _uneven_options(folder: Path) -> tuple[int, bool]:
    """Only rank 0 has a plan from before the run, and a sink."""
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    first = MemoryTracker(engine)
    for step in range(4):
        if step == 2:  # the first tracker's plan goes on in a second one
            given = first.plan
            first.close()
            assert given is not None
            sinks = [PlanSink(given, folder, compare_peak=False, picture=False)]
            second = MemoryTracker(engine, sinks if engine.rank == 0 else [])
        batch = tokens(step, 0, engine.rank)
        lm_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    second.close()
    return second.step, second.plan == given


def test_options_that_differ_between_ranks_do_not_hang(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(_uneven_options, 2, tmp_path) == [(2, True)] * 2
    assert (tmp_path / "plan.json").exists()


def test_pictures_show_both(pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pool.run(_draw, 2, tmp_path)
    for name in ("memory.png", "plan.png"):
        assert (tmp_path / name).stat().st_size > 20_000


def _draw(folder: Path) -> None:
    engine = ZeroEngine(ZeroConfig(stage=1))
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    tracker = MemoryTracker(engine, [PngSink(folder / "memory.png")])
    for step in range(2):
        batch = tokens(step, 0, engine.rank)
        lm_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    tracker.close()
