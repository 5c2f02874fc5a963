"""Fine-tunes a vision transformer with ZeRO in a Lightning Trainer.

    python recipes/finetune_vit.py                                 # a tiny model, generated images

Everything that makes it sharded is `strategy="zero2"`. On several nodes SLURM's `srun` starts the
ranks, and Lightning finds them: see `recipes/configs/vit_large.yaml`.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tracking
from jsonargparse import auto_cli, set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

import shardplug.hf
from shardplug.checkpoint import export, resume_point
from shardplug.lightning import MemoryCurve

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a vision transformer with ZeRO in a Lightning Trainer."""

    model: str = "tiny"
    """Hub id or local folder of a vision transformer, or "tiny": built on the spot."""
    data: str = "generated"
    """Folder with a folder of images for each class, or "generated"."""
    out: str = "runs/vit"
    """Folder for checkpoints, the model, the logs and the memory picture."""
    resume: bool = False
    """Whether to go on from the newest whole checkpoint in `out`."""

    strategy: Literal["zero1", "zero2", "zero3", "zero2_cpu", "zero3_cpu"] = "zero2"
    """ZeRO stage, and where the optimizer's state lives."""
    nodes: int = 1
    """Number of nodes."""
    devices: int = 0
    """Ranks of a node; 0 means every GPU, or 2 CPU ranks where there is none."""
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    """What to train on."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """Numbers to compute in; bf16-mixed keeps fp32 weights and sums gradients in fp32."""

    steps: int = 30
    """Optimizer steps of the whole run."""
    micro_batch: int = 8
    """Images per rank and backward pass."""
    accumulate: int = 1
    """Backward passes per optimizer step."""
    learning_rate: float = 3e-3
    """Highest learning rate: reached after a tenth of the steps, near zero at the end."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seeds the weights, the split and the order of the images."""
    save_every: int = 15
    """Optimizer steps between checkpoints."""
    held_out: float = 0.25
    """Share of the images that is not trained on."""
    wandb: str = "off"
    """W&B project, or "off". Without WANDB_API_KEY the run stays offline, in `out`."""


class RecipeError(ValueError):
    """A bad option: the message says what was expected, what came and what to do."""


class GeneratedImages(Dataset[tuple[torch.Tensor, int]]):
    """Noise in which one colour is brighter, or none; the class is which."""

    classes = ("red", "green", "blue", "grey")

    def __init__(self, size: int, count: int = 512) -> None:
        self.size, self.count = size, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator, label = torch.Generator().manual_seed(index), index % 4
        pixels = 0.5 * torch.randn(3, self.size, self.size, generator=generator)
        pixels[label : label + 1] += 0.5  # no channel for grey
        return pixels, label


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """Images of a folder for each class, cut to a square and scaled to [-1, 1], as ViT's are."""

    def __init__(self, root: str, size: int) -> None:
        self.size = size
        found = sorted(Path(root).iterdir()) if Path(root).is_dir() else []
        folders = [path for path in found if path.is_dir()]
        self.classes = tuple(folder.name for folder in folders)
        self.files = [
            (file, label)
            for label, folder in enumerate(folders)
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in SUFFIXES
        ]
        if len(self.classes) < 2 or not self.files:
            raise RecipeError(
                f"Expected --data to be 'generated' or a folder with a folder of images "
                f"({', '.join(SUFFIXES)}) for each of two or more classes, got {root!r}."
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[index]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        square = image.resize((self.size, self.size), box=(left, top, left + side, top + side))
        pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)  # (3, size, size)
        return pixels / 127.5 - 1, label


def build(options: Options, num_classes: int, size: int) -> torch.nn.Module:
    """The model with a new head; a pretrained one is read when it is sharded, by rows."""
    torch.manual_seed(options.seed)
    if options.model != "tiny":
        return shardplug.hf.from_pretrained(
            options.model,
            auto_class=AutoModelForImageClassification,
            dtype=torch.float32,
            num_labels=num_classes,
        ).train()
    config = ViTConfig(
        image_size=size,
        patch_size=8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_labels=num_classes,
    )
    return ViTForImageClassification(config).train()


