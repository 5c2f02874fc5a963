"""Training runs that are killed in the middle of an accumulation window, and go on.

    python -m tests.dist.exact_runs FOLDER SEED

For each framework: one run straight, and one that is killed twice. Every rank leaves a line of
JSON for each micro-batch. One process imports the frameworks and forks the ranks.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import resume_point
from tests.dist.checkpoint_runs import average, whole

RANKS = 2
EPOCHS = 2
BATCHES = 26  # per rank and epoch, of 2 samples
ACCUMULATE = {"plain": 2, "lightning": 2, "accelerate": 3}
SAVE_EVERY = {"plain": 7, "lightning": 7, "accelerate": 4}  # optimizer steps
DECAY = 0.9


def warm_up(step: int) -> float:
    """Factor of the learning rate: up over ten steps, then down."""
    return min((step + 1) / 10, 10 / (step + 1))


class Log:
    """What a rank saw of each micro-batch, and the end that it meets.

    Args:
        path: Where the lines go.
        kill_at: The micro-batch, counted from the first epoch's first, after which this rank dies.
    """

    def __init__(self, path: Path, kill_at: int | None) -> None:
        self._file = path.open("w")
        self._kill_at = kill_at
        self.mask: list[int] = []

    def watch(self, dropout: nn.Module) -> None:
        """Keep the masks that a dropout layer draws; what it gets has no zeros."""
        dropout.register_forward_hook(
            lambda module, args, out: setattr(self, "mask", out.eq(0).int().flatten().tolist())
        )

    def add(self, micro: int, ids: torch.Tensor, loss: torch.Tensor) -> None:
        """Note a micro-batch whose backward is done."""
        line = {"micro": micro, "ids": ids.tolist(), "loss": loss.item(), "mask": self.mask}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if micro == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def build(seed: int) -> nn.Module:
    """A small network with dropout; the ranks' weights differ until they are sharded."""
    from tests.adapters.lightning.modules import Net

    torch.manual_seed(seed + 100 * dist.get_rank())
    return Net(dropout=0.1)


