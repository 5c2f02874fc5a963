"""Training over a slow link between two nodes of two ranks, next to FSDP2 by hand.

    python recipes/bench/between_nodes.py --write docs/benchmarks/between_nodes.md

The nodes are two network namespaces on this machine, for which it takes root; without it the
benchmark says so and ends. The contenders live in the same four processes and take turns, so that
a change of the machine's load meets all of them. Bytes and packets are those that leave the first
node, read from its device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from two_nodes import ADDRESSES, DEVICE, Link, Nodes, Unavailable, two_nodes

RANKS_PER_NODE = 2
WORLD_SIZE = 2 * RANKS_PER_NODE
WIDTH, BLOCKS, ROWS = 192, 6, 64
LINKS = (Link("100 Mbit/s", megabits=100.0), Link("20 ms each way", delay=0.02))
BASE = {
    "shardplug zero1": "fsdp2 by hand, kept",
    "shardplug zero2": "fsdp2 by hand, kept",
    "shardplug zero3": "fsdp2 by hand",
    "shardplug zero3, 2 replicas": "fsdp2 by hand, 2 replicas",
}
_LONGEST = 600.0  # seconds that a link's ranks may take in all

Step = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A residual block of two matrices, 4 WIDTH^2 elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (rows, WIDTH) -> (rows, WIDTH)."""
        y: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + y


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 8))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def by_hand(reshard: bool, replicas: int = 1) -> Step:
    from torch.distributed.fsdp import fully_shard

    model = _model()
    shape, names = (WORLD_SIZE,), ("shard",)
    if replicas > 1:
        shape, names = (replicas, WORLD_SIZE // replicas), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (*model[:-1], model):
        fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    return _step(model, torch.optim.AdamW(model.parameters(), fused=True))


def engine(stage: int, replicas: int = 1) -> Step:
    from shardplug import ZeroConfig, ZeroEngine

    model = _model()
    zero = ZeroEngine(ZeroConfig(stage=stage, replicate_size=replicas, units=("Block",)))
    zero.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return _step(model, zero.prepare_optimizer(optimizer))


CONTENDERS: dict[str, Callable[[], Step]] = {
    "fsdp2 by hand, kept": lambda: by_hand(reshard=False),
    "shardplug zero1": lambda: engine(1),
    "shardplug zero2": lambda: engine(2),
    "fsdp2 by hand": lambda: by_hand(reshard=True),
    "shardplug zero3": lambda: engine(3),
    "fsdp2 by hand, 2 replicas": lambda: by_hand(reshard=True, replicas=2),
    "shardplug zero3, 2 replicas": lambda: engine(3, replicas=2),
}


# ------------------------------------------------------------------ a rank


def _sent() -> tuple[int, int]:
    """Bytes and packets that have left this node."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            fields = numbers.split()
            return int(fields[8]), int(fields[9])
    raise RuntimeError(f"{DEVICE} is gone")


def rank_main(options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    names = [name for name in CONTENDERS if not options.only or name in options.only]
    contenders = {name: CONTENDERS[name]() for name in names}
    rows: dict[str, list[tuple[float, int, int]]] = {name: [] for name in names}
    losses: dict[str, float] = {}
    batch = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(rank))
    for turn in range(options.rounds + 1):  # the first makes optimizer state
        for name, step in contenders.items():
            dist.barrier()
            begin, before = time.perf_counter(), _sent()
            for _ in range(options.steps):
                losses[name] = step(batch).item()
            dist.barrier()
            seconds, after = time.perf_counter() - begin, _sent()
            if turn:
                counts = (after[0] - before[0], after[1] - before[1])
                rows[name].append((seconds / options.steps, *(n // options.steps for n in counts)))
    if rank == 0:
        print(json.dumps({"rows": rows, "losses": losses}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------ the parent


@contextlib.contextmanager
def _ranks(nodes: Nodes, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Start all ranks; yield the first. They are ended at the end."""
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(WORLD_SIZE):
            node, local = divmod(rank, RANKS_PER_NODE)
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(local), "GROUP_RANK": str(node),
                "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(RANKS_PER_NODE),
                "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": DEVICE, "TP_SOCKET_IFNAME": DEVICE,
            }  # fmt: skip
            command = [*nodes.inside(node), sys.executable, __file__, *arguments, "--rank"]
            out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            started.append(subprocess.Popen(command, env=environment, stdout=out, text=True))
        yield started[0]
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(link: Link, arguments: list[str]) -> dict[str, Any]:
    """Run all contenders over one link."""
    with two_nodes(link) as nodes, _ranks(nodes, arguments) as first:
        printed, _ = first.communicate(timeout=_LONGEST)
        if first.returncode:
            raise SystemExit("A rank failed; its error is above.")
        return {**json.loads(printed.splitlines()[-1]), "limited_by": nodes.limited_by}


