"""CPU time of an optimizer step in a tier, against fused AdamW on the same shard.

    python recipes/bench/offload_small.py --nvme-path /mnt/nvme

Models of many small parameters, fp32, `AdamW(fused=True)`, on one rank and on two. Every rank holds
the contenders side by side: torch's own optimizer over plain tensors of its shard's sizes,
shardplug's with the state on the device, in CPU memory, and in files. They take turns within each
round. CPU time is that of all threads of the process, so a busy machine changes it little; a ratio
is the median over rounds of a contender's time over that of torch's in the same round. Ranks are
averaged.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import laid_out_like, local_tensor

TIERS = {"none": "device", "cpu": '"cpu"', "nvme": '"nvme"'}
SHAPES = {"512 of 64 k": (512, 2**16), "32 of 1 M": (32, 2**20)}


def plain(count: int, numel: int, world_size: int) -> torch.optim.Optimizer:
    """torch's optimizer over tensors of this rank's sizes."""
    rows = [torch.randn(64 // world_size, numel // 64) * 0.02 for _ in range(count)]
    return torch.optim.AdamW(map(nn.Parameter, rows), lr=1e-4, fused=True)


def sharded(
    tier: str, path: str, count: int, numel: int
) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    """The engine's optimizer over as many parameters."""
    files = {"nvme_path": path} if tier == "nvme" else {}
    engine = ZeroEngine(ZeroConfig(stage=1, offload_optimizer=tier, **files))  # type: ignore[arg-type]
    model = nn.Module()
    model.weights = nn.ParameterList(torch.randn(64, numel // 64) * 0.02 for _ in range(count))
    model = engine.shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return engine, engine.prepare_optimizer(optimizer)


def cpu_time(optimizer: torch.optim.Optimizer) -> float:
    """Step once with new gradients; return the CPU seconds of the step alone."""
    for parameter in optimizer.param_groups[0]["params"]:
        if isinstance(parameter, DTensor):
            # As FSDP2 makes it: with no view of autograd below it.
            local = torch.full_like(local_tensor(parameter), 1e-3)
            parameter.grad = laid_out_like(local, parameter)
        else:
            parameter.grad = torch.full_like(parameter, 1e-3)
    begin = time.process_time()
    optimizer.step()
    used = time.process_time() - begin
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = None
    return used


def worker(
    rank: int, world_size: int, store: str, args: argparse.Namespace, shape: tuple[int, int]
) -> None:
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    runs = {tier: sharded(tier, args.nvme_path, *shape) for tier in TIERS}
    steps: dict[str, Callable[[], float]] = {
        tier: lambda optimizer=optimizer: cpu_time(optimizer)
        for tier, (_, optimizer) in runs.items()
    }
    own = plain(*shape, world_size)
    times: dict[str, list[float]] = {"torch": [], **{tier: [] for tier in TIERS}}
    for number in range(args.rounds + 2):
        for name in times:
            used = cpu_time(own) if name == "torch" else steps[name]()
            if number >= 2:  # the first makes the state
                times[name].append(used)
    figures = [statistics.median(times["torch"])] + [
        statistics.median(
            used / base for used, base in zip(times[tier], times["torch"], strict=True)
        )
        for tier in TIERS
    ]
    gathered: list[list[float]] = [[] for _ in range(world_size)]
    dist.all_gather_object(gathered, figures)
    if rank == 0:
        base, *ratios = map(statistics.fmean, zip(*gathered, strict=True))
        found = "  ".join(f"{TIERS[t]} {r:.2f}" for t, r in zip(TIERS, ratios, strict=True))
        print(f"{1000 * base:6.1f} ms by torch; times that: {found}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nvme-path", required=True)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    for name, shape in SHAPES.items():
        for world_size in (1, 2):
            print(f"{name} on {world_size} rank(s): ", end="", flush=True)
            with tempfile.TemporaryDirectory() as folder:
                store = os.path.join(folder, "store")
                mp.spawn(worker, (world_size, store, args, shape), nprocs=world_size)


if __name__ == "__main__":
    main()
