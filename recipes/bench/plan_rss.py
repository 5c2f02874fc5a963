"""Predicted peak against the memory that the system counts for a CPU rank.

    python recipes/bench/plan_rss.py --ranks 2 --size full --micro_batch 1 4

Each case runs in fresh processes. The base of a process is its resident set size after the
libraries were loaded, the process group was made, and a tiny model of the same kind trained a
step; what the case adds is the high-water mark of its second step less the base. Models and cases
are those of plan_error.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import socket
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from recipes.bench.plan_error import LLAMA, Case, batch_of, build, predict
from shardplug import ZeroConfig, ZeroEngine


def resident(field: str) -> int:
    """Read a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"Expected {field} in /proc/self/status: this needs Linux.")


def train(case: Case) -> int:
    """Train two steps; return the highest resident set size of the second."""
    config = ZeroConfig(
        stage=case.stage,  # type: ignore[arg-type]
        activation_checkpointing=case.checkpointing,
    )
    engine = ZeroEngine(config)
    model = engine.shard(build(case))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(trained))
    batch = batch_of(case, model)
    for step in range(2):
        if step:
            Path("/proc/self/clear_refs").write_text("5")  # the mark starts at what is there now
        for micro in range(case.accumulate):
            with engine.micro_step(last=micro == case.accumulate - 1):
                model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.forget(model)
    return resident("VmHWM")


def rank_main(rank: int, case: Case, ranks: int, port: int, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    train(dataclasses.replace(case, size="tiny", micro_batch=1, seq_length=128))
    gc.collect()
    base = resident("VmRSS")
    high = train(case)
    if rank == 0:
        results.put((base, high, predict(case, ranks)[0].predicted))
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, ranks: int) -> tuple[int, int, int]:
    """Return base, high-water mark and prediction, in bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, args=(case, ranks, port, results), nprocs=ranks)
    found: tuple[int, int, int] = results.get()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=tuple(LLAMA), default="full")
    parser.add_argument("--micro_batch", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seq_length", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--model", nargs="+", default=["llama", "vit", "frozen"])
    parser.add_argument("--stage", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--mmap_threshold",
        type=int,
        metavar="BYTES",
        help="set glibc's MALLOC_MMAP_THRESHOLD_, so that larger pieces go back when freed",
    )
    options = parser.parse_args()
    if options.mmap_threshold is not None:  # read as a process starts, so by the ranks
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(options.mmap_threshold)
    print(
        "| model | stage | recomputed | micro-batch | sequence | base MiB | measured over it, MiB "
        "| predicted MiB | error |\n|---|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    grid = itertools.product(
        options.seq_length, options.micro_batch, options.model, options.stage, (False, True)
    )
    errors = []
    for seq_length, micro_batch, model, stage, checkpointing in grid:
        case = Case(model, stage, checkpointing, micro_batch, seq_length, size=options.size)
        base, high, predicted = measure(case, options.ranks)
        errors.append(predicted / (high - base) - 1)
        print(
            f"| {model} | {stage} | {'yes' if checkpointing else 'no'} | {micro_batch} "
            f"| {seq_length} | {base / 2**20:.0f} | {(high - base) / 2**20:.1f} "
            f"| {predicted / 2**20:.1f} | {errors[-1]:+.1%} |",
            flush=True,
        )
    ordered = sorted(abs(error) for error in errors)
    print(f"median error {ordered[len(ordered) // 2]:.1%}, largest {ordered[-1]:.1%}")


if __name__ == "__main__":
    main()
