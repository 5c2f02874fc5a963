"""Memory of a sharded save: no rank needs more than its shard on top."""

from __future__ import annotations

import ctypes
import re
import shutil
from pathlib import Path

import torch
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from tests.support.pool import RankPool

WIDTH, LAYERS = 1024, 20  # 21 M parameters, 84 MB


def _status(field: str) -> int:
    """Bytes of a field of this process's memory status."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found
    return int(found[1]) * 1024


def _peak_rise(path: str, stage: int) -> tuple[int, int]:
    """Bytes that a save adds to this rank's resident memory at its peak, and those of its shard."""
    engine = ZeroEngine(ZeroConfig(stage=stage))
    model = engine.shard(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))))
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    engine.save(f"{path}/first", optimizers=[optimizer])  # imports, caches
    ctypes.CDLL(None).malloc_trim(0)  # or the save would use memory that the first one gave back
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is resident
    before = _status("VmRSS")
    engine.save(f"{path}/second", optimizers=[optimizer])
    shard = engine.memory()["master_shards"]
    assert engine.memory()["optimizer_state"] > 2 * shard - 4096
    return _status("VmHWM") - before, shard


def test_a_sharded_save_takes_no_more_than_the_shard(pool: RankPool, tmp_path: Path) -> None:
    """Case 20, the sharded half; the bound is one of the three tensors that make the state."""
    found = pool.run(_peak_rise, 4, str(tmp_path), 3)
    for folder in tmp_path.iterdir():  # half a gigabyte
        shutil.rmtree(folder)
    for rise, shard in found:
        print(f"save: {rise / 1e6:.1f} MB above rest, shard {shard / 1e6:.1f} MB")
        assert shard > 20e6
        assert rise <= shard
