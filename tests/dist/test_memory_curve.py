"""What the ranks really hold, against the formulas, against the tensors alive, and in W&B."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core.gathered.writes import _AtGather
from shardplug.core.ranks.channel import _TEXT_BYTES
from shardplug.memory import (
    KINDS,
    MODEL_STATE_KINDS,
    PHASES,
    ElementBytes,
    JsonlSink,
    MemoryTracker,
    Moment,
    PngSink,
    WandbSink,
    model_states,
    read_jsonl,
)
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool
from tests.unit.memory.wandb_file import read_history

MICRO_BATCHES = 3


def _micro_batch(engine: ZeroEngine, model: torch.nn.Module, step: int, micro: int) -> None:
    with engine.micro_step(last=micro == MICRO_BATCHES - 1):
        batch = tokens(step, micro, engine.rank)
        loss = lm_loss(model(batch), batch)
        (loss / MICRO_BATCHES).backward()
        del batch, loss  # only what the engine keeps is alive at the end of the backward


def _train(
    engine: ZeroEngine, model: torch.nn.Module, steps: int, note: Callable[[Moment], None]
) -> None:
    """Train with AdamW and call `note` at each moment of each step."""
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    position = {"step": 0, "micro": 0}

    def listen(phase: str) -> None:
        stepped = position["step"] > 0 or phase == "after_step"
        micro = position["micro"]
        note(
            Moment(
                phase=phase,  # type: ignore[arg-type]
                first=micro == 0,
                last=micro == MICRO_BATCHES - 1,
                stepped=stepped,
            )
        )

    engine.add_phase_listener(listen)
    for step in range(steps):
        position["step"] = step
        for micro in range(MICRO_BATCHES):
            position["micro"] = micro
            _micro_batch(engine, model, step, micro)
        optimizer.step()
        optimizer.zero_grad()
        note(Moment(phase="at_rest"))
    engine.remove_phase_listener(listen)


def _compare_with_formulas(config: ZeroConfig, sizes: ElementBytes) -> int:
    model = TinyLM()
    shapes = [tuple(p.shape) for p in model.parameters()]
    engine = ZeroEngine(config)
    engine.shard(model)
    num_compared = 0

    def compare(moment: Moment) -> None:
        nonlocal num_compared
        states = model_states(
            shapes,
            config.stage,
            engine.shard_size,
            moment,
            sizes,
            shard=engine.rank % engine.shard_size,
        )
        expected = {
            kind: int(states.exact[kind]) + states.padding[kind] for kind in MODEL_STATE_KINDS
        }
        if moment.stepped:
            # AdamW counts its steps in 4 bytes per parameter tensor.
            expected["optimizer_state"] += 4 * len(shapes)
        assert engine.memory() == {**expected, "snapshot": 0}, moment
        num_compared += len(expected)

    _train(engine, model, 2, compare)
    return num_compared


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_books_equal_the_formulas_in_fp32(pool: RankPool, stage: int, world_size: int) -> None:
    config = ZeroConfig(stage=stage)  # type: ignore[arg-type]
    counts = pool.run(_compare_with_formulas, world_size, config, ElementBytes())
    moments_per_step = 2 * MICRO_BATCHES + 2
    assert counts == [2 * moments_per_step * len(MODEL_STATE_KINDS)] * world_size


def test_books_equal_the_formulas_with_replicas(pool: RankPool) -> None:
    config = ZeroConfig(stage=2, replicate_size=2)
    assert min(pool.run(_compare_with_formulas, 4, config, ElementBytes())) > 0


@pytest.mark.parametrize(("stage", "reduce"), [(1, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32")])
def test_books_equal_the_formulas_in_bf16(pool: RankPool, stage: int, reduce: str) -> None:
    config = ZeroConfig(stage=stage, param_dtype="bf16", reduce_dtype=reduce)  # type: ignore[arg-type]
    sizes = ElementBytes(compute=2, reduce=4 if reduce == "fp32" else 2)
    assert min(pool.run(_compare_with_formulas, 2, config, sizes)) > 0


def _live_bytes() -> int:
    """Bytes of the tensor storages that Python can reach and that are not frozen.

    Without the messages in which the ranks compare their collectives: codes, one for each rank,
    and the text of a failure. And without the sums that tell whether a gathered copy was written
    to, at most 1/64 of the rank's rows.
    """
    gc.collect()
    kept = [thing for thing in gc.get_objects() if type(thing) is _AtGather]
    sums = {id(part) for thing in kept for part in (*(thing.rows or ()), *(thing.shard or ()))}
    codes, text = range(dist.get_world_size() + 1), (_TEXT_BYTES,)
    messages = {torch.int64: codes, torch.uint8: text}
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        # type(), as isinstance() asks proxies for their class, and some warn then
        if not issubclass(type(thing), torch.Tensor) or issubclass(type(thing), DTensor):
            continue
        if id(thing) in sums:
            continue
        if thing.ndim == 1 and thing.numel() in messages.get(thing.dtype, ()):
            continue
        # Python may have no object for a gradient that nothing looked at yet.
        grad = thing.grad if thing.is_leaf else None
        for tensor in (thing, grad):
            if tensor is not None and tensor.device.type != "meta":  # no memory, whatever its size
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _compare_with_live_tensors(stage: int) -> list[tuple[Moment, int]]:
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    gc.collect()
    gc.freeze()  # what is there already is left out, and the walks are quick
    try:
        model = engine.shard(TinyLM())
        seen: list[tuple[Moment, int]] = []

        def compare(moment: Moment) -> None:
            if moment.phase == "after_forward":
                return  # activations are alive too
            for _ in range(100):
                in_no_book = _live_bytes() - sum(engine.memory().values())
                if in_no_book == 0:
                    break
                time.sleep(0.02)  # gloo's threads let go of a finished collective's tensors
            seen.append((moment, in_no_book))

        _train(engine, model, 2, compare)
    finally:
        gc.unfreeze()
    return seen


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_books_are_all_the_tensors_there_are(pool: RankPool, stage: int) -> None:
    for seen in pool.run(_compare_with_live_tensors, 2, stage):
        assert len(seen) == 2 * (MICRO_BATCHES + 2)
        for moment, in_no_book in seen:
            assert in_no_book == 0, moment


def _track(folder: Path, stage: int) -> tuple[int, dict[str, int]]:
    """Train with every sink; return the peak, and what this rank holds after a step."""
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = engine.shard(TinyLM())
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    run = None
    if engine.rank == 0:
        import wandb

        run = wandb.init(project="memory", dir=folder)
    sinks = [
        JsonlSink(folder / "memory.jsonl"),
        PngSink(folder / "memory.png", title=f"ZeRO stage {stage}"),
        WandbSink(run),  # type: ignore[arg-type]  # used on rank 0 only
    ]
    tracker = MemoryTracker(engine, sinks)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(3):
        for micro in range(MICRO_BATCHES):
            _micro_batch(engine, model, step, micro)
        optimizer.step()
        optimizer.zero_grad()
        if run is not None:
            run.log({"loss": float(step)}, step=step)
    tracker.close()
    if run is not None:
        run.finish()
    parameters = [p.detach() for p in model.parameters()]
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
    moments = 2 * sum(part.nbytes for part in local)
    held = {
        "master_shards": sum(part.untyped_storage().nbytes() for part in local),
        "gathered": 0,
        "optimizer_state": moments + 4 * len(local),  # AdamW counts its steps in 4 bytes
    }
    return tracker.peak_bytes, held


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_one_run_holds_every_kind_of_every_rank(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    pytest.importorskip("wandb")
    peaks, held = zip(*pool.run(_track, world_size, tmp_path, 1), strict=True)
    rows = read_jsonl(tmp_path / "memory.jsonl")
    assert len(rows) == 3 * len(PHASES) * world_size
    assert {row.rank for row in rows} == set(range(world_size))
    last_peak = max(row.peak_bytes for row in rows if row.step == 3)
    assert peaks == (last_peak,) * world_size  # the highest of all ranks, on every rank
    for row in rows:
        if row.phase == "after_step":
            kinds = {kind: row.by_kind[kind] for kind in held[row.rank]}
            assert kinds == held[row.rank] and kinds["optimizer_state"] > 4
    assert (tmp_path / "memory.png").stat().st_size > 20_000

    history = read_history(tmp_path)  # asserts that there is one run
    found = {row["memory/step"]: row for row in history if "memory/step" in row}
    assert sorted(found) == [1, 2, 3]
    assert [row["loss"] for row in history if "loss" in row] == [0.0, 1.0, 2.0]
    for row in rows:
        for kind in KINDS:
            logged = found[row.step][f"memory_rank{row.rank}/{row.phase}/{kind}_gib"]
            assert logged == pytest.approx(row.by_kind[kind] / 2**30)


def _fit(folder: Path, name: str, fail_after: int | None, resume: str | None) -> int:
    """Fit with a W&B logger built on every rank; loss, validation and memory log at once."""
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.loggers import WandbLogger

    from shardplug.lightning import MemoryCurve
    from tests.adapters.lightning import modules

    class Fail(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == fail_after:
                raise RuntimeError("failed on purpose")

    class Logged(modules.Plain):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.log("loss", loss)
            return loss

    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    (folder / name).mkdir(exist_ok=True)
    logger = WandbLogger(project="memory", save_dir=folder / name)
    keep = ModelCheckpoint(folder / "kept", "{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = modules.trainer(
        logger=logger,
        callbacks=[MemoryCurve(folder / "memory"), Fail(), keep],
        enable_checkpointing=True,
        max_epochs=1,
        log_every_n_steps=1,
        val_check_interval=3,
    )
    loader = modules.in_order(batch_size=1, size=8 * modules.world_size())
    path = None if resume is None else folder / "kept" / resume
    try:
        trainer.fit(modules.build(Logged), loader, loader, ckpt_path=path)
    except RuntimeError as error:
        assert "failed on purpose" in str(error)
    if trainer.is_global_zero:
        logger.experiment.finish()
    return int(trainer.global_step)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_lightning_logs_once_and_loses_nothing_over_a_resume(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    pytest.importorskip("wandb")
    pytest.importorskip("lightning")
    assert pool.run(_fit, world_size, tmp_path, "first", 6, None) == [6] * world_size
    assert pool.run(_fit, world_size, tmp_path, "again", None, "step=4.ckpt") == [8] * world_size

    # The failure in step 6 comes before Lightning logs that step's loss.
    for name, steps, num_losses in (("first", [1, 2, 3, 4, 5, 6], 5), ("again", [5, 6, 7, 8], 4)):
        history = read_history(tmp_path / name)  # asserts that there is one run for all ranks
        memory = [row for row in history if "memory/step" in row]
        assert [row["memory/step"] for row in memory] == steps
        for row in memory:
            for rank in range(world_size):
                kinds = {f"memory_rank{rank}/{p}/{k}_gib" for p in PHASES for k in KINDS}
                assert kinds < set(row)
        losses = [row["trainer/global_step"] + 1 for row in history if "loss" in row]
        assert losses == steps[:num_losses]
        assert any("val_loss" in row for row in history)
    rows = read_jsonl(tmp_path / "memory" / "memory.jsonl")
    assert sorted({row.step for row in rows}) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(rows) == 8 * len(PHASES) * world_size
