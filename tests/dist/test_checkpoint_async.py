"""Saves that are written while training goes on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import is_checkpoint, resume_point
from shardplug.checkpoint.write.snapshot import SnapshotMemory
from shardplug.checkpoint.write.writer import CheckpointWrite
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import (
    Run,
    assert_equal,
    batch_of,
    make_model,
    make_optimizer,
    make_run,
    snapshot,
    train,
)
from tests.support.faults import failing, fails_together, files_in, no_fault, same_on_all_ranks
from tests.support.models import lm_loss
from tests.support.pool import RankPool


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Let no thread but this one write a tensor before the event is set."""
    gate, write, here = threading.Event(), CheckpointWrite._write_tensors, threading.get_ident()

    def wait_at_gate(self: CheckpointWrite, *args: Any) -> None:
        if threading.get_ident() != here:
            assert gate.wait(60)
        write(self, *args)

    with mock.patch.object(CheckpointWrite, "_write_tensors", wait_at_gate):
        try:
            yield gate
        finally:
            gate.set()


def save(run: Run, path: str, step: int = 0) -> None:
    run.engine.save(path, optimizers=[run.optimizer], extra={"step": step}, async_save=True)


def _trains_on(root: str, stage: int, replicate_size: int) -> None:
    """A run that saves at every step, and is never alone with a save, next to one that does not."""
    layout = (stage, replicate_size)
    undisturbed = make_run("dropout", *layout)
    right = [snapshot(undisturbed.model, undisturbed.optimizer)]
    losses = []
    for step in range(6):
        losses += train(undisturbed, [step])
        right.append(snapshot(undisturbed.model, undisturbed.optimizer))

    run = make_run("dropout", *layout)
    found = []
    for step in range(0, 6, 2):
        with held_back() as gate:
            save(run, f"{root}/{step}", step)
            found += train(run, [step, step + 1])
            assert run.engine.background.is_pending
            assert not os.path.exists(f"{root}/{step}")
            gate.set()
            run.engine.wait_for_save()
    assert found == losses
    assert_equal(right[6], snapshot(run.model, run.optimizer))
    for step in range(6):  # as fast as it goes, while batches are on their way
        save(run, f"{root}/more-{step}", step)
        train(run, [step])
    run.engine.wait_for_save()
    assert len(os.listdir(root)) == 9
    other = make_run("dropout", 3, seed=60)
    for step in range(0, 6, 2):
        other.engine.load(f"{root}/{step}", optimizers=[other.optimizer])
        assert_equal(right[step], snapshot(other.model, other.optimizer), step)
    assert train(other, [4, 5]) == losses[4:]


@pytest.mark.parametrize(
    ("world_size", "stage", "replicate_size"), [(3, 1, 1), (3, 2, 1), (3, 3, 1), (4, 3, 2)]
)
def test_training_goes_on_to_the_bit(
    pool: RankPool, tmp_path: Path, world_size: int, stage: int, replicate_size: int
) -> None:
    pool.run(_trains_on, world_size, str(tmp_path), stage, replicate_size)


def _shard_bytes(run: Run) -> int:
    """Bytes of what this rank saves, each tensor padded to 64."""
    tensors: list[Any] = [*run.model.parameters(), *run.model.buffers()]
    for state in run.optimizer.state.values():
        tensors += state.values()
    total = 0
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        elif dist.get_rank():
            continue
        total += -(-tensor.numel() * tensor.element_size() // 64) * 64
    return total


def _memory(root: str) -> None:
    run = make_run("plain", 3)
    train(run, range(2))
    assert run.engine.memory()["snapshot"] == 0
    run.engine.save(f"{root}/sync", optimizers=[run.optimizer])
    assert run.engine.memory()["snapshot"] == 0
    expected = _shard_bytes(run)
    assert expected > 50_000
    for name in ("a", "b"):
        with held_back() as gate:
            save(run, f"{root}/{name}")
            assert run.engine.memory()["snapshot"] == expected
            train(run, range(2, 4))
            assert run.engine.memory()["snapshot"] == expected
            gate.set()
            if name == "a":
                save(run, f"{root}/a")  # in the same memory
                assert run.engine.memory()["snapshot"] == expected
            run.engine.wait_for_save()
        assert run.engine.memory()["snapshot"] == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "shardplug-save"]


def test_memory_of_a_snapshot_is_one_shard(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_memory, 2, str(tmp_path))


