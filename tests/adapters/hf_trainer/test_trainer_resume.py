"""Trainer's checkpoints: another number of ranks and stage, exact, unfinished, damaged, foreign."""

from __future__ import annotations

import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import Reader
from shardplug.checkpoint.state.planners import LoadPlanner
from shardplug.errors import CheckpointError
from shardplug.integrations.accelerate.hf_trainer.trainer_folders import (
    FOLDER,
    last_whole_checkpoint,
)
from tests.adapters.hf_trainer.common import build, launched, run
from tests.support.pool import RankPool


def train(
    out: Path,
    strategy: str,
    *,
    resume: str | bool | None = None,
    dropout: float = 0.0,
    tied: bool = True,
    seed: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    import torch.distributed as dist

    os.environ["SHARDPLUG_NVME_PATH"] = str(out)  # read by the strategy that swaps to files
    with launched(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = build(tied=tied, seed=seed, attention_dropout=dropout)
        try:
            with tensors_read() as reads:
                result = run(out, model, resume=resume, world_size=dist.get_world_size(), **changes)
        except (CheckpointError, FileNotFoundError) as error:
            return {"error": str(error)}
        state = {n: p.full_tensor() for n, p in model.state_dict().items()}
        said = [str(w.message) for w in caught]
        return result | {"state": state, "warnings": said, "reads": dict(reads)}


@contextmanager
def tensors_read() -> Iterator[Counter[str]]:
    """Count the elements that are read of each tensor of a checkpoint on this rank."""
    reads: Counter[str] = Counter()

    def counting(self: LoadPlanner, item: Any, tensor: torch.Tensor) -> None:
        reads[item.dest_index.fqn] += tensor.numel()
        commit(self, item, tensor)

    commit = LoadPlanner.commit_tensor
    with mock.patch.object(LoadPlanner, "commit_tensor", counting):
        yield reads


def tail(losses: dict[int, float], after: int) -> dict[int, float]:
    return {step: loss for step, loss in losses.items() if step > after}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, pool: RankPool) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("whole")
    return out, pool.run(train, 2, out, "zero3")[0]


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "zero1"), (4, "zero2"), (2, "zero3_cpu"), (2, "zero3_infinity")]
)
def test_resuming_at_another_world_size_stage_and_tier_ends_at_the_same_weights(
    ranks: int, strategy: str, whole: Any, pool: RankPool, tmp_path: Path
) -> None:
    out, expected = whole
    resume = str(out / "checkpoint-2")
    everyone = pool.run(train, ranks, tmp_path, strategy, resume=resume, seed=9)
    resumed = everyone[0]
    # All ranks together read each tensor once: the weights, and both moments.
    reads = sum((Counter(one["reads"]) for one in everyone), Counter())
    for name, value in expected["state"].items():
        kinds = [
            f"model.{name}",
            *(f"optimizer_0.state.{name}.exp_avg{end}" for end in ("", "_sq")),
        ]
        if name != "lm_head.weight":  # tied
            assert [reads[kind] for kind in kinds] == [value.numel()] * 3, name
    losses = tail(expected["losses"], 2)
    assert len(losses) == 4
    # The first steps are in the log that was saved; those that follow are this run's.
    assert tail(resumed["losses"], 2) == pytest.approx(losses, rel=1e-5)
    assert len(resumed["state"]) > 10
    for name, value in expected["state"].items():
        torch.testing.assert_close(resumed["state"][name], value, rtol=0, atol=1e-6)


def test_resuming_is_bit_equal_with_dropout(pool: RankPool, tmp_path: Path) -> None:
    whole = pool.run(train, 2, tmp_path, "zero2", dropout=0.2)[0]
    (tmp_path / "checkpoint-6").rename(tmp_path / "other")
    (tmp_path / "checkpoint-4").rename(tmp_path / "another")
    resumed = pool.run(train, 2, tmp_path, "zero2", dropout=0.2, resume=True, seed=9)[0]
    assert resumed["losses"] == whole["losses"] and len(whole["losses"]) == 6
    assert all(resumed["state"][n].equal(v) for n, v in whole["state"].items())