def table(link: Link, found: dict[str, Any]) -> list[str]:
    """Write one link's rows."""
    lines = [
        "", f"## {link.name}", "", f"Made by {found['limited_by']}.", "",
        "| contender | median s/step | min | max | / its base | KB/step | packets/step | loss |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    rows: dict[str, list[list[float]]] = found["rows"]
    median = {name: statistics.median(row[0] for row in turns) for name, turns in rows.items()}
    for name, turns in rows.items():
        seconds = [row[0] for row in turns]
        base = median.get(BASE.get(name, ""))
        ratio = f"{median[name] / base:.2f}" if base else ""
        sent = [statistics.median(row[column] for row in turns) for column in (1, 2)]
        lines.append(
            f"| {name} | {median[name]:.3f} | {min(seconds):.3f} | {max(seconds):.3f} | {ratio} "
            f"| {sent[0] / 1e3:.0f} | {sent[1]:.0f} | {found['losses'][name]:.6f} |"
        )
    return lines


def report(results: list[tuple[Link, dict[str, Any]]], options: argparse.Namespace) -> str:
    """Write the page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    size = sum(parameter.numel() for parameter in _model().parameters())
    lines = [
        "# Over a slow link between nodes",
        "",
        f"- Command: `python recipes/bench/between_nodes.py --rounds {options.rounds} "
        f"--steps {options.steps}`",
        f"- Commit: {commit}; torch {torch.__version__}, Python {platform.python_version()}",
        f"- Hardware: {os.cpu_count()} cores ({platform.machine()}), no GPU; load at the start "
        f"{options.load:.1f}",
        "- Ranks: 2 nodes (network namespaces) of 2, gloo, one thread a rank",
        f"- Date: {datetime.date.today()}",
        f"- Model: {BLOCKS} blocks, {size / 1e6:.1f} M parameters, fp32, fused AdamW",
        f"- Spread: minimum and maximum over {options.rounds} interleaved rounds of "
        f"{options.steps} steps",
    ]
    for link, found in results:
        lines += table(link, found)
    lines += [
        "",
        '"Its base" is the hand-written FSDP2 loop of the same schedule ("kept" leaves',
        "parameters gathered between forward and backward, as stages 1 and 2 do; with 2 replicas",
        "each node has a whole copy). KB and packets, of at most 9000 bytes each, are those that",
        "leave the first node in a step.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", action="append", help="contenders, instead of all")
    parser.add_argument("--link", choices=[link.name for link in LINKS], action="append")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clean up as after Ctrl-C
    options.load = os.getloadavg()[0]
    results = []
    for link in LINKS:
        if options.link and link.name not in options.link:
            continue
        try:
            results.append((link, measure(link, sys.argv[1:])))
        except Unavailable as reason:
            print(f"Skipped: two network namespaces cannot be made here: {reason}")
            return
    page = report(results, options)
    print(page)
    if options.write:
        options.write.write_text(page)


if __name__ == "__main__":
    main()
