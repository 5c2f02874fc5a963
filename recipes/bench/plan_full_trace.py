"""States of a large Llama on many ranks, all blocks run, against what the plan says.

    python recipes/bench/plan_full_trace.py --model 70b --ranks 8 --stage 3

One process stands for rank 0 of a job whose other ranks do not exist (a fake process group), with
tensors that have no memory (fake tensors). FSDP2 shards the model, a step warms up, and the next
one is tracked by torch's own `FSDPMemTracker`. This takes minutes and is run by hand; the plan
takes seconds, as it runs equal blocks once. Activations are recomputed, in bf16 mixed precision.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import resource
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardplug import ZeroConfig
from shardplug.core.activations.checkpointing import checkpoint_activations
from shardplug.core.precision import Precision
from shardplug.core.stage import STAGES
from shardplug.core.units import plan_units
from shardplug.memory import plan

GIB = 2**30
SIZES: dict[str, dict[str, int]] = {  # Llama 3.1, and one for trying this script out
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "70b": {
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def init_fake_process_group(world_size: int) -> None:
    """Be rank 0 of a job whose other ranks do not exist; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())


def without_memory() -> Any:
    """Return a context in which tensors have sizes and no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


_TRACKED = {
    "Sharded Param": "master_shards",
    "Unsharded Param": "gathered",
    "Sharded Grad": "gradients",
    "Unsharded Grad": "gradients",
    "OptState": "optimizer_state",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Buffer": "buffers",
    "All Gather": "communication",
    "Reduce Scatter": "communication",
}


@contextmanager
def tracked_memory(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: tuple[torch.Tensor, ...]
) -> Iterator[Callable[[str], dict[str, int]]]:
    """Follow an FSDP2 model's memory with torch's own tracker, which knows CPU and fake tensors.

    Take one step before: the first one makes whole tensors, to work out how to shard.

    Args:
        model: Sharded.
        optimizer: Over its parameters.
        inputs: Tensors of the batch.

    Yields:
        A function that returns bytes by kind, given "current" or "peak".
    """
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker: Any = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(inputs)

    def snapshot(which: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for by_kind in tracker.get_tracker_snapshot(which).values():
            for kind, size in by_kind.items():
                name = str(getattr(kind, "value", kind))
                if name != "Total":
                    name = _TRACKED[name]
                    found[name] = found.get(name, 0) + int(size)
        return found

    with tracker:
        yield snapshot


def traced(config: Any, options: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Run and track a step; return bytes by kind at its moments."""
    import transformers

    init_fake_process_group(options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))
    stage = STAGES[options.stage]
    precision = Precision.of(ZeroConfig(stage=options.stage, param_dtype="bf16"))
    with without_memory():
        model = transformers.LlamaForCausalLM(config)
        units = plan_units(model, "auto", master_dtype=torch.float32)
        checkpoint_activations(model, units.blocks)
        for unit in (*units.modules, model):
            torch.distributed.fsdp.fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision.policy(cast_inputs=True),
                reshard_after_forward=stage.reshard_after_forward,
            )
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        ids = torch.randint(0, config.vocab_size, (1, options.seq_length))

        def step(track: Any = None) -> dict[str, dict[str, int]]:
            found = {}
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            if track is not None:
                found["after_forward"] = track("current")
            loss.backward()
            del loss
            if track is not None:
                found["after_backward"] = track("current")
                found["peak of forward and backward"] = track("peak")
            optimizer.step()
            optimizer.zero_grad()
            if track is not None:
                found["at_rest"] = track("current")
            return found

        step()  # DTensor works out its sharding once, on whole tensors: not to be counted
        gc.collect()
        with tracked_memory(model, optimizer, (ids,)) as track:
            return step(track)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(SIZES), default="70b")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--seq_length", type=int, default=4096)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    config = transformers.LlamaConfig(**SIZES[options.model], architectures=["LlamaForCausalLM"])
    began = time.perf_counter()
    found = plan(
        config,
        devices=options.ranks,
        device_memory_gib=80,
        seq_length=options.seq_length,
        stage=options.stage,
        offload=False,
        activation_checkpointing=True,
        loop="pytorch",
        device="cpu",
    )
    planned = time.perf_counter() - began
    began = time.perf_counter()
    measured = traced(config, options)
    took = time.perf_counter() - began
    dist.destroy_process_group()
    print(
        f"{options.model} on {options.ranks} ranks, stage {options.stage}, 1 x "
        f"{options.seq_length} tokens, {datetime.date.today()}, torch {torch.__version__}: plan "
        f"{planned:.0f} s, full trace {took:.0f} s, load {os.getloadavg()[0]:.0f}, memory "
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )
    print("| moment | kind | full trace, GiB | plan, GiB | difference |\n|---|---|---|---|---|")
    for moment in ("after_backward", "at_rest"):
        held = found.choices[0].timeline.phases[moment]
        for kind in ("master_shards", "gradients", "optimizer_state"):
            full = measured[moment].get(kind, 0)
            if full or held[kind]:
                print(
                    f"| {moment} | {kind} | {full / GIB:.4f} | {held[kind] / GIB:.4f} "
                    f"| {held[kind] / full - 1 if full else float('inf'):+.4%} |"
                )
    peak = sum(measured["peak of forward and backward"].values())
    ours = max(p.total for p in found.choices[0].timeline.points if p.phase != "step")
    print(f"| peak | all | {peak / GIB:.4f} | {ours / GIB:.4f} | {ours / peak - 1:+.4%} |")


if __name__ == "__main__":
    main()
