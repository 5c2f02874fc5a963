"""Pretrains a Llama from scratch with ZeRO, in a plain PyTorch loop.

    torchrun --nproc-per-node 2 recipes/pretrain_llama.py          # a tiny model of bytes, on CPUs

On several nodes the parameters are sharded within a node and replicated across nodes (HSDP): what
is gathered for each layer stays on the fast links, and gradients alone cross the slow ones.
`recipes/slurm/pretrain_llama.sbatch` starts it there, with the options that are in
`recipes/configs/pretrain_llama3_8b.yaml`.

Starting it again goes on from the newest whole checkpoint in `out`, on as many ranks as there are.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tracking
from jsonargparse import auto_cli, set_parsing_settings
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import shardplug
from shardplug import ZeroConfig, ZeroEngine, default_listeners
from shardplug.checkpoint import resume_point
from shardplug.memory import JsonlSink, MemoryTracker, WandbSink


@dataclass(frozen=True, kw_only=True)
class Options:
    """Pretrain a Llama from scratch with ZeRO."""

    model: str = "tiny"
    """Folder with a config.json, hub id (its configuration alone is read), or "tiny"."""
    tokens: str = "bytes"
    """File of token ids as uint32, or "bytes": those of Python's own library."""
    out: str = "runs/pretrain"
    """Folder for checkpoints, losses.jsonl and memory.jsonl; all nodes must see it."""

    stage: Literal[1, 2, 3] = 3
    """ZeRO stage: what is gathered when."""
    replicas: int = 0
    """Copies of the parameters, each sharded over its ranks; 0 means one for each node."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Numbers to compute in; bf16 keeps fp32 weights and sums gradients in fp32."""
    activation_checkpointing: bool = False
    """Whether to compute blocks again in the backward pass instead of keeping activations."""

    steps: int = 20
    """Optimizer steps of the whole run."""
    global_batch: int = 8
    """Rows per optimizer step, over all ranks: the run does not depend on their number."""
    micro_batch: int = 2
    """Rows per rank and backward pass."""
    seq_length: int = 64
    """Tokens per row."""
    learning_rate: float = 3e-3
    """Highest learning rate: reached after a tenth of the steps, a tenth of it at the end."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms have none."""
    clip_norm: float = 1.0
    """Largest norm of the gradient."""
    seed: int = 0
    """Seeds the weights and says which row comes first."""

    save_every: int = 10
    """Optimizer steps between checkpoints; the last step is always saved."""
    keep: int = 2
    """Checkpoints to keep."""
    wandb: str = "off"
    """W&B project, or "off". Without WANDB_API_KEY the run stays offline, in `out`."""


class RecipeError(ValueError):
    """A bad option: the message says what was expected, what came and what to do."""


def start() -> None:
    """Joins the other ranks that torchrun started."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")
    else:
        dist.init_process_group("gloo")


def load_tokens(name: str) -> np.ndarray:
    """The text as one row of token ids; a file is mapped, and read where it is used."""
    if name != "bytes":
        if not Path(name).is_file():
            raise RecipeError(f"Expected --tokens to be a file of uint32 or 'bytes', got {name!r}.")
        return np.memmap(name, dtype=np.uint32, mode="r")
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:40]
    return np.concatenate([np.fromfile(source, dtype=np.uint8) for source in sources])


def build(options: Options) -> LlamaForCausalLM:
    """The model on meta: it takes no memory until the engine makes each rank's own rows."""
    if options.model == "tiny":
        config = LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=88,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    else:
        config = AutoConfig.from_pretrained(options.model)
    config.use_cache = False  # it is for generating
    torch.manual_seed(options.seed)
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def window(
    tokens: np.ndarray, options: Options, step: int, rank: int, ranks: int
) -> Iterator[torch.Tensor]:
    """This rank's micro-batches of an optimizer step.

    Which rows belong to a step depends on the step and the seed alone, so a run that goes on, with
    more ranks or fewer, sees the rows that it would have seen.

    Yields:
        Token ids of shape (micro_batch, seq_length + 1): each row has the target of its last token.
    """
    length, num_rows = options.seq_length, (len(tokens) - 1) // options.seq_length
    # A stride that shares no factor with their number meets each row once an epoch, far from the
    # row before; a shuffled list of all rows would take memory and time on every rank.
    stride = next(n for n in range(int(num_rows * 0.618), num_rows) if math.gcd(n, num_rows) == 1)
    first = step * options.global_batch + rank * options.micro_batch
    for begin in range(first, (step + 1) * options.global_batch, ranks * options.micro_batch):
        rows = []
        for index in range(begin, begin + options.micro_batch):
            place = (index * stride + options.seed) % num_rows * length
            rows.append(tokens[place : place + length + 1].astype(np.int64))
        yield torch.from_numpy(np.stack(rows))


