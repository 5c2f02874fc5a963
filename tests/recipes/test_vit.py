"""The vision recipe, launched as it is printed: it learns, goes on, and its model loads."""

from __future__ import annotations

import csv
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageClassification

from tests.recipes.test_recipes import ROOT, environment

RECIPE = ROOT / "recipes" / "finetune_vit.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def start(*options: str) -> dict[str, str]:
    """Run the docstring's line; return what it says at the end."""
    line = re.findall(r"^ {4}python .*$", RECIPE.read_text(), re.M)[0]
    command = [sys.executable, *shlex.split(line, comments=True)[1:], *options]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(re.findall(r"^(\w+): +(.+)$", done.stdout, re.M))


def losses(out: Path) -> dict[int, float]:
    with (out / "log" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("train_loss")]
    return {int(row["step"]): float(row["train_loss"]) for row in rows}


def test_the_printed_line_learns_and_its_model_loads(tmp_path: Path) -> None:
    report = start("--out", str(tmp_path))
    before, _, after, _ = report["accuracy"].replace(",", "").split()
    assert float(after) > float(before) + 0.2 and float(after) > 0.6
    assert Path(report["checkpoint"]).name.startswith("step-00030")
    model, info = AutoModelForImageClassification.from_pretrained(
        report["model"], output_loading_info=True
    )
    assert not any(info.values())
    assert Path(report["memory"]).read_bytes().startswith(b"\x89PNG")
    assert len(losses(tmp_path)) == 30

    # The exported model, in one process, is as accurate as the ranks said.
    import finetune_vit as recipe

    images = recipe.GeneratedImages(32)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:128]
    pixels, labels = zip(*(images[int(index)] for index in order), strict=True)
    with torch.no_grad():
        right = model.eval()(pixel_values=torch.stack(pixels)).logits.argmax(-1)
    accuracy = (right == torch.tensor(labels)).float().mean().item()
    assert accuracy == pytest.approx(float(after), abs=1e-4)


def test_a_folder_of_images_is_read(tmp_path: Path) -> None:
    import finetune_vit as recipe

    for label, name in enumerate(("dark", "light")):
        (tmp_path / name).mkdir()
        for index in range(3):
            pixels = np.full((20, 30, 3), 255 * label, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{index}.png")
    images = recipe.ImageFolder(str(tmp_path), 16)
    assert images.classes == ("dark", "light") and len(images) == 6
    for index in range(6):
        pixels, label = images[index]
        assert pixels.shape == (3, 16, 16) and label == index // 3
        assert torch.all(pixels == (1.0 if label else -1.0))
    for wrong in (tmp_path / "dark", tmp_path / "nothing"):
        with pytest.raises(recipe.RecipeError, match="Expected --data to be 'generated' or a f"):
            recipe.ImageFolder(str(wrong), 16)
    few = recipe.Options(data=str(tmp_path), out=str(tmp_path / "out"), accelerator="cpu")
    with pytest.raises(recipe.RecipeError, match="Expected enough images for a batch of 16"):
        recipe.main(few)
