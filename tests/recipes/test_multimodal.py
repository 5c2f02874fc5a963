"""The multimodal recipe: as printed, resumed, and its gradients where ranks skip the tower."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from transformers import LlavaForConditionalGeneration

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ScheduleError
from tests.adapters.hf_trainer.common import launched
from tests.recipes.test_recipes import ROOT, environment
from tests.support.parity import assert_close, gradients, raises_everywhere
from tests.support.pool import RankPool

RECIPE = ROOT / "recipes" / "finetune_multimodal.py"
UNITS = ("LlamaDecoderLayer",)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def load() -> Any:
    sys.path.insert(0, str(ROOT / "recipes"))
    return importlib.import_module("finetune_multimodal")


def go_on(options: dict[str, Any]) -> str:
    """Run the recipe again in a resident rank; return its error."""
    recipe = load()
    with launched("zero3,units=" + "+".join(UNITS)):
        try:
            recipe.main(recipe.Options(resume=True, **options))
        except recipe.RecipeError as error:
            return str(error)
    return ""


def rows_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def test_as_printed_with_text_alone_on_one_rank_and_resumed(tmp_path: Path, pool: RankPool) -> None:
    (line,) = re.findall(r"^ {4}accelerate launch .*$", RECIPE.read_text(), re.M)
    words = shlex.split(line)
    config = yaml.safe_load((ROOT / words[3]).read_text())["fsdp_config"]
    assert config["fsdp_transformer_layer_cls_to_wrap"] == UNITS[0]
    command = [sys.executable, "-m", "accelerate.commands.launch", *words[2:4]]
    command += ["--mixed_precision", "no", *words[4:], "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = dict(re.findall(r"^(\w+): +(.+)$", done.stdout, re.M))
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5
    # Text alone on one rank, images on the other, at several steps.
    assert sum(0 in row["images"] and sum(row["images"]) > 0 for row in rows) >= 3
    _, info = LlavaForConditionalGeneration.from_pretrained(
        report["model"], output_loading_info=True
    )
    assert not any(info.values())

    (Path(report["checkpoint"]) / "manifest.json").unlink()  # as if killed while it was saved
    assert pool.run(go_on, 2, {"out": str(tmp_path)}) == ["", ""]
    again = rows_of(tmp_path)[12:]
    assert [row["step"] for row in again] == list(range(7, 13))
    assert [row["images"] for row in again] == [row["images"] for row in rows[6:]]
    expected = pytest.approx([row["loss"] for row in rows[6:]], rel=1e-5)
    assert [row["loss"] for row in again] == expected
    for error in pool.run(go_on, 2, {"out": str(tmp_path)}):
        assert "Expected --steps above 12" in error


def branch_gradients() -> None:
    """Rank 0 has images or not, by turns; rank 1 has text alone; two optimizer steps each."""
    recipe = load()
    options = recipe.Options()
    rows = recipe.load_rows("generated")
    images, texts = rows[0::2], rows[1::2]
    reference, encode, end = recipe.build(options)
    model = copy.deepcopy(reference)
    collate = recipe.Collate(model.config, encode, end)
    engine = ZeroEngine(ZeroConfig(stage=3, units=UNITS))
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step in range(4):
        first = images[step : step + 1] if step != 2 else []  # step 2: nobody has one
        batches = [
            collate([*first, *texts[step : step + 2]]),
            collate(texts[8 + step : 10 + step]),
        ]
        assert [("pixel_values" in batch) for batch in batches] == [step != 2, False]
        tokens = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
        for batch in batches:
            (recipe.nll_sum(reference, batch) / tokens).backward()
        with engine.micro_step():
            nll = recipe.nll_sum(model, batches[engine.rank])
            (nll * (engine.world_size / tokens)).backward()
        found, expected = gradients(model), gradients(reference)
        tower = [name for name in expected if "vision_tower" in name or "projector" in name]
        used = [name for name in tower if expected[name] is not None]
        assert len(tower) > 20 and bool(used) == (step != 2)
        assert all(expected[name].abs().max() > 0 for name in used if "k_proj.bias" not in name)
        assert_close(found, expected, 1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(engine.full_state_dict(model, rank0_only=False), reference.state_dict(), 2e-6)

    # With the tower's layers as units of their own: named on every rank, not a hang.
    model, _, _ = recipe.build(options)
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    batch = collate(images[:1] if engine.rank == 0 else texts[:1])
    with raises_everywhere(ScheduleError, "must not be a unit of its own"):
        recipe.nll_sum(model, batch).backward()
        engine.after_backward()


def test_gradients_where_ranks_skip_the_tower(pool: RankPool) -> None:
    """Case 51: what a rank did not use counts zeros."""
    pool.run(branch_gradients, 2)


def test_rows_of_a_file_and_wrong_ones(tmp_path: Path) -> None:
    recipe = load()
    Image.new("RGB", (9, 12), (0, 255, 0)).save(tmp_path / "green.png")
    rows = [
        {"prompt": "Which colour?", "answer": "green", "image": str(tmp_path / "green.png")},
        {"prompt": "Say no.", "answer": "no", "image": None},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, encode, end = recipe.build(recipe.Options())
    batch = recipe.Collate(model.config, encode, end)(
        recipe.load_rows(str(tmp_path / "rows.jsonl"))
    )
    assert batch["pixel_values"].shape == (1, 3, 16, 16)
    assert batch["pixel_values"][0, 1].min() > batch["pixel_values"][0, 0].max()
    for row, answer in enumerate(("green", "no")):
        labels = batch["labels"][row]
        assert labels[labels >= 0].tolist() == [*answer.encode(), end]
    assert int((batch["input_ids"] == model.config.image_token_id).sum()) == 4
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    for data, message in ((str(tmp_path / "rows.jsonl"), "in row 1"), ("none.jsonl", "JSONL file")):
        with pytest.raises(recipe.RecipeError, match=message):
            recipe.load_rows(data)
