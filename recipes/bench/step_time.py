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
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step_contenders import (
    BATCH,
    LENGTH,
    Seconds,
    Steps,
    accelerate,
    ddp,
    engine,
    fsdp2,
    lightning,
    our_accelerator,
    timed,
)

BASE = {"zero1": "fsdp2 by hand, kept", "zero2": "fsdp2 by hand, kept", "zero3": "fsdp2 by hand"}

CONTENDERS: dict[str, Callable[[], Steps]] = {
    "ddp": lambda: timed(ddp()),
    "fsdp2 by hand, kept": lambda: timed(fsdp2(reshard=False)),
    "fsdp2 by hand": lambda: timed(fsdp2(reshard=True)),
    "shardplug zero1": lambda: timed(engine(1)),
    "shardplug zero2": lambda: timed(engine(2)),
    "shardplug zero3": lambda: timed(engine(3)),
    "Lightning zero2": lambda: lightning(2),
    "Lightning zero3": lambda: lightning(3),
    "Accelerate zero2": lambda: timed(accelerate(our_accelerator(2))),
    "Accelerate zero3": lambda: timed(accelerate(our_accelerator(3))),
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
