"""Fine-tunes a vision tower with a language model (LLaVA) with ZeRO, in an Accelerate loop.

    accelerate launch --config_file recipes/configs/multimodal.yaml recipes/finetune_multimodal.py

Rows have an image, or text alone. A rank whose batch is text alone skips the vision tower and the
projector, while others use them: their gradient is the mean over all ranks, where a rank that
skipped counts zeros, as in one process with the whole batch. For that the skipped modules must
be in no unit of their own, since gathering a unit takes all ranks: the YAML names the language
model's layer as the only unit, and the tower is gathered with the root.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli, set_parsing_settings
from PIL import Image
from torch.utils.data import DataLoader, Subset
from transformers import (
    AutoConfig,
    AutoTokenizer,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import shardplug.hf
from shardplug.accelerate import Accelerator
from shardplug.checkpoint import export_model, resume_point

IGNORE = -100
MEAN, STD = (0.4815, 0.4578, 0.4082), (0.2686, 0.2613, 0.2758)
"""Of the pixels that CLIP was trained on."""
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Fine-tune a vision tower with a language model, with ZeRO in an Accelerate loop."""

    model: str = "tiny"
    """Hub id or local folder of a LLaVA with a CLIP tower, or "tiny": built on the spot."""
    data: str = "generated"
    """JSON Lines with `prompt`, `answer` and `image`, a path or null; or "generated"."""
    out: str = "runs/multimodal"
    """Folder for checkpoints, the model and losses.jsonl."""
    resume: bool = False
    """Whether to go on from the newest whole checkpoint in `out`."""

    steps: int = 12
    """Optimizer steps of the whole run."""
    micro_batch: int = 2
    """Rows per rank and step."""
    learning_rate: float = 3e-3
    """Highest learning rate: reached after a tenth of the steps, near zero at the end."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seeds the weights and the order of the rows."""
    save_every: int = 6
    """Optimizer steps between checkpoints; the last step is always saved."""


class RecipeError(ValueError):
    """A bad option: the message says what was expected, what came and what to do."""


Row = dict[str, Any]


def load_rows(data: str) -> list[Row]:
    """Rows of `prompt`, `answer` and `image`: None, a path, or the image itself."""
    if data == "generated":
        colours = list(COLOURS.items())
        rows: list[Row] = []
        for index in range(96):
            name, colour = colours[index % 3]
            if index % 2:
                rows.append({"prompt": f"Repeat: {name}.", "answer": name, "image": None})
            else:
                image = Image.new("RGB", (20, 20), colour)
                rows.append({"prompt": "Which colour?", "answer": name, "image": image})
        return rows
    if not Path(data).is_file():
        raise RecipeError(f"Expected --data to be 'generated' or a JSONL file, got {data!r}.")
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    for number, row in enumerate(rows, start=1):
        if not {"prompt", "answer", "image"} <= row.keys():
            raise RecipeError(
                f"Expected prompt, answer and image in each row of {data}, got {sorted(row)} in "
                f"row {number}."
            )
    return rows


def build(options: Options) -> tuple[Any, Callable[[str], list[int]], int]:
    """The model, what turns text into token ids, and the token that ends an answer."""
    if options.model != "tiny":
        config = AutoConfig.from_pretrained(options.model)
        if config.model_type != "llava" or config.vision_config.model_type != "clip_vision_model":
            raise RecipeError(
                f"Expected --model to be a LLaVA with a CLIP tower, got a {config.model_type}."
            )
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = shardplug.hf.from_pretrained(
            options.model, auto_class=LlavaForConditionalGeneration, dtype=torch.float32
        )
        encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
        return model.train(), encode, tokenizer.eos_token_id
    torch.manual_seed(options.seed)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
        ),
        text_config=LlamaConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        image_token_index=256,
    )
    model = LlavaForConditionalGeneration(config)
    return model.train(), lambda text: list(text.encode()), 257


