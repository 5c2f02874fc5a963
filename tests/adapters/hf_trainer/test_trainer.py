"""An ordinary Trainer under the engine: losses, norms, evaluations and tokens of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardplug.checkpoint import inspect
from shardplug.hf import from_pretrained
from tests.adapters.hf_trainer.common import Generate, build, launched, run
from tests.support.pool import RankPool

TRAINER_FOLDER = "pytorch_model_fsdp_and_optimizer"


def train(out: Path, strategy: str, base: Path | None) -> dict[str, Any]:
    import torch.distributed as dist

    os.environ["SHARDPLUG_NVME_PATH"] = str(out)  # read by the strategy that swaps to files
    with launched(strategy):
        model = build() if base is None else from_pretrained(base).train()
        on_meta = next(model.parameters()).is_meta
        result = run(
            out,
            model,
            evaluate=True,
            save=True,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )
        return {**result, "on_meta": on_meta}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process, a stock Trainer, the whole batch."""
    out = tmp_path_factory.mktemp("alone")
    build().save_pretrained(out / "base")
    model = build()
    result = run(out, model, evaluate=True, save=True)
    other = Generate(1)
    other.on_evaluate(None, None, None, model)
    return {**result, "out": out, "tokens_of_rank_1": other.tokens[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the sharded runs write."""
    return tmp_path_factory.mktemp("sharded")


@pytest.mark.parametrize(
    ("strategy", "streamed"),
    [("zero1", False), ("zero2", True), ("zero3", False), ("zero3_infinity", True)],
)
def test_losses_evaluations_and_tokens_equal_one_process(
    strategy: str, streamed: bool, alone: dict[str, Any], pool: RankPool, folder: Path
) -> None:
    base = alone["out"] / "base" if streamed else None
    found = pool.run(train, 2, folder / strategy, strategy, base)
    assert alone["class"] == "Accelerator" and alone["sharded"] == 0
    for result in found:
        assert result["class"] == "TrainerAccelerator" and result["sharded"] > 10
        assert result["on_meta"] == streamed
        assert list(result["losses"]) == [1, 2, 3, 4, 5, 6]
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-5)
        assert len(result["evaluations"]) == 4
        assert result["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-5)
        assert (result["before"], result["after"]) == pytest.approx(
            (alone["before"], alone["after"]), rel=1e-5
        )
        assert result["predictions"] == alone["predictions"] and result["predictions"]
        assert Path(result["best"]).name == Path(alone["best"]).name == "checkpoint-2"
        assert result["after"] == pytest.approx(result["evaluations"][0], rel=1e-6)  # loaded again
        assert result["evaluations"][2] < result["after"] - 0.01
    assert found[0]["tokens"] == alone["tokens"] and len(alone["tokens"][0]) > 4
    assert found[1]["tokens"][-1] == alone["tokens_of_rank_1"]


def test_saved_model_loads_with_from_pretrained(alone: dict[str, Any], folder: Path) -> None:
    out = folder / "zero3"  # written by the test above
    for name in ("final", "checkpoint-2"):
        model, info = AutoModelForCausalLM.from_pretrained(out / name, output_loading_info=True)
        assert not any(info.values())
        expected = AutoModelForCausalLM.from_pretrained(alone["out"] / name).state_dict()
        state = model.state_dict()
        assert state.keys() == expected.keys() and len(state) > 10
        for key in expected:
            torch.testing.assert_close(state[key], expected[key], rtol=0, atol=2e-6)
    checkpoint = {path.name for path in (out / "checkpoint-2").iterdir()}
    assert {"config.json", "model.safetensors", "scheduler.pt", "trainer_state.json"} <= checkpoint
    assert {TRAINER_FOLDER, "rng_state_0.pth", "rng_state_1.pth"} <= checkpoint
    info = inspect(out / "checkpoint-2" / TRAINER_FOLDER)
    assert (info.step, info.stage, info.world_size) == (2, 3, 2)
