"""Train a small model under torchrun; the first attempt loses a rank. Run by test_elastic.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import resume_point
from tests.support.models import TinyLM, lm_loss, tokens

STEPS, GLOBAL_BATCHES, SAVE_EVERY, FAULT_AT = 8, 2, 3, 5


def train(folder: Path, fault: str) -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = ZeroEngine(ZeroConfig(stage=3))
    torch.manual_seed(3 + rank)
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    step = 0
    point = resume_point(folder / "checkpoints")
    if point is not None:
        extra = engine.load(point.path, optimizers=[optimizer])
        step = extra["step"]
        scheduler.load_state_dict(extra["scheduler"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    note = {"attempt": attempt, "world_size": world_size, "from": step, "rates": []}
    while step < STEPS:
        if attempt == 0 and step == FAULT_AT and rank == world_size - 1 and fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "machine" and world_size == 2 and step == FAULT_AT:
            _lose_a_machine(folder)
        note["rates"].append(optimizer.param_groups[0]["lr"])
        # The global batch is the same for any number of ranks: each takes its part of it.
        mine = range(rank, GLOBAL_BATCHES, world_size)
        for micro in mine:
            with engine.micro_step(last=micro == mine[-1]):
                batch = tokens(step, micro, 0)
                (lm_loss(model(batch), batch) / len(mine)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        step += 1
        if step % SAVE_EVERY == 0:
            state = {"step": step, "scheduler": scheduler.state_dict()}
            engine.save(folder / "checkpoints" / f"{step}", optimizers=[optimizer], extra=state)
    whole = engine.full_state_dict()
    if rank == 0:
        torch.save(whole, folder / f"weights-{attempt}.pt")
        (folder / f"note-{attempt}.json").write_text(json.dumps(note))
    dist.destroy_process_group()


def _lose_a_machine(folder: Path) -> None:
    """Let the test kill the second agent, then end its rank as the machine's end would."""
    if int(os.environ["GROUP_RANK"]) == 1:
        (folder / "machine-lost").touch()
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