class Collate:
    """Makes batches; one without an image has no `pixel_values`, so the tower is skipped.

    Args:
        config: The model's.
        encode: Turns text into token ids.
        end: Token that ends an answer.
    """

    def __init__(self, config: Any, encode: Callable[[str], list[int]], end: int) -> None:
        self.size = config.vision_config.image_size
        num_patches = (self.size // config.vision_config.patch_size) ** 2
        self.image_tokens = [config.image_token_id] * num_patches
        self.encode, self.end = encode, end

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        texts, pixels = [], []
        for row in rows:
            head = self.encode("USER: ")
            if row["image"] is not None:
                head += self.image_tokens
                pixels.append(self.pixels(row["image"]))
            head += self.encode(f"\n{row['prompt']} ASSISTANT: ")
            texts.append((head, [*self.encode(row["answer"]), self.end]))
        width = max(len(head) + len(answer) for head, answer in texts)
        width += -width % 16
        input_ids = torch.full((len(rows), width), self.end)
        labels = torch.full_like(input_ids, IGNORE)
        for index, (head, answer) in enumerate(texts):
            input_ids[index, : len(head) + len(answer)] = torch.tensor(head + answer)
            labels[index, len(head) : len(head) + len(answer)] = torch.tensor(answer)
        # No mask: a causal model never looks right, and what fills the rows has no labels.
        batch = {"input_ids": input_ids, "labels": labels}
        return batch | ({"pixel_values": torch.stack(pixels)} if pixels else {})

    def pixels(self, image: Image.Image | str) -> torch.Tensor:
        """An image as CLIP takes it: (3, size, size)."""
        if not isinstance(image, Image.Image):
            with Image.open(image) as opened:
                image = opened.convert("RGB")
        square = np.array(image.resize((self.size, self.size), Image.Resampling.BICUBIC))
        values = (square / 255 - np.array(MEAN)) / np.array(STD)
        return torch.from_numpy(values.transpose(2, 0, 1)).float()


def nll_sum(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The negative log-likelihood of the answers in nats, summed over their tokens."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def main(options: Options) -> None:
    rows = load_rows(options.data)
    out = Path(options.out).absolute()

    # Accelerator: the launcher's YAML names the stage and the units.
    accelerator = Accelerator(project_dir=out)
    ranks = accelerator.num_processes
    if accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)

    # Data: in the order of the whole run, so that a run that is resumed goes on exactly.
    model, encode, end = build(options)
    num_rows = options.steps * options.micro_batch * ranks
    order = torch.cat(
        [
            torch.randperm(len(rows), generator=torch.Generator().manual_seed(options.seed + epoch))
            for epoch in range(-(-num_rows // len(rows)))
        ]
    )[:num_rows]
    loader = DataLoader(
        Subset(rows, order.tolist()),
        options.micro_batch,
        collate_fn=Collate(model.config, encode, end),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # Resume.
    point = resume_point(out / "checkpoints") if options.resume else None
    if point is not None:
        accelerator.load_state(str(point.path))
    step = accelerator.completed_steps
    if step >= options.steps:
        raise RecipeError(
            f"Expected --steps above {step}, which {out} has done, got {options.steps}."
        )

    # Train.
    warmup = max(1, options.steps // 10)
    losses: list[float] = []
    for batch in accelerator.skip_first_batches(loader, step):
        wave = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / options.steps))
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min((step + 1) / warmup, wave)
        nll = nll_sum(model, batch)
        # The engine divides by the ranks; the mean is to be over all tokens of all ranks.
        images = len(batch["pixel_values"]) if "pixel_values" in batch else 0
        tokens = int((batch["labels"][:, 1:] != IGNORE).sum())
        mine = torch.tensor([[nll.item(), tokens, images]], device=accelerator.device)
        everyone = accelerator.gather(mine)  # (ranks, 3)
        nll_of_all, tokens_of_all = everyone[:, 0].sum().item(), everyone[:, 1].sum().item()
        accelerator.backward(nll * (ranks / tokens_of_all))
        accelerator.clip_grad_norm_(model.parameters(), options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

        step = accelerator.completed_steps
        losses.append(nll_of_all / tokens_of_all)
        if accelerator.is_main_process:
            row = {"step": step, "loss": losses[-1], "images": everyone[:, 2].int().tolist()}
            print(f"step {step}: loss {losses[-1]:.4f}, images of each rank {row['images']}")
            with (out / "losses.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        if step % options.save_every == 0 or step == options.steps:
            accelerator.save_state(str(out / "checkpoints" / f"step-{step:05d}"))

    # Export, and say where everything is.
    tokenizer = None
    if options.model != "tiny":  # the tiny model's tokens are bytes
        tokenizer = out / "tokenizer"
        if accelerator.is_main_process:
            AutoTokenizer.from_pretrained(options.model).save_pretrained(tokenizer)
    export_model(accelerator.engine, out / "model", tokenizer=tokenizer, overwrite=True)
    if accelerator.is_main_process:
        print(f"\nloss:       {losses[0]:.4f} first, {losses[-1]:.4f} last")
        print(f"checkpoint: {out / 'checkpoints' / f'step-{step:05d}'}")
        print(f"model:      {out / 'model'}")
    accelerator.end_training()


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
