"""Bytes of model state that one rank holds, by stage and phase, measured from the storages.

    python recipes/bench/memory_table.py --ranks 2
    python recipes/bench/memory_table.py --ranks 4 --write docs/benchmarks/memory.md

A 25 M parameter Llama, AdamW, windows of two micro-batches; each figure is the engine's
accounting at the end of a phase, largest rank, in bytes per parameter. The formula column is the
table in docs/concepts/zero.md; what the figures have above it is the padding of rows to a multiple
of the ranks and AdamW's step counters.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import socket
import subprocess
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PHASES = ("after forward", "after backward, between", "after the last backward", "at rest")


def formula(stage: int, ranks: int, compute_bytes: int) -> list[float]:
    """Bytes per parameter in each phase; masters, gradients and Adam's moments in fp32."""
    rest, whole = 12 / ranks, compute_bytes if stage < 3 else 0
    between = {1: 4.0, 2: 4 / ranks, 3: 4 / ranks}[stage]
    return [whole + rest, whole + between + rest, 16 / ranks, rest]


def measure(stage: int, dtype: str | None) -> list[float]:
    """Train two windows and return the accounts of the second, in bytes per parameter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from shardplug import ZeroConfig, ZeroEngine

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype=dtype))  # type: ignore[arg-type]
    model = engine.shard(LlamaForCausalLM(config).train())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    held: list[int] = []
    engine.add_phase_listener(lambda phase: held.append(sum(engine.memory().values())))
    tokens = torch.randint(0, 2048, (1, 8))
    for _ in range(2):
        held.clear()
        for last in (False, True):
            with engine.micro_step(last=last):
                model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = [held[0], held[1], held[3], sum(engine.memory().values())]
    parameters = sum(p.numel() for p in model.parameters())
    largest = torch.tensor(figures, dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return [value / parameters for value in largest.tolist()]


def rank_main(rank: int, options: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    head = f"| compute, stage ({options.ranks} ranks) | " + " | ".join(PHASES) + " |"
    lines = [head, "|---|" + "---|" * len(PHASES)]
    for dtype, compute_bytes in ((None, 4), ("bf16", 2)):
        for stage in (1, 2, 3):
            found = measure(stage, dtype)
            expected = formula(stage, options.ranks, compute_bytes)
            cells = [f"{f:.2f} ({e:.2f})" for f, e in zip(found, expected, strict=True)]
            lines.append(f"| {dtype or 'fp32'}, {stage} | " + " | ".join(cells) + " |")
    if rank == 0:
        table = "\n".join(lines)
        print(table)
        if options.write:
            options.write.write_text(page(table, options))
    dist.barrier()
    dist.destroy_process_group()


def page(table: str, options: argparse.Namespace) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"""# Memory of model states

- Command: `python recipes/bench/memory_table.py --ranks {options.ranks}`
- Commit: {commit or "unknown"}; torch {torch.__version__}, Python {platform.python_version()}
- Hardware: CPU ranks (bytes of storages do not depend on it)
- Date: {datetime.date.today().isoformat()}
- Model: Llama, 25.3 M parameters, AdamW, windows of two micro-batches
- Spread: none, bytes are counted

Bytes per parameter on the rank that holds most, measured from the storages; the formula is in
parentheses.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", type=Path, help="Markdown file for the table")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(options, port), nprocs=options.ranks)


if __name__ == "__main__":
    main()
