"""A rank that is killed, stopped or raises ends every rank, with the first cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine, watchdog
from shardplug.watchdog import Limits
from tests.support.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]


def meet() -> None:
    """Meet in a TCPStore, which ranks of the pool do not."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    server = None
    if rank == 0:  # on a port of the server's choice: one that is found free may be taken by then
        server = dist.TCPStore("127.0.0.1", 0, world_size, True, wait_for_workers=False)
    port = [server.port if server else 0]
    dist.broadcast_object_list(port)
    store = server or dist.TCPStore("127.0.0.1", port[0], world_size, False)
    # gloo's connections are made one after the other: a rank that has all of its own and closes
    # them again ends the set-up of one that is still at it.
    store.set(f"met/{rank}", "")
    store.wait([f"met/{other}" for other in range(world_size)])
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def _watched() -> ZeroEngine:
    meet()
    config = ZeroConfig(stage=3)
    assert watchdog.start(config, Limits(silence_seconds=2.0, grace_seconds=1.0))
    return ZeroEngine(config, listeners=[watchdog.Watchdog()])


def _train(out: str, fault: str, who: int) -> None:
    engine = _watched()
    sys.stderr = open(f"{out}/{engine.rank}", "w", buffering=1)  # noqa: SIM115
    model = engine.shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(10**6):
        if step == 30 and engine.rank == who:
            if fault == "stop":
                # As a launcher does once the job has ended: no rank ends another one.
                subprocess.Popen(["sh", "-c", f"sleep 10; kill -9 {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            elif fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif fault == "raise":  # and the process lives on, as in a teardown that waits
                watchdog.raised(ValueError("the first cause"))
                time.sleep(60)
        if step == 30 and fault == "kill":  # no message tells this rank: it sends and awaits none
            time.sleep(60)
        with engine.micro_step():
            model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.002)


@pytest.mark.parametrize(
    ("fault", "who"), [("stop", 0), ("stop", 1), ("kill", 0), ("kill", 1), ("raise", 1)]
)
def test_every_rank_ends(pool: RankPool, tmp_path: Path, fault: str, who: int) -> None:
    pool.run(dist.get_rank, 2)  # what follows does not include the start of the ranks
    begin = time.monotonic()
    pool.run(_train, 2, str(tmp_path), fault, who, expect_death=True, timeout=60)
    assert time.monotonic() - begin < 60  # far above the limits of 2 s
    pool.close()  # the ranks are gone, though some may not be known to be yet
    text = (tmp_path / str(1 - who)).read_text()
    cause = {
        "stop": "is stopped (SIGSTOP, or suspended)",
        "kill": "is gone without a word",
        "raise": "ValueError: the first cause",
    }
    assert f"First cause: rank {who}" in text
    assert cause[fault] in text
    assert f"Rank {1 - who} was at" in text


SCRIPT = """
import os, signal, time, torch, lightning.pytorch as pl, shardplug
fault = {fault!r}
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4000
    def __getitem__(self, index):
        if fault == "loader" and index == 61: raise ValueError("the first cause")
        return torch.ones(8)
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    def training_step(self, batch, index):
        if fault == "stop" and index == 20 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.002)
        return self.net(batch).sum()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
class Callback(pl.Callback):
    def on_train_batch_end(self, trainer, module, *rest):
        if fault == "callback" and trainer.global_step == 20 and trainer.global_rank == 1:
            raise ValueError("the first cause")
strategy = shardplug.lightning.ZeroStrategy(silence_seconds=3)
loader = torch.utils.data.DataLoader(Data(), batch_size=2, num_workers=int(fault == "loader"))
pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=100000, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, callbacks=[Callback()],
    use_distributed_sampler=True,
).fit(Module(), loader)
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    "fault", ["loader", "stop", pytest.param("callback", marks=pytest.mark.slow)]
)
def test_every_rank_ends_under_lightnings_launcher(tmp_path: Path, fault: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(fault=fault))
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=stream,
            start_new_session=True,
        )
        try:
            assert process.wait(80) != 0
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # a stopped rank is left to its launcher
    cause = "is stopped (SIGSTOP" if fault == "stop" else "ValueError: the first cause"
    assert cause in errors.read_text(), errors.read_text()[-3000:]
    assert "shardplug: Rank" in errors.read_text()
    assert _processes_of(script) == []


def _processes_of(script: Path) -> list[Any]:
    """Processes that run the script still, some seconds after its launcher has ended."""
    deadline = time.monotonic() + 15
    while True:
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and str(script) in (folder / "cmdline").read_text():
                    found.append(folder.name)
            except OSError:  # it ended just now
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)
