"""One rank of the memory test: loads a model and prints what it took. Started as a process.

python load_rank.py RANK WORLD_SIZE STORE FOLDER
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardplug.hf
from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import local_tensor

CONFIG = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def resident(key: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes; mapped pages of files count."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found.group(1)) * 1024


def engine() -> ZeroEngine:
    return ZeroEngine(ZeroConfig(stage=3, param_dtype="bf16"))


def main(rank: int, world_size: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    # The code that sharding needs is loaded now, so that only the weights count.
    engine().shard(LlamaForCausalLM(LlamaConfig(**CONFIG)))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest value so far
    model = shardplug.hf.from_pretrained(folder)
    on_meta = resident("VmHWM") - before
    engine().shard(model)
    peak = resident("VmHWM") - before
    locals_ = [local_tensor(p) for p in model.parameters()]
    print(
        json.dumps(
            {
                "on_meta": on_meta,
                "peak": peak,
                "after": resident("VmRSS") - before,
                "shard": sum(t.numel() * t.element_size() for t in locals_),
                "elements": sum(p.numel() for p in model.parameters()),
                "dtype": str(locals_[0].dtype),
                "sum": sum(float(t.double().sum()) for t in locals_),
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
