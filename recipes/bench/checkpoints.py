"""Saving and loading: shardplug next to plain torch.distributed.checkpoint (DCP), interleaved.

    python recipes/bench/checkpoints.py --rounds 5 --write docs/benchmarks/checkpoints.md

Both write the same tensors, a Llama's fp32 weights and Adam moments, from the same processes, and
take turns. DeepSpeed's stage 2 is added where it is installed, in processes of its own, which take
turns with the others. Our saves and DCP's are on disk when they return (both call fsync),
DeepSpeed's are not; loads read from a warm page cache.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
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
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn

VOCAB = 8192
BASE = {
    "shardplug save": "DCP save",
    "shardplug async: blocked": "DCP save",
    "DCP async: blocked": "DCP save",
    "shardplug load": "DCP load",
    "DeepSpeed stage 2 save": "DCP save",
    "DeepSpeed stage 2 load": "DCP load",
}


def llama(hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=11,
        num_attention_heads=8,
        max_position_embeddings=128,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def timed(action: Callable[[], Any]) -> float:
    """Seconds until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def sharded(rank: int, options: argparse.Namespace, port: int, scratch: str) -> None:
    """One round of ours and DCP's, after one that warms up; rank 0 leaves the figures in a file."""
    set_up(rank, options, port)
    from shardplug import ZeroConfig, ZeroEngine
    from shardplug.checkpoint import state_of_model, state_of_optimizer

    engine = ZeroEngine(ZeroConfig(stage=2))
    model = engine.shard(llama(options.hidden))
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    tokens = torch.randint(0, VOCAB, (1, 8))

    def step() -> None:
        with engine.micro_step():
            model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors() -> dict[str, Any]:
        states = state_of_optimizer(model, optimizer)["state"]
        return {"model": state_of_model(model), "optimizer": states}

    def new_tensors() -> dict[str, Any]:
        # As in a run that starts anew, where the optimizer has no state yet; ours makes it itself.
        held = tensors()
        held["optimizer"] = {
            name: {key: torch.empty_like(value) for key, value in values.items()}
            for name, values in held["optimizer"].items()
        }
        return held

    step()
    group = dist.new_group(backend="gloo")
    root = Path(scratch, "checkpoints")
    if rank == 0:
        root.mkdir()
    times: dict[str, list[float]] = {}

    def record(name: str, action: Callable[[], Any]) -> None:
        times.setdefault(name, []).append(timed(action))

    sizes = {}
    for index in range(2):
        ours, theirs = root / f"shardplug-{index}", root / f"dcp-{index}"
        actions: list[tuple[str, Callable[[], Any]]] = [
            ("shardplug save", lambda p=ours: engine.save(p, optimizers=[optimizer])),
            ("DCP save", lambda p=theirs: dcp.save(tensors(), checkpoint_id=p)),
            ("shardplug load", lambda p=ours: engine.load(p, optimizers=[optimizer])),
            ("DCP load", lambda p=theirs: dcp.load(new_tensors(), checkpoint_id=p)),
        ]
        if options.round % 2:  # what goes first changes: a drive may be busy with what came before
            actions = [actions[1], actions[0], actions[3], actions[2]]
        for name, action in actions:
            record(name, action)
        sizes = {"shardplug": folder_bytes(ours), "DCP": folder_bytes(theirs)}
        clear(root)
        background = root / f"async-{index}"
        record(
            "shardplug async: blocked",
            lambda p=background: engine.save(p, optimizers=[optimizer], async_save=True),
        )
        start = time.perf_counter()
        steps = 0
        while engine.background.is_pending:
            step()
            steps += 1
        times.setdefault("shardplug async: until on disk", []).append(time.perf_counter() - start)
        clear(root)
        waiting: list[Any] = []
        record(
            "DCP async: blocked",
            lambda p=background, w=waiting: w.append(
                dcp.async_save(tensors(), checkpoint_id=p, process_group=group)
            ),
        )
        start = time.perf_counter()
        for _ in range(steps):
            step()
        waiting[0].result()
        times.setdefault("DCP async: until on disk", []).append(time.perf_counter() - start)
        clear(root)
    leave(rank, scratch, times, sizes, model)


