"""The LoRA recipe: trains, resumes, and writes an adapter that an unsharded base takes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.pool import RankPool

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "finetune_lora.py"

pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(out: Path, *arguments: str) -> str:
    """Run the recipe on two CPU ranks, small, and return what it printed."""
    small = ["--seq_length", "32", "--held_out_rows", "16", "--micro_batch", "2"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [
            sys.executable,
            str(RECIPE),
            *small,
            "--accelerator",
            "cpu",
            "--out",
            str(out),
            *arguments,
        ],
        capture_output=True,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def in_resident_ranks(options: dict[str, Any]) -> None:
    sys.path.insert(0, str(ROOT / "recipes"))
    recipe = importlib.import_module("finetune_lora")
    recipe.main(recipe.Options(accelerator="cpu", devices=2, **options))


def test_adapter_of_a_resumed_run(tmp_path: Path, pool: RankPool) -> None:
    small = {"seq_length": 32, "held_out_rows": 16, "micro_batch": 2}
    pool.run(in_resident_ranks, 2, {**small, "out": str(tmp_path), "steps": 4})
    printed = run(tmp_path, "--steps", "8", "--resume", "true", "--stage", "2")
    assert (tmp_path / "checkpoints" / "step-00008.ckpt").is_dir()
    losses = re.search(r"held-out loss: ([\d.]+) before, ([\d.]+) after", printed)
    assert losses and float(losses[2]) < float(losses[1])
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 4 * 4 + 1  # A and B of four projections of four layers, the head
    assert all(tensor.numel() for tensor in adapter.values())
    assert {tensor.dtype for name, tensor in adapter.items() if "lora_" in name} == {torch.float32}
    counted = re.search(r"trained: +([\d,]+) of ([\d,]+) parameters", printed)
    assert counted
    trained, total = (int(number.replace(",", "")) for number in counted.groups())
    assert sum(tensor.numel() for tensor in adapter.values()) == trained < total / 2


def test_the_file_of_the_real_size_names_options_that_exist() -> None:
    """Parsed by the recipe itself, which stops before it would build anything."""
    file = ROOT / "recipes" / "configs" / "lora_llama3_8b.yaml"
    assert yaml.safe_load(file.read_text())["precision"] == "bf16-mixed"
    done = subprocess.run(
        [sys.executable, str(RECIPE), "--config", str(file), "--model", "./nowhere"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 2 and "no such folder" in done.stderr, done.stderr[-2000:]
