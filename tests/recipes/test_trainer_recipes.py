"""The Trainer recipes, launched as the guide prints it: they train, resume, and save a model."""

from __future__ import annotations

import importlib
import json
import random
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from shardplug.checkpoint import inspect
from tests.adapters.hf_trainer.common import launched
from tests.recipes.test_recipes import ROOT, environment
from tests.support.pool import RankPool

GUIDE = (ROOT / "docs" / "guides" / "hf_trainer.md").read_text()
WORDS = "a file is read and then the list of values comes back as text to the user".split()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def printed(recipe: str) -> list[str]:
    """The guide's launch line, on the interpreter that runs the tests, in fp32."""
    (line,) = re.findall(rf"^accelerate launch .*recipes/{re.escape(recipe)}$", GUIDE, re.M)
    words = shlex.split(line)
    (config,) = (word for word in words if word.endswith(".yaml"))
    words[words.index(config) : words.index(config) + 1] = [config, "--mixed_precision", "no"]
    return [sys.executable, "-m", "accelerate.commands.launch", *words[2:]]


def start(recipe: str, data: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    small = ["--seq_length", "48", "--held_out_rows", "8", "--steps", "6", "--save_every", "3"]
    done = subprocess.run(
        [*printed(recipe), "--data", str(data), "--out", str(out), *small, *options],
        env=environment() | {"PYTHONWARNINGS": "default"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.count("shardplug: ZeRO stage 3 over 2 ranks") == 1
    return done


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    rng = random.Random(0)
    pairs = (
        {"prompt": f"Question {i}?", "completion": " ".join(rng.choices(WORDS, k=12))}
        for i in range(120)
    )
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its tokenizer, as a hub id would give."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, **tokens)).save_pretrained(
        folder
    )
    return folder


def check_report(output: str, out: Path) -> None:
    report = dict(re.findall(r"^([\w&][\w& -]*): +(.+)$", output, re.M))
    before, _, after, _ = report["held-out loss"].replace(",", "").split()
    assert float(after) < float(before) - 0.01
    _, info = AutoModelForCausalLM.from_pretrained(report["model"], output_loading_info=True)
    assert not any(info.values())
    assert Path(report["memory"]).read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "wandb").glob("offline-run-*"))) == 1  # not one for each rank
    checkpoint = inspect(Path(report["checkpoint"]) / "pytorch_model_fsdp_and_optimizer")
    assert (checkpoint.step, checkpoint.world_size) == (6, 2)


def losses(out: Path, step: int) -> dict[int, float]:
    state: dict[str, Any] = json.loads((out / f"checkpoint-{step}/trainer_state.json").read_text())
    return {row["step"]: row["loss"] for row in state["log_history"] if "loss" in row}


def test_sft_on_the_tiny_model(data: Path, tmp_path: Path) -> None:
    check_report(start("finetune_trl_sft.py", data, tmp_path).stdout, tmp_path)


def go_on(**options: Any) -> list[str]:
    """Run the recipe again in a resident rank, and return the warnings."""
    sys.path.insert(0, str(ROOT / "recipes"))
    with launched("zero2"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recipe = importlib.import_module("finetune_hf_trainer")
        recipe.main(recipe.Options(wandb="off", resume="last", **options))
    return [str(warning.message) for warning in caught]


def test_trainer_on_a_model_folder_goes_on_after_a_kill(
    data: Path, model: Path, tmp_path: Path, pool: RankPool
) -> None:
    options = {"model": str(model), "learning_rate": 4e-3}
    spelled = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    check_report(start("finetune_hf_trainer.py", data, tmp_path, *spelled).stdout, tmp_path)
    expected = losses(tmp_path, 6)
    assert list(expected) == [1, 2, 3, 4, 5, 6]
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()  # as if killed while it was saved
    options |= {"steps": 6, "save_every": 3, "seq_length": 48, "held_out_rows": 8}
    told = pool.run(go_on, 2, data=str(data), out=str(tmp_path), **options)
    assert sum("checkpoint-6 was not finished" in text for text in told[0] + told[1]) == 1
    assert losses(tmp_path, 6) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["finetune_hf_trainer", "finetune_trl_sft"])
def test_a_checkpoint_that_is_not_there_is_named(name: str, tmp_path: Path) -> None:
    from text import RecipeError

    recipe = importlib.import_module(name)
    for resume in ("last", "nothing"):
        with pytest.raises(RecipeError, match="Expected --resume to be 'last' or a checkpoint fol"):
            recipe.checkpoint_to_resume(recipe.Options(resume=resume, out=str(tmp_path)))
