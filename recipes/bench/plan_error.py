"""Predicted against measured peak memory: what the plan says, and what the allocator handed out.

    python recipes/bench/plan_error.py --ranks 2 --size small
    python recipes/bench/plan_error.py --ranks 2 --size full --micro_batch 1

A Llama (full: 25 M parameters, small: 6 M), a vision transformer, and a Llama whose base is
frozen under low-rank adapters, at stages 1 to 3, with and without activation checkpointing,
micro-batch 1 and 4 and sequences of 128 and 512; `--size vocabulary` has a Llama with few tokens
and a large vocabulary, with and without tied weights, instead. Each case trains two steps with
AdamW; the peak is that of the second, on rank 0, counted at torch's CPU allocator from before the
model is built.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import os
import platform
import socket
import subprocess
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import MODEL_STATE_KINDS, CountedAllocations, plan

LLAMA = {  # size: vocabulary, width, inner width, blocks
    "tiny": (257, 64, 176, 3),
    "small": (2048, 256, 688, 6),
    "full": (2048, 512, 1376, 8),
    "vocabulary": (8191, 64, 176, 3),  # mostly the embedding and the head
}


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    model: str
    stage: int
    checkpointing: bool
    micro_batch: int
    seq_length: int
    accumulate: int = 1
    size: str = "full"
    offload_activations: Literal["none", "cpu"] = "none"


@dataclass(frozen=True)
class Result:
    """Bytes of the peak, and where the plan expects it."""

    measured: int
    predicted: int
    where: str

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


class LowRank(nn.Module):
    """A frozen linear layer and a trainable low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in_features)."""
        return self.base(x) + self.up(self.down(x))


def build(case: Case) -> nn.Module:
    """Build the model of a case, the same on every rank."""
    import transformers

    torch.manual_seed(0)
    vocabulary, width, inner, blocks = LLAMA[case.size]
    if case.model == "vit":
        side = {128: 44, 512: 88}[case.seq_length]  # 121 and 484 patches
        config = transformers.ViTConfig(
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            image_size=side,
            patch_size=4,
            num_labels=10,
        )
        return transformers.ViTForImageClassification(config).train()
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=blocks,
            num_attention_heads=8,
            num_key_value_heads=4,
            tie_word_embeddings=case.model == "tied",
            use_cache=False,
        )
    ).train()
    if case.model == "frozen":
        model.requires_grad_(False)
        for block in model.model.layers:
            block.self_attn.q_proj = LowRank(block.self_attn.q_proj)
            block.self_attn.v_proj = LowRank(block.self_attn.v_proj)
    return model


def batch_of(case: Case, model: Any) -> dict[str, torch.Tensor]:
    """Make the batch of one micro-batch."""
    if case.model == "vit":
        side = model.config.image_size
        images = torch.randn(case.micro_batch, 3, side, side)
        return {"pixel_values": images, "labels": torch.zeros(case.micro_batch, dtype=torch.int64)}
    tokens = torch.randint(0, LLAMA[case.size][0], (case.micro_batch, case.seq_length))
    return {"input_ids": tokens, "labels": tokens}


Books = dict[str, dict[str, int]]


def measure(case: Case) -> tuple[int, Books]:
    """Train two steps; return the second's peak bytes on this rank, and the engine's accounting."""
    states: Books = {}
    gc.collect()
    with CountedAllocations() as counted:
        config = ZeroConfig(
            stage=case.stage,  # type: ignore[arg-type]
            activation_checkpointing=case.checkpointing,
            offload_activations=case.offload_activations,
        )
        engine = ZeroEngine(config)
        model = engine.shard(build(case))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(trained))
        batch = batch_of(case, model)
        for step in range(2):
            with counted.stretch(f"step {step}"):
                for micro in range(case.accumulate):
                    with engine.micro_step(last=micro == case.accumulate - 1):
                        model(**batch).loss.backward()
                states["after_backward"] = engine.memory()
                optimizer.step()
                states["after_step"] = engine.memory()
                optimizer.zero_grad()
                states["at_rest"] = engine.memory()
    engine.forget(model)
    return counted.peak("step 1"), states


def predict(case: Case, ranks: int) -> tuple[Result, Books]:
    """Plan the same case; return the peak, and what is held at the ends of the phases."""
    model = build(case)
    found = plan(
        model,
        devices=ranks,
        device_memory_gib=64,
        micro_batch=case.micro_batch,
        seq_length=case.seq_length,
        accumulate=case.accumulate,
        precision="32-true",
        activation_checkpointing=case.checkpointing,
        offload_activations=case.offload_activations,
        stage=case.stage,  # type: ignore[arg-type]
        offload=False,
        device="cpu",
        loop="pytorch",
        batch=batch_of(case, model),
    )
    assert found.traced, found.notes
    timeline = found.choices[0].timeline
    peak = timeline.peak
    return Result(0, peak.total, f"{peak.phase} {peak.unit}"), timeline.phases


def run(case: Case) -> Result:
    """Measure and predict one case on every rank of the process group.

    Raises:
        RuntimeError: Where the engine's accounting are not the plan's to the byte.
    """
    measured, states = measure(case)
    if dist.get_rank():
        return Result(measured, measured, "")  # the plan is that of the rank that holds most
    found, phases = predict(case, dist.get_world_size())
    for phase, held in states.items():
        for kind in MODEL_STATE_KINDS:
            if held[kind] != phases[phase][kind]:
                raise RuntimeError(
                    f"Expected {phases[phase][kind]} bytes of {kind} {phase} in {case}, as "
                    f"planned, got {held[kind]}."
                )
    return Result(measured, found.predicted, found.where)


def cases(size: str, micro_batches: list[int]) -> Iterator[Case]:
    """Every cell of the table."""
    if size == "vocabulary":
        rows = itertools.product(("llama", "tied"), (1, 2, 3), micro_batches, (1, 3))
        for model, stage, micro_batch, accumulate in rows:
            yield Case(model, stage, False, micro_batch, 16, accumulate, size)
        return
    grid = itertools.product(
        (128, 512), micro_batches, ("llama", "vit", "frozen"), (1, 2, 3), (False, True)
    )
    for seq_length, micro_batch, model, stage, checkpointing in grid:
        yield Case(model, stage, checkpointing, micro_batch, seq_length, size=size)
    for model, stage in itertools.product(("llama", "frozen"), (1, 2, 3)):
        yield Case(model, stage, False, 1, 128, accumulate=3, size=size)


def rank_main(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    lines = [
        "| model | stage | recomputed | micro-batch | sequence | micro-batches | measured MiB "
        "| predicted MiB | error | peak in |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    for case in cases(options.size, options.micro_batch):
        found = run(case)
        errors.append(found.error)
        lines.append(
            f"| {case.model} | {case.stage} | {'yes' if case.checkpointing else 'no'} "
            f"| {case.micro_batch} | {case.seq_length} | {case.accumulate} "
            f"| {found.measured / 2**20:.2f} | {found.predicted / 2**20:.2f} "
            f"| {found.error:+.2%} | {found.where} |"
        )
        if rank == 0:
            print(lines[-1], flush=True)
    worst = max(errors, key=abs)
    if rank == 0:
        print(f"worst error {worst:+.2%} in {len(errors)} cases")
        if options.write:
            options.write.write_text(page("\n".join(lines), errors, options))
    dist.barrier()
    dist.destroy_process_group()


def page(table: str, errors: list[float], options: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    ordered = sorted(abs(error) for error in errors)
    return f"""# Predicted and measured peaks

- Command: `python recipes/bench/plan_error.py --ranks {options.ranks} --size {options.size}
  --micro_batch {" ".join(map(str, options.micro_batch))}`
- Commit: {commit or "unknown"}; torch {torch.__version__}, Python {platform.python_version()}
- Hardware: CPU ranks (bytes of tensors do not depend on it)
- Date: {datetime.date.today().isoformat()}
- Models, fp32, AdamW: a Llama, a ViT as deep and wide, and the Llama with its base frozen under
  low-rank adapters; vocabulary, width, inner width, blocks: {LLAMA[options.size]}
- Spread: median error {ordered[len(ordered) // 2]:.2%}, largest {ordered[-1]:.2%} of
  {len(ordered)} cases

Measured is the peak of the second optimizer step on rank 0, counted at torch's CPU allocator
(which sees buffers inside of kernels too). Predicted is `shardplug.memory.plan`, which runs
nothing.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=tuple(LLAMA), default="full")
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
