"""What the caching allocator of a GPU holds beside the tensors, with batches of many lengths."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardplug.memory import read_jsonl

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU: a CPU has no caching allocator"
)

STEPS = 200
PROGRAM = """
import random, sys
import torch
import torch.distributed as dist
from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import JsonlSink, MemoryTracker
from tests.support.models import TinyLM, lm_loss, tokens

dist.init_process_group("nccl", rank=0, world_size=1)
engine = ZeroEngine(ZeroConfig(stage=3, param_dtype="bf16"))
torch.manual_seed(0)
model = engine.shard(TinyLM(width=1024, hidden=4096))
tracker = MemoryTracker(engine, [JsonlSink(sys.argv[1])])
optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
lengths = random.Random(0)
for step in range(int(sys.argv[2])):
    batch = tokens(step, 0, 0, batch=4, length=lengths.randint(16, 4096)).to(engine.device)
    with engine.micro_step():
        lm_loss(model(batch), batch).backward()
    optimizer.step()
    optimizer.zero_grad()
tracker.close()
dist.destroy_process_group()
"""


def test_reserved_stays_close_to_allocated(tmp_path: Path) -> None:
    """Case 24: reserved / allocated at their peaks below 1.3; the curve has both."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    setting = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # read before the first tensor
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    rows_file = tmp_path / "memory.jsonl"
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rows_file), str(STEPS)],
        env={**os.environ, **setting},
        cwd=Path(__file__).parents[2],
        check=True,
        timeout=300,
    )
    rows = read_jsonl(rows_file)
    assert len({row.step for row in rows}) == STEPS
    allocated = max(row.peak_bytes for row in rows)
    reserved = max(row.held_bytes for row in rows)
    assert allocated > 2**28
    assert 1.0 <= reserved / allocated < 1.3
