"""Offloading next to DeepSpeed ZeRO-Offload and ZeRO-Infinity, on CPU ranks, interleaved.

    python recipes/bench/against_deepspeed.py --nvme-path DIR --rounds 4 --steps 5

Needs DeepSpeed, and what it compiles on first use: g++, ninja and, for files, libaio's headers.
Each pair is two groups of processes that live side by side and take turns, a few steps each, so
that a change of the machine's load meets both; memory is each process's own peak (VmHWM). The
contenders are in offload_contenders.py. A pair whose tiers this version refuses is left out.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import IO

from offload_contenders import BATCH, LENGTH, OURS
from turns import Contender

WORKER = Path(__file__).with_name("offload_contenders.py")

PAIRS = [
    ("zero2_cpu", "ZeRO-Offload, stage 2"),
    ("zero3_cpu", "ZeRO-Offload, stage 3"),
    ("zero3, optimizer in files", "ZeRO-Infinity, optimizer"),
    ("zero3, optimizer in files", "ZeRO-Infinity, optimizer, small groups"),
    ("zero3_infinity", "ZeRO-Infinity"),
    ("zero3_infinity", "ZeRO-Infinity, fitted buffers"),
]


def compare(ours: str, theirs: str, options: argparse.Namespace, logs: IO[str]) -> list[str]:
    """Run one pair, and return its two rows."""
    pair: list[Contender] = []
    folder = tempfile.mkdtemp(dir=options.nvme_path)
    try:
        for name in (ours, theirs):
            files = Path(folder, name)
            files.mkdir()
            pair.append(Contender(name, WORKER, options.ranks, logs, [str(files)]))
            pair[-1].wait_until_ready()
        for one in pair:
            one.run(options.warmup, count_time=False)  # makes optimizer state
        for turn in range(options.rounds):
            for one in pair if turn % 2 == 0 else pair[::-1]:
                one.run(options.steps)
    finally:
        for one in pair:
            one.close()
        shutil.rmtree(folder, ignore_errors=True)
    rows = []
    for one in pair:
        seconds = [each for turn in one.turns for each in turn]
        median, cpu = statistics.median(seconds), statistics.median(one.cpu)
        ratios = ["", "", ""]
        if one is pair[0]:
            other = pair[1]
            rounds = zip(one.turns, other.turns, strict=True)
            by_round = [statistics.median(a) / statistics.median(b) for a, b in rounds]
            ratios = [
                f"{statistics.median(by_round):.3f}",
                f"{cpu / statistics.median(other.cpu):.3f}",
                f"{one.peak / other.peak:.3f}",
            ]
        rows.append(
            f"| {one.name} | {median:.3f} | {min(seconds):.3f} | {max(seconds):.3f} "
            f"| {cpu:.3f} | {one.peak:.0f} | {one.losses[0]:.6f} | {one.losses[-1]:.6f} "
            f"| {' | '.join(ratios)} |"
        )
        print(rows[-1], flush=True)
    return rows


def available(name: str) -> bool:
    """Whether this version of shardplug has the tiers that a contender needs."""
    from shardplug import ConfigError, ZeroConfig

    try:
        ZeroConfig(**OURS[name])
    except ConfigError as error:
        print(f"{name} is left out: {error}")
        return False
    return True


HEAD = [
    "| contender | median s/step | min | max | CPU s | peak MiB a rank | first loss | last loss "
    "| time / theirs | CPU / theirs | peak / theirs |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def page(rows: list[str], options: argparse.Namespace, loads: list[float]) -> str:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    steps = options.warmup + options.rounds * options.steps
    return "\n".join(
        [
            "# Offloading next to DeepSpeed",
            "",
            f"- Command: `python recipes/bench/against_deepspeed.py --nvme-path DIR "
            f"--ranks {options.ranks} --rounds {options.rounds} --steps {options.steps}`",
            f"- Commit: {commit or 'unknown'}; torch {torch.__version__}, "
            f"Python {platform.python_version()}, DeepSpeed {options.deepspeed_version}",
            f"- Hardware: {os.cpu_count()} cores ({platform.machine()}), no GPU; load average "
            f"{min(loads):.0f} to {max(loads):.0f} while it ran",
            f"- Ranks: {options.ranks}, gloo over loopback, one thread a rank",
            f"- Date: {datetime.date.today().isoformat()}",
            f"- Model: Llama, 25.3 M parameters, fp32, AdamW, {BATCH} x {LENGTH} tokens a rank; "
            f"losses are those of step 1 and step {steps}",
            f"- Spread: minimum and maximum over {options.rounds} rounds of {options.steps} steps; "
            "each pair ran interleaved",
            "",
            *HEAD,
            *rows,
            "",
            '"Time / theirs" is the median over the rounds of the ratio of their medians.',
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nvme-path", required=True, help="folder on the drive to be used")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="steps of a contender per round")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--only", action="append", choices=list(OURS))
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the ranks print")
    options = parser.parse_args()
    from importlib.metadata import version

    options.deepspeed_version = version("deepspeed")
    names = [name for name in OURS if not options.only or name in options.only]
    usable = {name for name in names if available(name)}
    rows, loads = [], [os.getloadavg()[0]]
    print("\n".join(HEAD))
    with options.log.open("w") as logs:
        for ours, theirs in PAIRS:
            if ours in usable:
                rows += compare(ours, theirs, options, logs)
                loads.append(os.getloadavg()[0])
    if options.write:
        options.write.write_text(page(rows, options, loads))
        print(f"written to {options.write}")


if __name__ == "__main__":
    main()
