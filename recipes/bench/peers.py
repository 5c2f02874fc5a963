"""Training next to DDP, FSDP2, Lightning's, Accelerate's and DeepSpeed's own sharding, interleaved.

    python recipes/bench/peers.py --write docs/benchmarks/peers.md

The same 25 M parameter Llama, weights, data and AdamW everywhere, in fp32 on CPU ranks, one table
for each stage. All contenders of a stage live side by side, on ranks of their own, and take turns;
what counts are ratios within a round. DeepSpeed takes part where it is installed, with what it
compiles on first use: g++ and ninja. The contenders are in peers_contenders.py.

The run fails if the losses do not agree. What stands in the page from "What the numbers say" on is
written by hand, and kept.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

from peers_contenders import ACCELERATE, HAND, LIGHTNING, contenders
from step_contenders import BATCH, LENGTH
from turns import Contender

WORKER = Path(__file__).with_name("peers_contenders.py")
BY_HAND = "## What the numbers say"
LOSSES_AGREE = 1e-5
"""Largest relative difference of two losses at the same step."""

EXPLAINED = """\
Time is a step's wall time on the slower rank, from one batch to the next, so that what a framework
does around the loop is in it. "Time / theirs" is the median over the rounds of the ratio of their
medians, next to the smallest and the largest of them. Peaks (VmHWM) are of whole processes, the
libraries that each imports among it."""


@dataclass(frozen=True)
class Aim:
    """What a contender of ours is to take at most, of a peer's time."""

    ours: str
    peer: str
    at_most: float


def aims(stage: int) -> list[Aim]:
    ours = f"shardplug zero{stage}"
    return [
        Aim(ours, HAND, 1.02),
        Aim(ours, f"DeepSpeed stage {stage}", 0.9),
        Aim(f"{ours}, Lightning", LIGHTNING, 1.0),
        Aim(f"{ours}, Accelerate", ACCELERATE, 1.0),
    ]


def take_turns(stage: int, options: argparse.Namespace, logs: IO[str]) -> dict[str, Contender]:
    """Run all contenders of a stage, and return them with what they measured."""
    names = list(contenders(stage))
    if importlib.util.find_spec("deepspeed") is None:
        names = [name for name in names if not name.startswith("DeepSpeed")]
    running: dict[str, Contender] = {}
    try:
        for name in names:
            running[name] = Contender(name, WORKER, options.ranks, logs, [str(stage)])
        for one in running.values():
            one.wait_until_ready()
        for one in running.values():
            one.run(options.warmup, count_time=False)  # makes optimizer state
        for turn in range(options.rounds):
            order = list(running.values())
            for one in order if turn % 2 == 0 else order[::-1]:
                one.run(options.steps)
    finally:
        for one in running.values():
            one.close()
    return running


def by_round(ours: Contender, peer: Contender) -> list[float]:
    """The ratio of the two medians in each round."""
    pairs = zip(ours.turns, peer.turns, strict=True)
    return [statistics.median(a) / statistics.median(b) for a, b in pairs]


def rows(running: dict[str, Contender]) -> list[str]:
    lines = [
        "| contender | median s/step | min | max | CPU s | peak MiB a rank | first loss "
        "| last loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in running.values():
        seconds = [each for turn in one.turns for each in turn]
        lines.append(
            f"| {one.name} | {statistics.median(seconds):.3f} | {min(seconds):.3f} "
            f"| {max(seconds):.3f} | {statistics.median(one.cpu):.3f} | {one.peak:.0f} "
            f"| {one.losses[0]:.6f} | {one.losses[-1]:.6f} |"
        )
    return lines


def verdicts(stage: int, running: dict[str, Contender]) -> list[str]:
    lines = [
        "| ours | the peer | time / theirs | in the rounds | aim | | CPU / theirs "
        "| peak / theirs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for aim in aims(stage):
        ours, peer = running[aim.ours], running.get(aim.peer)
        if peer is None:
            lines.append(f"| {aim.ours} | {aim.peer} | | | {aim.at_most} | not installed | | |")
            continue
        ratios = by_round(ours, peer)
        ratio = statistics.median(ratios)
        cpu = statistics.median(ours.cpu) / statistics.median(peer.cpu)
        lines.append(
            f"| {aim.ours} | {aim.peer} | {ratio:.3f} | {min(ratios):.2f} to {max(ratios):.2f} "
            f"| {aim.at_most} | {'met' if ratio <= aim.at_most else '**missed**'} | {cpu:.3f} "
            f"| {ours.peak / peer.peak:.3f} |"
        )
    return lines


def disagreement(running: dict[str, Contender]) -> float:
    """The largest relative difference of a loss from DDP's at the same step."""
    base = running["DDP"].losses
    return max(
        abs(loss - expected) / expected
        for one in running.values()
        for loss, expected in zip(one.losses, base, strict=True)
    )


def page(tables: list[str], options: argparse.Namespace, loads: list[float], worst: float) -> str:
    import torch

    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ["lightning", "accelerate", "transformers"]
    if importlib.util.find_spec("deepspeed") is not None:
        packages.append("deepspeed")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    steps = options.warmup + options.rounds * options.steps
    return "\n".join(
        [
            "# Training next to the peers",
            "",
            f"- Command: `python recipes/bench/peers.py --ranks {options.ranks} "
            f"--rounds {options.rounds} --steps {options.steps} --warmup {options.warmup}`",
            f"- Commit: {commit or 'unknown'}; torch {torch.__version__}, "
            f"Python {platform.python_version()}, {versions}",
            f"- Hardware: {os.cpu_count()} cores ({platform.machine()}), no GPU; load average "
            f"{min(loads):.0f} to {max(loads):.0f} while it ran, of which its own ranks are "
            f"{options.ranks}",
            f"- Ranks: {options.ranks}, gloo over loopback, one thread a rank",
            f"- Date: {datetime.date.today().isoformat()}",
            f"- Model: Llama, 25.3 M parameters, fp32, fused AdamW, {BATCH} x {LENGTH} tokens "
            f"a rank; losses are those of step 1 and step {steps}",
            f"- Spread: minimum and maximum over {options.rounds} interleaved rounds of "
            f"{options.steps} steps",
            f"- Losses of all contenders, at all {steps} steps: within {worst:.1e} of DDP's, "
            "relative",
            *tables,
            "",
            EXPLAINED,
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4, help="steps of a contender per round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--stage", type=int, action="append", choices=[1, 2, 3])
    parser.add_argument("--write", type=Path, help="Markdown file for the tables")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the ranks print")
    options = parser.parse_args()
    tables: list[str] = []
    loads, worst = [os.getloadavg()[0]], 0.0
    with options.log.open("w") as logs:
        for stage in options.stage or [1, 2, 3]:
            running = take_turns(stage, options, logs)
            loads.append(os.getloadavg()[0])
            worst = max(worst, disagreement(running))
            found = ["", f"## Stage {stage}", "", *rows(running), "", *verdicts(stage, running)]
            print("\n".join(found), flush=True)
            tables += found
    if worst > LOSSES_AGREE:
        print(f"Expected losses within {LOSSES_AGREE} of each other, got {worst:.1e}.")
        return 1
    if options.write:
        old = options.write.read_text() if options.write.exists() else ""
        kept = old[old.index(BY_HAND) :] if BY_HAND in old else ""
        text = page(tables, options, loads, worst)
        options.write.write_text(f"{text}\n{kept}" if kept else text)
        print(f"written to {options.write}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
