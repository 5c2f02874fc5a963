"""Train a Llama whose states are several times the memory there is, in one process.

    python recipes/train_capped.py --nvme-path /mnt/nvme --size 1b --memory-gib 4

Parameters, gradients and optimizer state are in files under --nvme-path (`zero3_infinity`); what
is in memory is the unit that computes, and what is read ahead. The limit is the system's own: an
allocation beyond it fails, and ends the run. `--in-memory` trains the same model, weights and
batches with everything in memory, to compare the losses with.

The weights are random and so is the text: this shows that it trains, and what it costs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from shardplug import ZeroConfig, ZeroEngine, default_listeners

SIZES = {  # hidden width, width of the MLP, layers, heads, heads for keys and values, vocabulary
    "tiny": (64, 176, 3, 4, 2, 512),
    "100m": (768, 2048, 12, 12, 4, 16000),
    "1b": (2048, 5632, 22, 32, 4, 32000),
    "3b": (3072, 8192, 26, 24, 8, 32000),
}
GIB = 2**30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nvme-path", help="folder on a local drive, 16 bytes per parameter")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--memory-gib", type=float, help="limit for this process; none if left out")
    parser.add_argument("--in-memory", action="store_true", help="keep everything in memory")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--prefetch", type=int, default=1, help="units read ahead")
    parser.add_argument("--report", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if args.in_memory == bool(args.nvme_path):
        parser.error("Expected --nvme-path or --in-memory, one of the two.")
    return args


def build(size: str) -> LlamaForCausalLM:
    """Build the model without weights: each unit is filled just before it is moved out."""
    hidden, mlp, layers, heads, groups, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def peak_gib() -> float:
    """Highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main() -> None:
    args = parse()
    if args.memory_gib is not None:  # private memory: malloc fails beyond it
        limit = int(args.memory_gib * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    store = os.path.join(tempfile.mkdtemp(), "store")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)

    tiers = {} if args.in_memory else {"offload_params": "nvme", "offload_optimizer": "nvme"}
    engine = ZeroEngine(
        ZeroConfig(
            stage=3,
            activation_checkpointing=True,
            prefetch=args.prefetch,
            nvme_path=args.nvme_path,
            **tiers,
        ),
        listeners=default_listeners(),
    )
    model = engine.shard(build(args.size))
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    count = sum(p.numel() for p in model.parameters())
    limit = "no limit" if args.memory_gib is None else f"{args.memory_gib:g} GiB"
    print(
        f"{count / 1e6:.1f} M parameters, {16 * count / GIB:.2f} GiB of states in fp32, {limit}; "
        f"peak so far {peak_gib():.2f} GiB",
        flush=True,
    )

    text = torch.Generator().manual_seed(1)
    report = []
    for step in range(1, args.steps + 1):
        ids = torch.randint(0, model.config.vocab_size, (1, args.seq_length), generator=text)
        begin = time.perf_counter()
        with engine.micro_step(last=True):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        engine.clip_grad_norm(1.0)
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        end = time.perf_counter()
        moved = engine.traffic()
        row = {
            "step": step,
            "loss": loss.item(),
            "forward_backward_seconds": middle - begin,
            "optimizer_seconds": end - middle,
            "peak_gib": peak_gib(),
            **moved,
        }
        report.append(row)
        print(
            f"step {step}: loss {row['loss']:.6f}, {middle - begin:.1f} s forward and backward, "
            f"{end - middle:.1f} s optimizer; {moved['bytes_read'] / 1e9:.2f} GB read, "
            f"{moved['bytes_written'] / 1e9:.2f} GB written, waited {moved['waited_seconds']:.1f} "
            f"s; peak {row['peak_gib']:.2f} GiB",
            flush=True,
        )
    held = {kind: size for kind, size in engine.memory().items() if size}
    print("at rest, bytes: " + ", ".join(f"{kind} {size}" for kind, size in held.items()))
    if args.report is not None:
        args.report.write_text(json.dumps({"parameters": count, "steps": report, "held": held}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