def learning_rate(options: Options, step: int) -> float:
    """Linear warm-up over the first tenth, then a half cosine down to a tenth."""
    warmup = max(1, options.steps // 10)
    if step < warmup:
        return options.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, options.steps - warmup)
    return options.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def main(options: Options) -> None:
    options = replace(options, wandb=tracking.wandb_project(options.wandb))
    # Ranks: torchrun says how many there are, and how many share this node.
    start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    nodes = ranks // int(os.environ["LOCAL_WORLD_SIZE"])
    accumulate, rest = divmod(options.global_batch, ranks * options.micro_batch)
    if rest or not accumulate:
        raise RecipeError(
            f"Expected --global_batch to be a multiple of {ranks} ranks times --micro_batch "
            f"{options.micro_batch}, got {options.global_batch}."
        )
    tokens = load_tokens(options.tokens)
    if len(tokens) < 4 * options.seq_length:
        raise RecipeError(
            f"Expected at least 4 rows of --seq_length {options.seq_length}, got {len(tokens)} "
            "tokens."
        )
    out = Path(options.out)

    # Engine: this is all that shards the model.
    engine = ZeroEngine(
        ZeroConfig(
            stage=options.stage,
            replicate_size=options.replicas or nodes,
            param_dtype="bf16" if options.precision == "bf16" else None,
            activation_checkpointing=options.activation_checkpointing,
        ),
        listeners=default_listeners(),
    )
    model = engine.shard(build(options))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = engine.prepare_optimizer(
        torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True)
    )

    # Resume: from the newest checkpoint that is whole, whatever ended the run before.
    done = 0
    fixed = ("tokens", "global_batch", "seq_length", "seed")
    run = {name: getattr(options, name) for name in fixed}
    point = resume_point(out / "checkpoints")
    if point is not None:
        extra = engine.load(point.path, optimizers=[optimizer])
        if extra["run"] != run:
            raise RecipeError(
                f"Expected the options of the run in {out}, {extra['run']}, got {run}: its rows "
                "would be others. Use these, or another --out."
            )
        done = extra["step"]
    count = sum(parameter.numel() for parameter in model.parameters())
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        losses = out / "losses.jsonl"
        kept = [row for row in read(losses) if row["step"] <= done]
        losses.write_text("".join(json.dumps(row) + "\n" for row in kept))
        print(
            f"{count / 1e6:.2f} M parameters, ZeRO stage {options.stage}: "
            f"{engine.config.replicate_size} replicas over {engine.shard_size} ranks each, "
            f"{accumulate} micro-batches a step, from step {done}",
            flush=True,
        )
    sinks = [JsonlSink(out / "memory.jsonl", append=done > 0)]
    if options.wandb != "off" and rank == 0:
        import wandb

        mode = "online" if "WANDB_API_KEY" in os.environ else "offline"
        tracked = wandb.init(project=options.wandb, dir=out, mode=mode, config=asdict(options))
        sinks.append(WandbSink(tracked))
    memory = MemoryTracker(engine, sinks, first_step=done)

    # Train.
    begin = time.perf_counter()
    for step in range(done, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step)
        total = torch.zeros((), device=engine.device)
        for micro, rows in enumerate(window(tokens, options, step, rank, ranks)):
            rows = rows.to(engine.device)
            with engine.micro_step(last=micro == accumulate - 1):
                logits = model(input_ids=rows[:, :-1]).logits
                loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
                # Rows are of one length, so the mean of the means is the mean over all tokens.
                (loss / accumulate).backward()
            total += loss.detach() / accumulate
        norm = engine.clip_grad_norm(options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

        dist.all_reduce(total)
        row = {"step": step + 1, "loss": total.item() / ranks, "grad_norm": norm}
        if not math.isfinite(row["loss"]):  # the same on every rank
            raise RecipeError(f"Expected a finite loss, got {row['loss']} at step {step + 1}.")
        if rank == 0:
            now = time.perf_counter()
            row["tokens_per_second"] = options.global_batch * options.seq_length / (now - begin)
            begin = now
            with (out / "losses.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(" ".join(f"{name} {value:.6g}" for name, value in row.items()), flush=True)
        if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
            path = out / "checkpoints" / f"step-{step + 1:07d}"
            engine.save(path, optimizers=[optimizer], extra={"step": step + 1, "run": run})
            if rank == 0:
                for old in sorted((out / "checkpoints").glob("step-*"))[: -options.keep]:
                    shutil.rmtree(old)
    memory.close()

    # Say where everything is.
    if rank == 0:
        rows = read(out / "losses.jsonl")
        print(f"\nloss:       {rows[0]['loss']:.4f} first, {rows[-1]['loss']:.4f} last")
        print(f"checkpoint: {sorted((out / 'checkpoints').glob('step-*'))[-1]}")
        print(f"memory:     {out / 'memory.jsonl'}")
    dist.destroy_process_group()


def read(path: Path) -> list[dict[str, float]]:
    """The rows of losses.jsonl; none where there is no file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    try:
        main(auto_cli(Options, as_positional=False))
    except (RecipeError, shardplug.errors.ShardplugError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
