"""What the Trainer tests share: a launched process, a tiny Llama, rows of uneven length, a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.distributed.tensor import DTensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)
from transformers.utils import logging as transformers_logging

from shardplug.integrations.accelerate.hf_trainer.takeover import take_over

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

STEPS = 6
ROWS = 48  # as many as the steps take: one epoch
WIDTH = 12
REPLACED = {
    "accelerate": ("Accelerator",),
    "accelerate.accelerator": ("Accelerator",),
    "transformers.trainer": (
        "Accelerator",
        "get_last_checkpoint",
        "load_fsdp_model",
        "load_fsdp_optimizer",
        "save_fsdp_model",
        "save_fsdp_optimizer",
    ),
    "transformers.trainer_utils": ("get_last_checkpoint",),
}


@contextmanager
def launched(strategy: str) -> Iterator[None]:
    """Be a process that `accelerate launch` started with this `fsdp_sharding_strategy`."""
    os.environ.update(
        ACCELERATE_USE_CPU="true",
        ACCELERATE_USE_FSDP="true",
        ACCELERATE_MIXED_PRECISION="no",
        FSDP_VERSION="2",
        FSDP_SHARDING_STRATEGY=f"shardplug:{strategy}",
    )
    saved = [
        (sys.modules[module], name, getattr(sys.modules[module], name))
        for module, names in REPLACED.items()
        for name in names
    ]
    take_over()
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def build(*, tied: bool = True, seed: int = 0, **config: Any) -> LlamaForCausalLM:
    """The same tiny Llama wherever the seed is the same."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 5, "pad_token_id": 0}
    made = LlamaConfig(**sizes, **heads, **tokens, tie_word_embeddings=tied, **config)
    return LlamaForCausalLM(made)


def rows(count: int = ROWS) -> list[dict[str, torch.Tensor]]:
    """Rows with different numbers of labels, so that a mean of means is not the mean."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(count):
        length = int(torch.randint(4, WIDTH + 1, (1,), generator=generator))
        ids = torch.zeros(WIDTH, dtype=torch.long)
        ids[:length] = torch.randint(6, 257, (length,), generator=generator)
        labels = ids.clone()
        labels[length:] = labels[:2] = -100
        mask = (torch.arange(WIDTH) < length).long()
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


class Generate(TrainerCallback):
    """Generates after each evaluation, other prompts and lengths on each rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.tokens: list[list[int]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        training = model.training
        model.eval()
        prompt = torch.arange(6, 9 + 2 * self.rank)[None]
        options = GenerationConfig(
            max_new_tokens=3 + 4 * self.rank, do_sample=False, eos_token_id=5, pad_token_id=0
        )
        self.tokens.append(model.generate(prompt, generation_config=options)[0].tolist())
        model.train(training)


def arguments(out: Path, world_size: int, **changes: Any) -> Seq2SeqTrainingArguments:
    """Two micro-batches a step, eight rows a step on any number of ranks."""
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4 // world_size,
        "per_device_eval_batch_size": 4 // world_size,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "seed": 3,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "predict_with_generate": True,
        "generation_config": GenerationConfig(
            max_new_tokens=4, max_length=None, do_sample=False, eos_token_id=5, pad_token_id=0
        ),
    }
    return Seq2SeqTrainingArguments(**settings | changes)


def run(
    out: Path,
    model: Any,
    *,
    resume: str | bool | None = None,
    evaluate: bool = False,
    save: bool = False,
    rank: int = 0,
    world_size: int = 1,
    callbacks: tuple[TrainerCallback, ...] = (),
    **changes: Any,
) -> dict[str, Any]:
    """Train with the Trainer that is in place, and tell what came of it."""
    if evaluate:
        changes |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        # The highest loss, which is the first: the last weights are not the best by themselves.
        changes |= {"metric_for_best_model": "loss", "greater_is_better": True}
    generate = Generate(rank)
    trainer = Seq2SeqTrainer(
        model=model,
        args=arguments(out, world_size, **changes),
        train_dataset=rows(),
        eval_dataset=rows(12),
        callbacks=[*callbacks, *([generate] if evaluate else [])],
    )
    before = trainer.evaluate()["eval_loss"] if evaluate else None
    trainer.train(resume_from_checkpoint=resume)
    result: dict[str, Any] = {"class": type(trainer.accelerator).__name__, "before": before}
    if evaluate:
        result["after"] = trainer.evaluate()["eval_loss"]
        result["predictions"] = trainer.predict(rows(12)).predictions.tolist()
        result["tokens"] = generate.tokens
    if save:
        trainer.save_model(str(out / "final"))
    history = trainer.state.log_history
    steps = [entry for entry in history if "grad_norm" in entry]
    return result | {
        "losses": {entry["step"]: entry["loss"] for entry in steps},
        "norms": {entry["step"]: entry["grad_norm"] for entry in steps},
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "best": trainer.state.best_model_checkpoint,
        "steps": getattr(trainer.accelerator, "completed_steps", None),
        "sharded": sum(isinstance(p.data, DTensor) for p in model.parameters()),
    }