def _in_turn(root: str) -> None:
    run = make_run("plain", 2)
    train(run, [0])
    done: list[str] = []
    with held_back() as gate:
        save(run, f"{root}/first")
        run.engine.background.after(lambda: done.append("first"))
        assert not os.path.exists(f"{root}/first")
        threading.Timer(0.3, gate.set).start()
        run.engine.save(
            f"{root}/second",
            optimizers=[run.optimizer],
            async_save=True,
            side_files=lambda folder: done.append(str(os.path.exists(f"{root}/first"))),
        )
    run.engine.background.after(lambda: done.append("second"))
    run.engine.wait_for_save()
    run.engine.background.after(lambda: done.append("now"))
    assert done == ["first", "True", "second", "now"]
    assert sorted(os.listdir(root)) == ["first", "second"]

    # The same path twice, and an older state does not come over a newer one.
    with held_back() as gate:
        save(run, f"{root}/first", 1)
        threading.Timer(0.3, gate.set).start()
        run.engine.save(f"{root}/first", optimizers=[run.optimizer], extra={"step": 2})
    run.engine.wait_for_save()
    assert run.engine.load(f"{root}/first", optimizers=[run.optimizer]) == {"step": 2}


def test_saves_take_turns(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_in_turn, 2, str(tmp_path))


def _fails(root: str) -> None:
    """A failure is raised once, wherever the ranks look next; training and saving go on."""
    rank = dist.get_rank()
    undisturbed, run = make_run("dropout", 2), make_run("dropout", 2)
    save(run, f"{root}/a", 0)
    run.engine.wait_for_save()
    ran: list[str] = []

    def fail(victim: int) -> None:
        fault = failing("fsync", thread="shardplug-save")
        with fault if rank == victim else no_fault(), held_back() as gate:
            save(run, f"{root}/b", 1)
            run.engine.background.after(lambda: ran.append("after"))
            gate.set()
            while run.engine.background._thread.is_alive():
                time.sleep(0.001)
        dist.barrier()  # rank 0 removes what was written
        assert files_in(root) == before
        dist.barrier()

    before = files_in(root)
    message = f"The save to {root}/b in the background failed. Saving failed on rank 1: OSError:"
    generator = torch.get_rng_state()
    losses = train(undisturbed, range(4))
    torch.set_rng_state(generator)

    fail(1)
    step = 0
    with run.engine.micro_step():
        batch = batch_of(step, rank, dist.get_world_size())
        loss = lm_loss(run.model(batch), batch)
        loss.backward()
    fails_together(run.optimizer.step, message)
    run.optimizer.step()  # nothing is lost: the same step again
    run.optimizer.zero_grad()
    found = [loss.item(), *train(run, [1])]

    fail(1)
    fails_together(run.engine.wait_for_save, message)
    run.engine.wait_for_save()
    found += train(run, [2])

    fail(0)
    fails_together(lambda: save(run, f"{root}/b", 2), message.replace("rank 1", "rank 0"))
    save(run, f"{root}/b", 3)
    found += train(run, [3])
    run.engine.wait_for_save()
    assert found == losses
    assert_equal(
        snapshot(undisturbed.model, undisturbed.optimizer), snapshot(run.model, run.optimizer)
    )
    assert ran == []
    point = resume_point(root, verify=True)
    assert point is not None and point.path.name == "b" and not point.passed_over

    # The copy itself fails on one rank.
    broken = mock.patch.object(SnapshotMemory, "block", side_effect=MemoryError("no memory"))
    with broken if rank == 1 else no_fault():
        fails_together(lambda: save(run, f"{root}/c"), "Saving failed on rank 1: MemoryError")
    assert sorted(os.listdir(root)) == ["a", "b"]
    assert not run.engine.background.is_pending


def test_a_failure_is_raised_by_step_wait_and_save(pool: RankPool, tmp_path: Path) -> None:
    """Case 34."""
    pool.run(_fails, 2, str(tmp_path))


def _looks_without_waiting(root: str) -> None:
    """A rank whose thread still works keeps no rank waiting, and no rank ends the save alone."""
    run, rank, gate = make_run("plain", 2), dist.get_rank(), threading.Event()
    background = run.engine.background
    with held_back() as written:
        save(run, f"{root}/a")
        if rank == 1:
            background.after(lambda: gate.wait(20) or None)
        written.set()
        if rank == 0:
            background._thread.join()
    dist.barrier()
    train(run, range(2))
    assert background.is_pending and background._thread.is_alive() == (rank == 1)
    gate.set()
    background._thread.join()
    dist.barrier()
    train(run, [2])
    assert not background.is_pending


def test_looking_at_a_save_does_not_wait_for_it(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_looks_without_waiting, 2, str(tmp_path))


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that worker processes make."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index) ** 2)


