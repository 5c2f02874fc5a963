"""What the memory curve costs: steps with and without it, side by side in one run.

    python recipes/bench/curve_cost.py --ranks 2 --rounds 6 --steps 5

The same engine trains the 25 M parameter Llama of step_contenders.py, a few steps with the tracker
and a few without, in turns. With it every step is logged on every rank: memory by kind with the
plan beside, tokens per second and MFU, to JSON lines, a picture and an offline W&B run. A step's
time varies by more than one hundredth, so the time spent inside of the tracker is measured too: all
its calls, waiting for the slower rank in its all-gather included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.bench.step_contenders import adamw, batch, llama
from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import JsonlSink, MemoryTracker, PngSink, WandbSink


class Stopwatch:
    """Adds up the wall and CPU time of calls of this thread."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.wall += time.perf_counter() - wall
                self.cpu += time.thread_time() - cpu

        return timed


class Watched:
    """An engine whose listener is timed; everything else is the engine's."""

    def __init__(self, engine: ZeroEngine, watch: Stopwatch) -> None:
        self._engine, self._watch = engine, watch
        self._timed: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_phase_listener(self, listener: Callable[[str], None]) -> None:
        self._timed[listener] = self._watch.around(listener)
        self._engine.add_phase_listener(self._timed[listener])

    def remove_phase_listener(self, listener: Callable[[str], None]) -> None:
        self._engine.remove_phase_listener(self._timed.pop(listener))


def sinks(folder: Path, rank: int) -> list[Any]:
    made: list[Any] = [JsonlSink(folder / "memory.jsonl"), PngSink(folder / "memory.png")]
    if rank == 0:
        import wandb

        made.append(WandbSink(wandb.init(project="cost", dir=folder), host_passes_step=False))
    return made


def rank_main(rank: int, options: argparse.Namespace, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    engine = ZeroEngine(ZeroConfig(stage=options.stage))
    model = engine.shard(llama())
    optimizer = engine.prepare_optimizer(adamw(model))

    def step(index: int) -> float:
        tokens = batch(index)
        start = time.perf_counter()
        with engine.micro_step():
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    plain, curve, inside, cpu = [], [], [], []
    first, done = 0.0, 0
    made = sinks(Path(folder), rank)
    for index in range(3):
        step(index)
    for round_number in range(options.rounds):
        plain += [step(index) for index in range(options.steps)]
        watch = Stopwatch()
        tracker = MemoryTracker(
            Watched(engine, watch),  # type: ignore[arg-type]
            made,
            first_step=done,
            peak_tflops=options.peak_tflops,
        )
        planning = step(0)  # makes the plan: counted by itself
        if round_number == 0:
            first = planning
        for index in range(options.steps):
            before = watch.wall, watch.cpu
            curve.append(step(index))
            inside.append(watch.wall - before[0])
            cpu.append(watch.cpu - before[1])
        last, done = tracker.last_rows, tracker.step
        if round_number < options.rounds - 1:
            tracker._sinks = []  # they go on in the next round
        tracker.close()
    if rank == 0:
        found = {
            "plain": plain,
            "curve": curve,
            "inside": inside,
            "cpu": cpu,
            "first": first,
            "row": last[-1].by_cost,
            "load": os.getloadavg()[0],
        }
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def page(found: dict[str, Any], options: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    base = statistics.median(found["plain"])
    names = {
        "plain": "step without",
        "curve": "step with",
        "inside": "inside the tracker, wall",
        "cpu": "inside the tracker, CPU",
    }
    rows = "\n".join(
        f"| {name} | {statistics.median(found[key]):.4f} | {min(found[key]):.4f} "
        f"| {max(found[key]):.4f} | {statistics.median(found[key]) / base:.2%} |"
        for key, name in names.items()
    )
    busy = " (a machine with other work)" if found["load"] > options.ranks + 1 else ""
    last = ", ".join(f"{name} {value:.4g}" for name, value in found["row"].items())
    return f"""# What the memory curve costs

- Command: `python recipes/bench/curve_cost.py --ranks {options.ranks} --rounds {options.rounds}
  --steps {options.steps} --stage {options.stage}`
- Commit: {commit or "unknown"}; torch {torch.__version__}, Python {platform.python_version()}
- Hardware: {os.cpu_count()} cores ({platform.machine()}), no GPU; load average
  {found["load"]:.1f}{busy}
- Date: {datetime.date.today().isoformat()}
- Model: Llama, 25.3 M parameters, fp32, fused AdamW, 2 x 128 tokens a rank, one micro-batch
- Logged in every step: memory by kind of every rank with the plan, tokens per second and MFU, to
  JSON lines, a picture and an offline W&B run

| | median s | min | max | share of a step |
|---|---|---|---|---|
{rows}

Steps with and without took turns, {options.steps} each in {options.rounds} rounds. The times inside
are of rank 0, which writes; they are what the curve costs, while the difference of the first two
rows has the noise of the machine. The first step with a new tracker, which makes the plan, took
{found["first"]:.2f} s. The last row had {last}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--peak_tflops", type=float, default=0.1, help="for MFU on a CPU")
    parser.add_argument("--folder", type=Path, help="keep the rows and pictures here")
    parser.add_argument("--write", type=Path, help="Markdown file for the page")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(options.folder or temporary)
        mp.spawn(rank_main, args=(options, port, folder), nprocs=options.ranks)
        text = page(json.loads(Path(folder, "found.json").read_text()), options)
    print(text)
    if options.write:
        options.write.write_text(text)


if __name__ == "__main__":
    main()
