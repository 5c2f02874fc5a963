"""TRL's SFTTrainer: its default loss reads the head's weight itself; gradients must be whole."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shardplug.hf import from_pretrained
from tests.adapters.hf_trainer.common import build, launched
from tests.support.pool import RankPool

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="needs trl: pip install 'shardplug[trl]'"
)

WORDS = "a file is read and then the list of values comes back as text to the user".split()


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def pairs(count: int) -> Dataset:
    """Completions of different lengths: only these are trained on."""
    made = random.Random(0)
    return Dataset.from_list(
        [
            {
                "prompt": " ".join(made.choices(WORDS, k=3)) + " ",
                "completion": " ".join(made.choices(WORDS, k=made.randint(1, 9))),
            }
            for _ in range(count)
        ]
    )


def fine_tune(
    out: Path,
    world_size: int,
    model: Any,
    resume: str | None = None,
    lora: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 2,  # TRL averages over batches, so they have to be equal
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        # SGD without clipping: a gradient that is too large by a factor shows in the weights.
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": True,
        "disable_tqdm": True,
    }
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(**settings | changes),
        train_dataset=pairs(32),
        eval_dataset=pairs(8),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if lora else None,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(out / "final"))
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    state = trainer.model.state_dict()
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.items()}
    return {
        "losses": {entry["step"]: entry["loss"] for entry in steps},
        "norms": {entry["step"]: entry["grad_norm"] for entry in steps},
        "accuracies": [entry["mean_token_accuracy"] for entry in steps],
        "evaluations": [before]
        + [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "state": whole,
        "head": type(trainer.model.get_output_embeddings().weight).__name__,
        "class": type(trainer.accelerator).__name__,
    }


def sharded(out: Path, strategy: str, base: Path, how: str, resume: str | None) -> dict[str, Any]:
    import torch.distributed as dist

    ways: dict[str, Any] = {
        "object": lambda: build(tied="tied" in base.name),
        "path": lambda: str(base),  # TRL loads it
        "streamed": lambda: from_pretrained(base),
    }
    with launched(strategy):
        return fine_tune(out, dist.get_world_size(), ways[how](), resume)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("alone")
    found = {}
    for tied in (False, True):
        base = folder / ("tied" if tied else "own_head")
        build(tied=tied).save_pretrained(base)
        found[tied] = base, fine_tune(folder / f"run_{tied}", 1, build(tied=tied))
    return found


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("strategy", "tied", "how"),
    [
        ("zero1", False, "object"),
        ("zero2", True, "path"),
        ("zero3", False, "streamed"),
        ("zero3", True, "object"),
    ],
)
def test_losses_gradients_and_weights_equal_one_process(
    strategy: str, tied: bool, how: str, alone: Any, pool: RankPool, tmp_path: Path
) -> None:
    base, expected = alone[tied]
    found = pool.run(sharded, 2, tmp_path, strategy, base, how, None)
    for result in found:
        assert (result["class"], result["head"]) == ("TrainerAccelerator", "DTensor")
        assert list(result["losses"]) == [1, 2, 3, 4]
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert result["accuracies"] == pytest.approx(expected["accuracies"], rel=1e-5)
        assert result["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-5)
        assert len(result["evaluations"]) == 3
        assert len(result["state"]) > 10
        for name, value in expected["state"].items():
            torch.testing.assert_close(result["state"][name], value, rtol=0, atol=1e-6)
    if strategy == "zero3" and tied:
        path = str(tmp_path / "checkpoint-2")
        for result in pool.run(sharded, 1, tmp_path / "resumed", "zero1", base, how, path):
            late = {step: expected["losses"][step] for step in (3, 4)}
            found_late = {step: result["losses"][step] for step in (3, 4)}
            assert found_late == pytest.approx(late, rel=1e-5)
        assert {"model.safetensors", "tokenizer.json"} <= {
            file.name for file in (tmp_path / "final").iterdir()
        }


def with_lora(out: Path, strategy: str, resume: str | None) -> dict[str, Any]:
    import torch.distributed as dist

    with launched(strategy):
        return fine_tune(out, dist.get_world_size(), build(), resume, lora=True)


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing. is deprecated:FutureWarning"
)  # peft
def test_lora_equals_one_process_resumes_and_saves_the_adapter(
    pool: RankPool, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    expected = fine_tune(tmp_path / "alone", 1, build(), lora=True)
    found = pool.run(with_lora, 2, tmp_path / "two", "zero3", None)[0]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    path = str(tmp_path / "two" / "checkpoint-2")
    resumed = pool.run(with_lora, 1, tmp_path / "one", "zero1", path)[0]
    for run in ("two", "one"):
        adapter = load_file(tmp_path / run / "final" / "adapter_model.safetensors")
        wanted = load_file(tmp_path / "alone" / "final" / "adapter_model.safetensors")
        assert adapter.keys() == wanted.keys() and len(adapter) == 4
        for name, value in wanted.items():
            torch.testing.assert_close(adapter[name], value, rtol=0, atol=1e-6)
    assert resumed["class"] == "TrainerAccelerator"