def plain(folder: Path, log: Log, seed: int) -> dict[str, Any]:
    """A loop of the user's own; its position in the data is in `extra`."""
    from tests.adapters.lightning.modules import Data

    engine = ZeroEngine(ZeroConfig(stage=2))
    model = engine.shard(build(seed))
    kept = engine.shard(build(seed).requires_grad_(False))
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    log.watch(model.dropout)
    torch.manual_seed(seed + dist.get_rank())
    data = Data(size=RANKS * BATCHES * 2)
    sampler = DistributedSampler(data, shuffle=True, seed=3)

    at = {"step": 0, "epoch": 0, "batch": 0}
    point = resume_point(folder)
    if point is not None:
        extra = engine.load(point.path, optimizers=[optimizer])
        scheduler.load_state_dict(extra["scheduler"])
        at = extra["at"]
    for epoch in range(at["epoch"], EPOCHS):
        sampler.set_epoch(epoch)
        batches = list(BatchSampler(sampler, 2, drop_last=True))
        first = at["batch"] if epoch == at["epoch"] else 0
        loader = DataLoader(
            data, batch_sampler=batches[first:], num_workers=2, generator=torch.Generator()
        )
        for batch, (x, y, ids) in enumerate(loader, first):
            last = (batch + 1) % ACCUMULATE["plain"] == 0
            with engine.micro_step(last=last):
                loss = (model(x) - y).square().mean()
                (loss / ACCUMULATE["plain"]).backward()
            log.add(epoch * BATCHES + batch, ids, loss)
            if not last:
                continue
            engine.clip_grad_norm(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            average(model, kept, DECAY)
            at = {"step": at["step"] + 1, "epoch": epoch, "batch": batch + 1}
            if at["step"] % SAVE_EVERY["plain"] == 0:
                extra = {"at": at, "scheduler": scheduler.state_dict()}
                path = folder / f"step-{at['step']}"
                engine.save(path, optimizers=[optimizer], extra=extra)
    return {"model": model, "average": kept, "rate": scheduler.get_last_lr()}


def accelerate(folder: Path, log: Log, seed: int) -> dict[str, Any]:
    """A loop as Accelerate's users write it; the average is a prepared model of its own."""
    from tests.adapters.accelerate.common import accelerator
    from tests.adapters.lightning.modules import Data

    acc = accelerator(
        zero="zero3",
        gradient_accumulation_steps=ACCUMULATE["accelerate"],
        step_scheduler_with_optimizer=False,
    )
    model, kept = build(seed), build(seed).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    data = DataLoader(Data(size=RANKS * BATCHES * 2), batch_size=2, shuffle=True, num_workers=2)
    torch.manual_seed(seed + dist.get_rank())
    model, kept, optimizer, scheduler, loader = acc.prepare(model, kept, optimizer, scheduler, data)
    log.watch(model.dropout)

    windows = -(-len(loader) // ACCUMULATE["accelerate"])  # optimizer steps of an epoch
    first_epoch = first = 0
    point = resume_point(folder)
    if point is not None:
        acc.load_state(point.path)
        assert point.step == acc.completed_steps
        first_epoch, done = divmod(acc.completed_steps, windows)
        first = done * ACCUMULATE["accelerate"]
    for epoch in range(first_epoch, EPOCHS):
        rest = acc.skip_first_batches(loader, first) if first else loader
        for batch, (x, y, ids) in enumerate(rest, first):
            with acc.accumulate(model):
                loss = (model(x) - y).square().mean()
                acc.backward(loss)
                log.add(epoch * BATCHES + batch, ids, loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if acc.sync_gradients:
                average(model, kept, DECAY)
                if acc.completed_steps % SAVE_EVERY["accelerate"] == 0:
                    acc.save_state(folder / f"step-{acc.completed_steps}")
        first = 0
    return {"model": model, "average": kept, "rate": scheduler.get_last_lr()}


def lightning(folder: Path, log: Log, seed: int) -> dict[str, Any]:
    """A Trainer with Lightning's own average."""
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

    from tests.adapters.lightning.modules import Data, Plain, trainer

    class Module(Plain):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.seen = (self.current_epoch * BATCHES + index, batch[2], loss.detach())
            return loss

        def on_after_backward(self) -> None:
            log.add(*self.seen)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    torch.manual_seed(seed + 100 * dist.get_rank())
    module = Module(dropout=0.1)
    log.watch(module.net.dropout)
    torch.manual_seed(seed + dist.get_rank())
    save = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=SAVE_EVERY["lightning"], save_top_k=-1
    )
    run = trainer(
        "zero2",
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE["lightning"],
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        callbacks=[EMAWeightAveraging(decay=DECAY), save],
    )
    data = Data(size=RANKS * BATCHES * 2)
    point = resume_point(folder)
    run.fit(
        module,
        DataLoader(data, batch_size=2, shuffle=True, num_workers=2),
        ckpt_path=None if point is None else point.path,
    )
    rates = [config.scheduler.get_last_lr() for config in run.lr_scheduler_configs]
    return {"average": module, "rate": rates[0]}  # the module has the average when fit ends


FRAMEWORKS: dict[str, Callable[[Path, Log, int], dict[str, Any]]] = {
    "plain": plain,
    "accelerate": accelerate,
    "lightning": lightning,
}


def kills(framework: str, seed: int) -> list[int]:
    """Two micro-batches, each in the middle of a window, one in each epoch."""
    chosen = random.Random(f"{framework} {seed}")
    window = ACCUMULATE[framework]
    inside = [b for b in range(BATCHES - 1) if (b + 1) % window]
    saved = SAVE_EVERY[framework] * window  # micro-batches until the first save
    return [
        chosen.choice([b for b in inside if b >= saved]),
        BATCHES + chosen.choice([b for b in inside if b >= window]),
    ]


def _rank(framework: str, root: Path, attempt: str, rank: int, kill_at: int | None) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store-{attempt}", rank=rank, world_size=RANKS
    )
    log = Log(root / f"{attempt}-{rank}.jsonl", kill_at)
    # Only the first start of a run may draw from its seed; later ones have to restore the state.
    seed = {"straight": 5, "0": 5}.get(attempt, 900)
    folder = root / ("straight" if attempt == "straight" else "killed")
    end = FRAMEWORKS[framework](folder, log, seed)
    tensors = {
        f"{which} {name}": whole(parameter)
        for which, model in end.items()
        if isinstance(model, nn.Module)
        for name, parameter in model.named_parameters()
    }
    torch.save({"tensors": tensors, "rate": end["rate"]}, root / f"{attempt}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def launch(framework: str, root: Path, attempt: str, kill_at: int | None) -> None:
    """Run the ranks; with `kill_at` all of them end by SIGKILL."""
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(framework, root, attempt, rank, kill_at))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    deadline, one_is_dead = time.monotonic() + 200, False
    while any(process.is_alive() for process in ranks):
        if not one_is_dead and any(process.exitcode for process in ranks):
            one_is_dead = True
            # The others may still write their last line. `join` would wait for a dead rank's
            # loader workers too.
            deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            for process in ranks:
                process.kill()
        time.sleep(0.05)
    codes = [process.exitcode for process in ranks]
    expected = [0] * RANKS if kill_at is None else [-signal.SIGKILL] * RANKS
    if codes != expected:
        raise SystemExit(f"{framework} {attempt}: exit codes {codes}, expected {expected}")


def main(home: Path, seed: int) -> None:
    """Run everything."""
    for framework in FRAMEWORKS:
        root = home / framework
        shutil.rmtree(root, ignore_errors=True)
        for name in ("straight", "killed"):
            (root / name).mkdir(parents=True)
        launch(framework, root, "straight", None)
        for attempt, kill_at in enumerate([*kills(framework, seed), None]):
            launch(framework, root, str(attempt), kill_at)


if __name__ == "__main__":
    for name in ("lightning.pytorch", "tests.adapters.accelerate.common"):
        importlib.import_module(name)  # once, before the ranks are forked
    main(Path(sys.argv[1]), int(sys.argv[2]))
