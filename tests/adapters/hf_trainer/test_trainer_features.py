"""Parts of Trainer beside the ordinary run: W&B with memory, other losses and data, two fits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import Trainer

from shardplug.hf import MemoryCurve
from tests.adapters.hf_trainer.common import arguments, build, launched, rows, run
from tests.support.activations import small_ones_move
from tests.support.pool import RankPool
from tests.unit.memory.wandb_file import read_history


def with_wandb(out: Path) -> dict[str, Any]:
    import torch.distributed as dist
    import wandb

    os.environ.update(WANDB_MODE="offline", WANDB_DIR=str(out), WANDB_SILENT="true")
    curve = MemoryCurve()
    with launched("zero2"):
        result = run(
            out,
            build(),
            world_size=dist.get_world_size(),
            callbacks=(curve,),
            report_to="wandb",
            save_strategy="no",
        )
        assert curve.jsonl_path is not None and curve.png_path is not None
        if wandb.run is not None:
            wandb.finish()
    return result


@pytest.mark.timeout(200)
def test_wandb_has_the_losses_and_the_memory_of_every_rank(pool: RankPool, tmp_path: Path) -> None:
    found = pool.run(with_wandb, 2, tmp_path)
    history = read_history(tmp_path / "wandb")
    losses = {row["train/global_step"]: row["train/loss"] for row in history if "train/loss" in row}
    assert losses == pytest.approx(found[0]["losses"]) and len(losses) == 6
    memory = [row for row in history if "memory/step" in row]
    assert [row["memory/step"] for row in memory] == [1, 2, 3, 4, 5, 6]
    for rank in (0, 1):
        assert all(row[f"memory_rank{rank}/after_step/master_shards_gib"] > 0 for row in memory)
    rows_written = (tmp_path / "memory" / "memory.jsonl").read_text().splitlines()
    assert {(json.loads(row)["step"], json.loads(row)["rank"]) for row in rows_written} == {
        (step, rank) for step in range(1, 7) for rank in (0, 1)
    }
    assert (tmp_path / "memory" / "memory.png").read_bytes().startswith(b"\x89PNG")


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from rows()


def summed(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """A loss of one's own, over all tokens of the step."""
    loss = torch.nn.functional.cross_entropy(
        outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
    )
    return loss / num_items_in_batch


def other_ways(out: Path, world_size: int) -> dict[str, Any]:
    """Several short fits, each with another part of Trainer."""
    found: dict[str, Any] = {}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "stream": ({}, {"train_dataset": Stream()}),
        "own loss": ({}, {"compute_loss_func": summed}),
        "label smoothing": ({"label_smoothing_factor": 0.1}, {}),
        "checkpointing": ({"activation_checkpointing": True, "weight_decay": 0.1}, {}),
        "sync each": (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
            {},
        ),
        "own optimizer": (
            {"max_grad_norm": 0.0},
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})},
        ),
    }
    for name, (changes, options) in ways.items():
        settings = arguments(out, world_size, save_strategy="no", max_steps=3, **changes)
        model = build(tied=name != "own loss")
        options = {"train_dataset": rows(), **options}
        trainer = Trainer(model=model, args=settings, **options)
        trainer.train()
        first = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        if name == "sync each":  # a second fit with the same Trainer
            trainer.train()
            first += [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        found[name] = [(entry["loss"], entry["grad_norm"]) for entry in first]
        trainer.evaluate(rows(8))
        whole = [p for p in model.parameters() if isinstance(p.data, DTensor) != (world_size > 1)]
        found[f"{name}: at rest"] = not whole
    return found


def with_activations_away(out: Path) -> list[list[tuple[float, float]]]:
    """Trainer's own checkpointing and none, with and without the offload."""
    found = []
    with small_ones_move():
        for recompute, place in product((False, True), ("none", "cpu")):
            with launched(f"zero3,offload_activations={place}"):
                settings = arguments(
                    out, 2, save_strategy="no", max_steps=3, activation_checkpointing=recompute
                )
                trainer = Trainer(model=build(), args=settings, train_dataset=rows())
                trainer.train()
                moved = trainer.accelerator.engine.traffic()["bytes_read"]
                assert (moved > 0) == (place == "cpu")
                history = [e for e in trainer.state.log_history if "grad_norm" in e]
                found.append([(entry["loss"], entry["grad_norm"]) for entry in history])
    return found


def test_activations_in_cpu_memory(pool: RankPool, tmp_path: Path) -> None:
    for there, away, there_again, away_again in pool.run(with_activations_away, 2, tmp_path):
        assert len(there) == 3
        assert there == away and there_again == away_again


def sharded_ways(out: Path) -> dict[str, Any]:
    with launched("zero3"):
        return other_ways(out, 2)


def test_other_parts_of_trainer_equal_one_process(pool: RankPool, tmp_path: Path) -> None:
    expected = other_ways(tmp_path / "alone", 1)
    for found in pool.run(sharded_ways, 2, tmp_path / "sharded"):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            if name.endswith("at rest"):
                assert found[name], name
                continue
            assert len(values) == (6 if name == "sync each" else 3)
            for pair, wanted in zip(found[name], values, strict=True):
                assert pair == pytest.approx(wanted, rel=1e-5), name
