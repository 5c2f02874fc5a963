"""torchrun restarts a job that lost a rank from the newest whole checkpoint (also a machine)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.elastic_run import FAULT_AT, GLOBAL_BATCHES, SAVE_EVERY, STEPS
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.processes import Processes

ROOT = Path(__file__).resolve().parents[2]


def reference() -> dict[str, torch.Tensor]:
    """One process, unsharded, without an interruption."""
    torch.manual_seed(3)
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        for micro in range(GLOBAL_BATCHES):
            batch = tokens(step, micro, 0)
            (lm_loss(model(batch), batch) / GLOBAL_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model.state_dict()


def torchrun(
    processes: Processes, folder: Path, fault: str, *options: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    return processes.start(
        [*command, "-m", "tests.dist.elastic_run", str(folder), fault],
        # torch 2.13 else keeps the store of the attempt before, and gloo the addresses in it.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        cwd=ROOT,
        stderr=subprocess.STDOUT,
    )


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def assert_continued(folder: Path, attempt: int, world_size: int) -> None:
    """The last attempt went on from the right step, at the right rate, to the right weights."""
    note: dict[str, Any] = json.loads((folder / f"note-{attempt}.json").read_text())
    start = FAULT_AT - FAULT_AT % SAVE_EVERY
    assert (note["world_size"], note["from"]) == (world_size, start)
    assert note["rates"] == pytest.approx([1e-2 / (1 + step) for step in range(start, STEPS)])
    weights, expected = torch.load(folder / f"weights-{attempt}.pt"), reference()
    assert weights.keys() == expected.keys() and len(weights) > 10
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.timeout(200)
def test_a_killed_rank_restarts_the_job(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1")
    with Processes() as processes:
        process = torchrun(processes, tmp_path, "kill", *options)
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output[-4000:]
    assert_continued(tmp_path, attempt=1, world_size=2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_lost_machine_leaves_the_job_to_the_others(tmp_path: Path) -> None:
    """Two agents stand for two machines; one is killed with its rank, and does not come back."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = (
        *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d"),
        *("--rdzv-id=elastic", f"--rdzv-endpoint=127.0.0.1:{port}"),
        "--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3",
    )
    with Processes() as processes:
        stays = torchrun(processes, tmp_path, "machine", "--local-addr=127.0.0.1", *options)
        deadline = time.monotonic() + 150
        while not accepts(port):  # the one that stays is to hold the rendezvous
            assert time.monotonic() < deadline and stays.poll() is None
            time.sleep(0.1)
        goes = torchrun(processes, tmp_path, "machine", "--local-addr=127.0.0.1", *options)
        lost = tmp_path / "machine-lost"
        while not lost.exists():
            assert time.monotonic() < deadline and stays.poll() is None
            time.sleep(0.1)
        goes.send_signal(signal.SIGKILL)
        output, _ = stays.communicate(timeout=140)
        assert stays.returncode == 0, output[-4000:]
    (note,) = tmp_path.glob("note-*.json")
    assert_continued(tmp_path, attempt=int(note.stem.partition("-")[2]), world_size=1)