class Classifier(LightningModule):
    """A vision transformer and its loss."""

    def __init__(self, vit: torch.nn.Module, options: Options) -> None:
        super().__init__()
        self.vit = vit
        self.options = options

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        pixels, labels = batch
        loss = F.cross_entropy(self.vit(pixel_values=pixels).logits.float(), labels)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        pixels, labels = batch
        right = self.vit(pixel_values=pixels).logits.argmax(-1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        options = self.options
        optimizer = torch.optim.AdamW(self.parameters(), lr=options.learning_rate)
        warmup = max(1, options.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min(
                (step + 1) / warmup,
                0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / options.steps)),
            ),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(options: Options) -> None:
    tracking.quiet_lightning()
    options = replace(options, wandb=tracking.wandb_project(options.wandb))
    out = Path(options.out).absolute()
    on_gpu = options.accelerator != "cpu" and torch.cuda.is_available()
    devices = options.devices or (torch.cuda.device_count() if on_gpu else 2)

    # Data: what is held out is a multiple of a batch of all ranks, so that no image counts twice.
    size = 32 if options.model == "tiny" else 224
    images: GeneratedImages | ImageFolder
    generated = options.data == "generated"
    images = GeneratedImages(size) if generated else ImageFolder(options.data, size)
    batch = devices * options.nodes * options.micro_batch
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    count = int(len(images) * options.held_out) // batch * batch
    if not count or len(images) - count < batch:
        raise RecipeError(
            f"Expected enough images for a batch of {batch} in each part of the split, got "
            f"{len(images)}: give more, or a smaller --micro_batch."
        )
    held_out, train = Subset(images, order[:count].tolist()), Subset(images, order[count:].tolist())
    loaders = [
        DataLoader(train, options.micro_batch, shuffle=True, drop_last=True),
        DataLoader(held_out, options.micro_batch),
    ]

    # Trainer: the strategy's name is all that shards the model.
    if options.wandb == "off":
        logger: Any = CSVLogger(out, name=None, version="log")
    else:
        out.mkdir(parents=True, exist_ok=True)
        offline = "WANDB_API_KEY" not in os.environ
        logger = WandbLogger(
            project=options.wandb, save_dir=out, offline=offline, config=asdict(options)
        )
    curve = MemoryCurve(out / "memory")
    save = ModelCheckpoint(
        dirpath=out / "checkpoints",
        filename="step-{step:05d}",
        auto_insert_metric_name=False,
        every_n_train_steps=options.save_every,
        save_top_k=-1,
    )
    trainer = Trainer(
        strategy=options.strategy,
        accelerator="gpu" if on_gpu else "cpu",
        devices=devices,
        num_nodes=options.nodes,
        precision=options.precision,
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=options.clip_norm,
        callbacks=[save, curve],
        logger=logger,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )
    module = Classifier(build(options, len(images.classes), size), options)
    resume = resume_point(out / "checkpoints") if options.resume else None

    # Train, and measure before and after on images that are not trained on.
    path = None if resume is None else resume.path
    (before,) = trainer.validate(module, loaders[1], ckpt_path=path, verbose=False)
    trainer.fit(module, loaders[0], ckpt_path=path)
    (after,) = trainer.validate(module, loaders[1], verbose=False)
    last = resume_point(out / "checkpoints")

    # Say where everything is.
    if trainer.is_global_zero:
        assert last is not None
        export(last.path, out / "model", overwrite=True)
        print(f"\naccuracy:   {before['accuracy']:.4f} before, {after['accuracy']:.4f} after")
        print(f"checkpoint: {last.path}")
        print(f"model:      {out / 'model'}")
        print(f"memory:     {curve.png_path}")


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