def deepspeed(rank: int, options: argparse.Namespace, port: int, scratch: str) -> None:
    """The same with DeepSpeed's stage 2."""
    set_up(rank, options, port)
    import deepspeed as ds

    model = llama(options.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    engine, *_ = ds.initialize(model=model, optimizer=optimizer, config=config)
    tokens = torch.randint(0, VOCAB, (1, 8))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    root = Path(scratch, "checkpoints")
    if rank == 0:
        root.mkdir()
    times: dict[str, list[float]] = {}
    sizes = {}
    for index in range(2):
        path = root / f"deepspeed-{index}"
        save = timed(lambda p=path: engine.save_checkpoint(str(p)))
        load = timed(lambda p=path: engine.load_checkpoint(str(p)))
        times.setdefault("DeepSpeed stage 2 save", []).append(save)
        times.setdefault("DeepSpeed stage 2 load", []).append(load)
        sizes = {"DeepSpeed stage 2": folder_bytes(path)}
        clear(root)
    leave(rank, scratch, times, sizes, model)


def leave(
    rank: int,
    scratch: str,
    times: dict[str, list[float]],
    sizes: dict[str, int],
    model: nn.Module,
) -> None:
    if rank == 0:
        figures = {
            # The first time makes buffers and groups.
            "times": {name: values[1] for name, values in times.items()},
            "sizes": sizes,
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        Path(scratch, "figures.json").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def clear(root: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for path in root.iterdir():
            shutil.rmtree(path)
    dist.barrier()


def set_up(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(options.ranks),
        LOCAL_WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")


def report(
    times: dict[str, list[float]],
    sizes: dict[str, int],
    parameters: int,
    options: argparse.Namespace,
) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    lines = ["| what | median s | min | max | / its base |", "|---|---|---|---|---|"]
    for name, values in times.items():
        base = BASE.get(name)
        ratio = f"{medians[name] / medians[base]:.3f}" if base else ""
        lines.append(
            f"| {name} | {medians[name]:.3f} | {min(values):.3f} | {max(values):.3f} | {ratio} |"
        )
    lines += ["", "| on disk | bytes | bytes / (12 bytes per parameter) |", "|---|---|---|"]
    for name, size in sizes.items():
        lines.append(f"| {name} | {size} | {size / (12 * parameters):.4f} |")
    table = "\n".join(lines)
    print(table)
    if options.write:
        options.write.write_text(page(table, parameters, options))
        print(f"written to {options.write}")


def page(table: str, parameters: int, options: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    version = "not installed, so not compared"
    if importlib.util.find_spec("deepspeed"):
        version = importlib.metadata.version("deepspeed")
    return f"""# Saving and loading

- Command: `python recipes/bench/checkpoints.py --ranks {options.ranks} --rounds {options.rounds}`
- Commit: {commit or "unknown"}; torch {torch.__version__}, Python {platform.python_version()}
- Hardware: {os.cpu_count()} cores ({platform.machine()}), no GPU, local disk, warm page cache
- Ranks: {options.ranks}, gloo over loopback, one thread a rank
- Date: {datetime.date.today().isoformat()}
- Model: Llama, {parameters / 1e6:.0f} M parameters, fp32 weights and Adam moments
- Spread: minimum and maximum over {options.rounds} interleaved rounds
- DeepSpeed: {version}

{table}

The base of a save, DeepSpeed's too, is DCP's synchronous save; of a load it is DCP's load.
"Blocked" is how long the training loop stands still; "until on disk" is how long the snapshot takes
to be written while training goes on, on the same cores. shardplug's times include the checksums:
it writes one for every MiB, and compares what it reads. Both loads make the optimizer's state, as a
run that starts anew has to. DeepSpeed does not call fsync.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=1024, help="1024 makes 202 M parameters")
    parser.add_argument("--scratch", type=Path, help="folder for the checkpoints, about 5 GB")
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    contenders = [sharded]
    if importlib.util.find_spec("deepspeed"):
        contenders.append(deepspeed)
    times: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    parameters = 0
    for number in range(options.rounds):
        options.round = number
        for contender in contenders:
            with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
                mp.spawn(contender, args=(options, free_port(), scratch), nprocs=options.ranks)
                figures = json.loads(Path(scratch, "figures.json").read_text())
            for name, seconds in figures["times"].items():
                times.setdefault(name, []).append(seconds)
            sizes |= figures["sizes"]
            parameters = figures["parameters"]
    report(times, sizes, parameters, options)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


if __name__ == "__main__":
    sys.exit(main())
