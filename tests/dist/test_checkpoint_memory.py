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


def _rises_in_files(path: str) -> tuple[int, int, int]:
    """What a save and a load add where everything is in files, and this rank's largest tensor."""
    tiers = {"offload_params": "nvme", "offload_optimizer": "nvme", "nvme_path": path}
    engine = ZeroEngine(ZeroConfig(stage=3, **tiers))  # type: ignore[arg-type]
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    model = engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    with engine.micro_step():
        model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    rises = []
    engine.save(f"{path}/first", optimizers=[optimizer])
    engine.load(f"{path}/first", optimizers=[optimizer])
    for action in (engine.save, engine.load):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("RssAnon")
        action(f"{path}/first", optimizers=[optimizer])
        # The peak is of all resident memory; the files' pages are not of interest.
        rises.append(_status("VmHWM") - _status("RssFile") - _status("RssShmem") - before)
    held = engine.memory()
    assert held["optimizer_state_nvme"] > 2 * held["master_shards_nvme"] - 2**20
    assert held["master_shards"] == 0
    return rises[0], rises[1], held["master_shards_nvme"]


def test_state_in_files_is_saved_and_loaded_a_tensor_at_a_time(
    pool: RankPool, tmp_path: Path
) -> None:
    """Twelve bytes per owned parameter pass through; three are not reached."""
    found = pool.run(_rises_in_files, 2, str(tmp_path))
    shutil.rmtree(tmp_path / "first")
    for save, load, shards in found:
        print(f"save {save / 1e6:.1f} MB, load {load / 1e6:.1f} MB, shards {shards / 1e6:.1f} MB")
        assert shards > 40e6
        assert max(save, load) < 0.75 * shards
