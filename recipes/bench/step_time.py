"""Step time of shardplug next to DDP and hand-written FSDP2, on CPU ranks, interleaved.

    python recipes/bench/step_time.py --rounds 4 --steps 6 --write docs/benchmarks/step_time.md

All contenders live in the same processes and take turns, a few steps each, so that a change of the
machine's load meets all of them; what counts are ratios of medians within one run. The model is a
25 M parameter Llama in fp32 (bf16 has no hardware on most CPUs), 2 x 128 tokens a rank.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

VOCAB, LENGTH, BATCH = 2048, 128, 2
BASE = {"zero1": "fsdp2 by hand, kept", "zero2": "fsdp2 by hand, kept", "zero3": "fsdp2 by hand"}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


Seconds = tuple[float, float]
"""Wall seconds and CPU seconds of this process, all its threads."""

Steps = Callable[[int], list[Seconds]]
"""Runs so many steps and returns what each took."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds, end: Seconds) -> Seconds:
    return end[0] - start[0], end[1] - start[1]


def timed(step: Callable[[torch.Tensor], None]) -> Steps:
    def run(count: int) -> list[Seconds]:
        times = []
        for index in range(count):
            tokens = batch(index)
            start = now()
            step(tokens)
            times.append(since(start, now()))
        return times

    return run


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Steps:
    def step(tokens: torch.Tensor) -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def ddp() -> Steps:
    model = nn.parallel.DistributedDataParallel(llama(), gradient_as_bucket_view=True)
    return plain_step(model, adamw(model))


def fsdp2(reshard: bool) -> Steps:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama()
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return plain_step(model, adamw(model))


def engine(stage: int) -> Steps:
    from shardplug import ZeroConfig, ZeroEngine

    zero = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = zero.shard(llama())
    optimizer = zero.prepare_optimizer(adamw(model))

    def step(tokens: torch.Tensor) -> None:
        with zero.micro_step():
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def lightning(stage: int) -> Steps:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    import shardplug  # noqa: F401  (registers the strategies)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.ticks: list[Seconds] = []

        def on_train_batch_start(self, *args: object) -> None:
            self.ticks.append(now())

        def on_train_end(self, *args: object) -> None:
            self.ticks.append(now())

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (batch(index) for index in range(1_000_000))

    module = Module()

    def run(count: int) -> list[Seconds]:
        clock = Clock()
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=f"zero{stage}",
            plugins=[TorchElasticEnvironment()],
            max_steps=count + 1,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
        ticks = clock.ticks[1:]  # the first step makes optimizer state
        return [since(start, end) for start, end in zip(ticks, ticks[1:], strict=False)]

    return run


def accelerate(stage: int) -> Steps:
    from shardplug.accelerate import Accelerator

    accelerator = Accelerator(zero=f"zero{stage}", cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(tokens: torch.Tensor) -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
            optimizer.step()
            optimizer.zero_grad()

    return timed(step)


CONTENDERS: dict[str, Callable[[], Steps]] = {
    "ddp": ddp,
    "fsdp2 by hand, kept": lambda: fsdp2(reshard=False),
    "fsdp2 by hand": lambda: fsdp2(reshard=True),
    "shardplug zero1": lambda: engine(1),
    "shardplug zero2": lambda: engine(2),
    "shardplug zero3": lambda: engine(3),
    "Lightning zero2": lambda: lightning(2),
    "Lightning zero3": lambda: lightning(3),
    "Accelerate zero2": lambda: accelerate(2),
    "Accelerate zero3": lambda: accelerate(3),
}


def rank_main(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks), GROUP_RANK="0",
        LOCAL_WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = [name for name in CONTENDERS if not options.only or name in options.only]
    contenders = {name: CONTENDERS[name]() for name in names}
    times: dict[str, list[Seconds]] = {name: [] for name in names}
    for run in contenders.values():  # warm-up: optimizer state, lazy initialisation
        run(2)
    for _ in range(options.rounds):
        for name, run in contenders.items():
            dist.barrier()
            times[name] += run(options.steps)
    if rank == 0:
        report(times, options)
    dist.barrier()
    dist.destroy_process_group()


def report(times: dict[str, list[Seconds]], options: argparse.Namespace) -> None:
    medians = {name: statistics.median(wall for wall, _ in rows) for name, rows in times.items()}
    lines = [
        "| contender | median s/step | min | max | CPU s | / DDP | / its base |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in times.items():
        values = [wall for wall, _ in rows]
        cpu = statistics.median(seconds for _, seconds in rows)
        kind, _, stage = name.partition(" zero")
        base = {"shardplug": BASE.get(f"zero{stage}", "")}.get(kind, f"shardplug zero{stage}")
        ratio = f"{medians[name] / medians[base]:.3f}" if base in medians and stage else ""
        over_ddp = f"{medians[name] / medians['ddp']:.3f}" if "ddp" in medians else ""
        lines.append(
            f"| {name} | {medians[name]:.3f} | {min(values):.3f} | {max(values):.3f} "
            f"| {cpu:.3f} | {over_ddp} | {ratio} |"
        )
    table = "\n".join(lines)
    print(table)
    if options.write:
        options.write.write_text(page(table, options))
        print(f"written to {options.write}")


def page(table: str, options: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = f"python recipes/bench/step_time.py --ranks {options.ranks} --rounds {options.rounds}"
    return f"""# Step time on CPU ranks

- Command: `{command} --steps {options.steps}`
- Commit: {commit or "unknown"}; torch {torch.__version__}, Python {platform.python_version()}
- Hardware: {os.cpu_count()} cores ({platform.machine()}), no GPU
- Ranks: {options.ranks}, gloo over loopback, one thread a rank
- Date: {datetime.date.today().isoformat()}
- Model: Llama, 25.3 M parameters, fp32, fused AdamW, {BATCH} x {LENGTH} tokens a rank
- Spread: minimum and maximum over {options.rounds} interleaved rounds of {options.steps} steps

{table}

"Its base" is the hand-written FSDP2 loop of the same schedule for the engine ("kept" leaves
parameters gathered between forward and backward, as stages 1 and 2 do), and the engine's own loop
for Lightning and Accelerate.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6, help="steps of a contender per round")
    parser.add_argument("--only", action="append", choices=list(CONTENDERS))
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    sys.exit(main())
