"""Time of an optimizer step with its state on the device, in CPU memory, in files and in both.

    python recipes/bench/offload.py --nvme-path /mnt/nvme --parameters 100m --rounds 5

One process, fp32, `AdamW(fused=True)`. "half" is "nvme" with `offload_cpu_gib` for half of the
state. The kinds take turns within each round, and so does
the drive alone (the same bytes read and written by the tier's own calls), so that a busy machine
slows all of them. Prints medians, and for "nvme" the share of the drive's bandwidth.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.tiers.probe import probe_disk

ROWS = 4096


def build(num_parameters: int) -> nn.Module:
    """A model of that many parameters in matrices of 16.8 M; its forward is not of interest."""
    model = nn.Module()
    width = 4096
    count = max(1, round(num_parameters / (ROWS * width)))
    model.weights = nn.ParameterList(torch.randn(ROWS, width) * 0.02 for _ in range(count))
    return model


def prepare(tier: str, path: str, num_parameters: int) -> tuple[ZeroEngine, torch.optim.Optimizer]:
    """Shard the model over the one rank, and give it an optimizer."""
    in_files = {"offload_optimizer": "nvme", "nvme_path": path}
    fields = {
        "nvme": in_files,
        "half": {**in_files, "offload_cpu_gib": 4 * num_parameters / 2**30},
    }.get(tier, {"offload_optimizer": tier})
    engine = ZeroEngine(ZeroConfig(stage=1, **fields))  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = engine.shard(build(num_parameters))
    return engine, engine.prepare_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    )


def step(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> float:
    """Step once with new gradients; return the seconds of the step alone."""
    for parameter, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
    begin = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begin


def resident_mib() -> float:
    """Private memory of this process, MiB."""
    with open("/proc/self/status") as file:
        return int(file.read().split("RssAnon:")[1].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nvme-path", required=True)
    parser.add_argument(
        "--parameters", type=lambda t: int(float(t.rstrip("mM")) * 1e6), default="100m"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    runs = {}
    for tier in ("none", "cpu", "nvme", "half"):
        before = resident_mib()
        runs[tier] = prepare(tier, args.nvme_path, args.parameters)
        parameters = runs[tier][1].param_groups[0]["params"]
        gradients = [torch.full_like(p, 1e-3) for p in parameters]
        step(runs[tier][1], gradients)  # makes the state
        for parameter in parameters:
            parameter.grad = None
        del gradients
        count = sum(p.numel() for p in parameters)
        state = resident_mib() - before - 4 * count / 2**20
        print(f"{tier:5} {count / 1e6:.0f} M parameters, {state:.0f} MiB of memory besides weights")

    times: dict[str, list[float]] = {tier: [] for tier in (*runs, "drive")}
    for _ in range(args.rounds):
        for tier, (_, optimizer) in runs.items():
            parameters = optimizer.param_groups[0]["params"]
            gradients = [torch.full_like(p, 1e-3) for p in parameters]
            times[tier].append(step(optimizer, gradients))
            for parameter in parameters:
                parameter.grad = None
            del gradients
        moved = runs["nvme"][0].traffic()
        drive = probe_disk(args.nvme_path, 2**30)
        times["drive"].append(
            moved["bytes_read"] / drive.read_bytes_per_second
            + moved["bytes_written"] / drive.write_bytes_per_second
        )
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, seconds in times.items():
        print(f"{name:5} {medians[name]:.3f} s  " + " ".join(f"{s:.3f}" for s in seconds))
    print(f"cpu / none    {medians['cpu'] / medians['none']:.3f}")
    print(f"half / nvme   {medians['half'] / medians['nvme']:.3f}")
    print(f"drive / nvme  {medians['drive'] / medians['nvme']:.3f}")
    print(
        f"nvme moved    {moved['bytes_read']} bytes read, {moved['bytes_written']} written, "
        f"waited {moved['waited_seconds']:.2f} s"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