def _beside_others(root: str) -> None:
    """Loader workers forked meanwhile, an exception in training, another run beside this one."""
    run, other = make_run("plain", 3), make_run("plain", 1, seed=6)
    state = snapshot(run.model, run.optimizer)
    # The ranks of the pool are daemons, which may not have children of their own.
    multiprocessing.current_process()._config["daemon"] = False
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=4, num_workers=2, persistent_workers=True
    )
    with held_back() as gate:
        save(run, f"{root}/a")
        assert len(list(loader)) == 6  # forks workers, which stay
        with pytest.raises(ZeroDivisionError), run.engine.micro_step():
            loss = run.model(batch_of(0, 0, 1)[:2]).sum()
            loss.backward()
            _ = 1 / 0
        run.engine.reset()
        train(run, range(2))
        (living,) = [name for name in os.listdir(root) if name.startswith(".a.tmp-")]
        other.engine.save(f"{root}/b", optimizers=[other.optimizer])
        dist.barrier()
        assert sorted(os.listdir(root)) == [living, "b"]
        gate.set()
        save(other, f"{root}/c")  # two in the background at once
        train(run, range(2))
        train(other, range(2))
        run.engine.wait_for_save()
        other.engine.wait_for_save()
    assert sorted(os.listdir(root)) == ["a", "b", "c"]
    save(run, f"{root}/a")  # the workers still live
    run.engine.wait_for_save()
    assert len(list(loader)) == 6
    assert sorted(os.listdir(root)) == ["a", "b", "c"]
    del loader
    save(run, f"{root}/first")
    run.engine.wait_for_save()
    run.engine.load(f"{root}/a", optimizers=[run.optimizer])
    assert state.keys() < snapshot(run.model, run.optimizer).keys()


def test_workers_errors_and_other_runs_beside_a_save(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_beside_others, 2, str(tmp_path))


def _alone(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(make_model("groups", 1))
    optimizer = engine.prepare_optimizer(make_optimizer("groups", model))
    run = Run(engine, model, optimizer)
    train(run, range(2))
    state = snapshot(model, optimizer)
    with held_back():
        save(run, f"{root}/a", 2)
        train(run, range(2, 4))
    engine.wait_for_save()
    assert engine.load(f"{root}/a", optimizers=[optimizer]) == {"step": 2}
    assert_equal(state, snapshot(model, optimizer))
    with failing("rename"):
        save(run, f"{root}/b")
        with pytest.raises(CheckpointError, match="rank 0: OSError"):
            engine.wait_for_save()
    assert os.listdir(root) == ["a"]
    same_on_all_ranks(1)


def test_one_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_alone, 1, str(tmp_path))


ENDING = """
import os, sys, threading, time
import torch, torch._dynamo, torch.distributed as dist
from tests.dist.checkpoint_runs import make_run, train

root = sys.argv[1]

def rank_main(rank, case):
    real = os.fsync

    def fsync(handle):
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.3)
            if case == "fails" and rank == 1:
                raise OSError(28, "No space left on device")
        real(handle)

    os.fsync = fsync
    store = f"file://{root}/store-{case}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    run = make_run("plain", 3)
    train(run, [0])
    run.engine.save(f"{root}/{case}", optimizers=[run.optimizer], async_save=True)
    assert not os.path.exists(f"{root}/{case}")
    if case == "raises":
        raise ZeroDivisionError
    if case == "exits":
        sys.exit(3)
    if case == "destroys":
        dist.barrier()  # else a rank that is late meets one that has failed and is gone
        dist.destroy_process_group()

ranks = {}
for case in sys.argv[2:]:
    for rank in range(2):
        pid = os.fork()
        if not pid:
            log = os.open(f"{root}/log-{case}-{rank}", os.O_CREAT | os.O_WRONLY)
            os.dup2(log, 1), os.dup2(log, 2)
            rank_main(rank, case)
            sys.exit()
        ranks[pid] = case
for pid, case in ranks.items():
    print(case, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_process_that_ends_finishes_its_save(tmp_path: Path) -> None:
    codes = {"returns": 0, "raises": 1, "exits": 3, "destroys": 0, "fails": 0}
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path), *codes],
        capture_output=True,
        text=True,
        timeout=100,
    )
    logs = {file.name: file.read_text() for file in tmp_path.glob("log-*")}
    assert done.returncode == 0, (done.stderr, logs)
    expected = [f"{case} {code}" for case, code in codes.items() for _ in range(2)]
    assert done.stdout.splitlines() == expected, logs
    for case in ("returns", "raises", "exits"):
        assert is_checkpoint(tmp_path / case) and len(files_in(tmp_path / case)) == 7
    point = resume_point(tmp_path, verify=True)
    assert point is not None and not point.passed_over
    # What cannot be finished is said, and nothing is published by halves.
    for case, why in (
        ("destroys", "The process group was destroyed: call wait_for_save() before that."),
        ("fails", "Saving failed on rank 1: OSError"),
    ):
        assert not (tmp_path / case).exists()
        for rank in range(2):
            log = logs[f"log-{case}-{rank}"]
            said = f"The save to {tmp_path / case} in the background failed. {why}"
            assert said in log, log
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]
