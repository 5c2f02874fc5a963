"""Commands of the guides, taken out of the pages and run: where a run is long, a tenth of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.recipes.test_recipes import environment, read_lines
from tests.support.printed import ROOT, commands, fences, on_this_interpreter
from tests.support.processes import Processes

DOCS = ROOT / "docs"
SMALL = ["--seq_length", "48", "--held_out_rows", "8"]
ON_CPU = ["--accelerator", "cpu", "--precision", "32-true"]  # where bf16 takes ten times as long

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(command: list[str], folder: Path) -> str:
    with Processes() as processes:
        return output_of(start(processes, command, folder))


def start(processes: Processes, command: list[str], folder: Path) -> subprocess.Popen[str]:
    # torch 2.11 else takes one port for every torchrun of a machine.
    return processes.start(command, env=environment() | {"PET_STANDALONE": "1"}, cwd=folder)


def output_of(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, f"{process.args}\n{output[-2000:]}{errors[-5000:]}"
    return output


def clone(folder: Path) -> Path:
    """A folder from which the recipes are where they are in a clone."""
    (folder / "recipes").symlink_to(ROOT / "recipes")
    return folder


TABS = {
    "Lightning": "python train.py",
    "Accelerate": "accelerate launch --config_file zero3.yaml train.py",
    "PyTorch": "torchrun --nproc-per-node 2 train.py",
}


@pytest.mark.parametrize("tab", TABS)
def test_quickstart(tab: str, tmp_path: Path) -> None:
    """The script of a tab, and the YAML with it, started with the command of that tab."""
    page = DOCS / "quickstart.md"
    after = page.read_text().partition(f'=== "{tab}"\n')[2]
    of_the_tab = re.split(r'^=== "|^## ', after, flags=re.MULTILINE)[0]
    for language, code in fences(of_the_tab):
        name = {"python": "train.py", "yaml": "zero3.yaml"}[language]
        (tmp_path / name).write_text(code)
    assert (tmp_path / "zero3.yaml").exists() == (tab == "Accelerate")
    assert TABS[tab] in commands(page)
    run(on_this_interpreter(TABS[tab]), tmp_path)


def test_export(tmp_path: Path) -> None:
    train, look, export = commands(DOCS / "guides" / "export.md")[:3]
    clone(tmp_path)
    run([*on_this_interpreter(train), *SMALL, *ON_CPU, "--wandb", "off"], tmp_path)
    with Processes() as processes:
        looking, exporting = (
            start(processes, on_this_interpreter(command), tmp_path) for command in (look, export)
        )
        assert "* a resumed run takes step-00020.ckpt" in output_of(looking)
        output_of(exporting)
    assert (tmp_path / "exported" / "model.safetensors").is_file()
    assert (tmp_path / "exported" / "tokenizer.json").is_file()


def test_resume(tmp_path: Path) -> None:
    """Stage 3 on 2 ranks, stage 1 on 4, Accelerate at stage 2, one process: the guide's tour."""
    clone(tmp_path)
    tour = [c for c in commands(DOCS / "guides" / "resume.md") if "recipes/finetune" in c]
    assert len(tour) == 4
    losses: dict[int, float] = {}
    for number, command in enumerate(tour):
        short = re.sub(r"--steps (\d+)0\b", r"--steps \1", command)
        short = re.sub(r"step-(\d{4})0\b", r"step-0\1", short)
        short = short.replace("--save_every 5", "--save_every 1")
        if number == 0:  # the guide stops this one in the middle
            short = short.replace("--steps 4", "--steps 2")
        words = on_this_interpreter(short)
        if "--devices" in words:
            words += ON_CPU
        run([*words, *SMALL], tmp_path)
        folder = tmp_path / "runs" / ("accelerate" if "accelerate" in words[2] else "lightning")
        rows = read_lines(folder / "losses.jsonl")
        losses |= {int(row["step"]): row["train_loss"] for row in rows if "train_loss" in row}
    assert sorted(losses) == list(range(1, 8))
    assert losses[7] < losses[1]


def test_plans() -> None:
    """The plans for a Llama of 8 billion parameters, from its configuration alone."""
    printed = {c for page in ("README.md", "docs/guides/plan.md") for c in commands(ROOT / page)}
    plans = [c[c.index("shardplug plan") :] for c in printed if "plan" in c and "llama-3.1-8b" in c]
    assert len(plans) == 3
    with Processes() as processes:
        started = [  # side by side: each is one process
            start(
                processes,
                on_this_interpreter(plan),
                ROOT if "recipes/configs" in plan else ROOT / "recipes" / "configs",
            )
            for plan in plans
        ]
        for plan, process in zip(plans, started, strict=True):
            said = output_of(process)
            size = "8.04 billion" if "--lora" in plan else "8.03 billion"
            assert f"{size} parameters" in said and "the fastest that fits" in said, plan