def test_unfinished_and_damaged_checkpoints_are_passed_over_or_named(
    whole: Any, pool: RankPool, tmp_path: Path
) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-4" / FOLDER / "manifest.json").unlink()
    found = pool.run(train, 2, tmp_path, "zero3", resume=str(tmp_path / "checkpoint-6"))
    for result in found:
        assert "checkpoint-6/trainer_state.json" in result["error"]  # Trainer's own
    found = pool.run(train, 2, tmp_path, "zero3", resume=str(tmp_path / "checkpoint-4"))
    for result in found:
        assert f"{FOLDER}" in result["error"]
        assert f'resume_from_checkpoint="{tmp_path / "checkpoint-2"}"' in result["error"]
    resumed = pool.run(train, 2, tmp_path, "zero3", resume=True, seed=9)
    assert resumed[0]["losses"] == pytest.approx(whole[1]["losses"], rel=1e-5)
    assert resumed[0]["steps"] == whole[1]["steps"] == max(whole[1]["losses"])
    told = [text for text in resumed[0]["warnings"] if "Passed over" in text]
    assert len(told) == 1 and "checkpoint-6" in told[0] and "checkpoint-4" in told[0]
    assert not [text for text in resumed[1]["warnings"] if "Passed over" in text]


def test_no_whole_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    assert last_whole_checkpoint(str(tmp_path)) is None


def test_a_checkpoint_of_an_unsharded_trainer_is_refused_by_name(
    pool: RankPool, tmp_path: Path
) -> None:
    run(tmp_path / "alone", build(), max_steps=2, save_steps=1)
    path = str(tmp_path / "alone" / "checkpoint-2")
    for result in pool.run(train, 2, tmp_path / "sharded", "zero3", resume=path):
        assert "optimizer.pt of a Trainer that does not shard" in result["error"]
        assert f'from_pretrained("{path}")' in result["error"]
        assert "checkpoint-1" not in result["error"], "it would not resume either"


def test_without_whole_files_the_export_is_named(
    whole: Any, pool: RankPool, tmp_path: Path
) -> None:
    found = pool.run(sharded_files_only, 2, tmp_path)
    told = [[text for text in r["warnings"] if "shardplug export" in text] for r in found]
    assert len(told[0]) == 3 and not told[1]
    assert not list(tmp_path.rglob("*.safetensors"))
    assert found[0]["losses"] == whole[1]["losses"]


def sharded_files_only(out: Path) -> dict[str, Any]:
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    return train(out, "zero3")


def engine_reads(path: Path) -> float:
    engine = ZeroEngine(ZeroConfig(stage=1))
    model = engine.shard(build(seed=4))
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    engine.load(path / FOLDER, optimizers=[])
    assert Reader(path / FOLDER).num_optimizers == 1 and optimizer.param_groups
    return float(model.model.norm.weight.full_tensor().double().sum())


def test_a_plain_engine_reads_trainers_checkpoint(whole: Any, pool: RankPool) -> None:
    found = pool.run(engine_reads, 2, whole[0] / "checkpoint-6")
    expected = float(whole[1]["state"]["model.norm.weight"].double().sum())
    assert found == [expected, expected]


def as_plain_accelerate_saves(out: Path, kind: str) -> dict[str, Any]:
    """Write checkpoints with Accelerate's own functions, which Trainer calls where FSDP2 shards."""
    import torch.distributed as dist
    import transformers.trainer
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    os.environ["FSDP_STATE_DICT_TYPE"] = kind
    with launched("zero3"):
        transformers.trainer.save_fsdp_model = save_fsdp_model
        transformers.trainer.save_fsdp_optimizer = save_fsdp_optimizer
        return run(out, build(), world_size=dist.get_world_size())


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_a_checkpoint_of_plain_accelerate_is_resumed(
    kind: str, whole: Any, pool: RankPool, tmp_path: Path
) -> None:
    pool.run(as_plain_accelerate_saves, 2, tmp_path, kind)
    path = tmp_path / "checkpoint-2"
    assert not (path / FOLDER).exists() and list(path.glob("pytorch_model_fsdp*"))
    found = pool.run(resume_of_kind, 2, tmp_path / "next", str(path), kind)
    losses = tail(found[0]["losses"], 2)
    assert losses == pytest.approx(tail(whole[1]["losses"], 2), rel=1e-5) and len(losses) == 4


def resume_of_kind(out: Path, path: str, kind: str) -> dict[str, Any]:
    os.environ["FSDP_STATE_DICT_TYPE"] = kind
    return train(out, "zero2", resume=path, seed=9)
