"""Faults of the drive: an error on every rank, no half-applied step, nothing left behind."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardplug import CheckpointError, ConfigError, StorageError, ZeroConfig, ZeroEngine
from shardplug.tiers import PATH_VARIABLE
from shardplug.tiers.file import SwapFile
from shardplug.tiers.swap import remove_dead
from tests.dist.test_offload import Flat, config, run, same_state, same_weights, train
from tests.dist.test_offload_checkpoint import fresh
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool


@contextmanager
def failing(method: str, code: int, *, after: int = 0) -> Iterator[None]:
    """Let reads or writes of swap files fail, from one on."""
    original = getattr(SwapFile, method)
    count = itertools.count()

    def fails(*args: Any) -> None:
        if next(count) >= after:
            raise OSError(code, os.strerror(code))
        original(*args)

    setattr(SwapFile, method, fails)
    try:
        yield
    finally:
        setattr(SwapFile, method, original)


def backward(engine: ZeroEngine, model: torch.nn.Module, step: int) -> None:
    with engine.micro_step():
        model(torch.tensor(1.0 + 0.1 * step + 0.7 * engine.rank)).backward()


def in_the_step(root: str, stage: int, tier: str) -> None:
    last = dist.get_world_size() - 1
    for method, code, after in (
        ("write", errno.ENOSPC, 0),
        ("write", errno.EIO, 3),
        ("read", errno.EIO, 0),
        ("read", errno.EIO, 5),
    ):
        engine, model, optimizer = train(stage, tier, root, "adamw", flat=True, steps=3)
        engine.save(f"{root}/good", optimizers=[optimizer])
        before = engine.full_state_dict(model, rank0_only=False)
        backward(engine, model, 3)
        doing = {"write": "Writing", "read": "Reading"}[method]
        parts = (doing, "bytes at byte", "state.swap failed: ", os.strerror(code), "load the last")
        with raises_everywhere(StorageError, *parts):
            if engine.rank == last:
                with failing(method, code, after=after):
                    optimizer.step()
            else:
                optimizer.step()
        # No half-applied step, on no rank.
        after_it = engine.full_state_dict(model, rank0_only=False)
        assert before and all(torch.equal(before[name], after_it[name]) for name in before)
        # And no silent way on.
        backward(engine, model, 3)
        with raises_everywhere(StorageError, "an earlier step failed", os.strerror(code)):
            optimizer.step()
        with raises_everywhere(CheckpointError, "an earlier step failed"):
            engine.save(f"{root}/bad", optimizers=[optimizer])
        assert not Path(root, "bad").exists()
        with raises_everywhere(StorageError, "an earlier step failed"):
            len(list(optimizer.state))
        engine.save(f"{root}/weights")
        # The last checkpoint heals it.
        optimizer.zero_grad()
        engine.load(f"{root}/good", optimizers=[optimizer])
        run(engine, model, optimizer, range(3, 6))
        expected = train(stage, "none", None, "adamw", flat=True, steps=6)
        same_weights((engine, model), expected[:2])
        assert same_state(optimizer, expected[2])


@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize(("stage", "tier"), [(2, "nvme"), (3, "infinity")])
def test_faults_in_the_middle_of_a_step(
    pool: RankPool, tmp_path: Path, stage: int, tier: str, world_size: int
) -> None:
    pool.run(in_the_step, world_size, str(tmp_path), stage, tier)


def outside_the_step(root: str) -> None:
    """Reads for gathers, and writes of gradients."""
    last = dist.get_world_size() - 1
    engine, model, optimizer = train(3, "infinity", root, "adamw", flat=True, steps=3)
    before = engine.full_state_dict(model, rank0_only=False)
    engine._offload.parameter_tier._ahead.drop_all()  # type: ignore[union-attr]
    broken = [failing("read", errno.EIO)] if engine.rank == last else []
    with raises_everywhere(StorageError, "Reading", "state.swap failed: Input/output error"):
        with ExitStack() as stack:
            for one in broken:
                stack.enter_context(one)
            model(torch.tensor(0.5))
    engine.reset()
    broken = [failing("write", errno.ENOSPC)] if engine.rank == last else []
    with raises_everywhere(StorageError, "Writing", "state.swap failed: No space left"):
        with ExitStack() as stack:
            for one in broken:
                stack.enter_context(one)
            backward(engine, model, 3)
            optimizer.step()
    engine.reset()
    after = engine.full_state_dict(model, rank0_only=False)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    run(engine, model, optimizer, range(3, 5))
    expected = train(3, "none", None, "adamw", flat=True, steps=5)
    same_weights((engine, model), expected[:2])


@pytest.mark.parametrize("world_size", (1, 2))
def test_faults_of_gathers_and_gradients(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    pool.run(outside_the_step, world_size, str(tmp_path))


def interrupted(root: str) -> None:
    engine, model, optimizer = train(2, "nvme", root, "adamw", flat=True, steps=2)
    before = engine.full_state_dict(model, rank0_only=False)
    backward(engine, model, 2)
    original = SwapFile.read

    def interrupts(*args: Any) -> None:
        original(*args)
        raise KeyboardInterrupt

    SwapFile.read = interrupts  # type: ignore[method-assign]
    try:
        with pytest.raises((KeyboardInterrupt, StorageError)):
            optimizer.step()
    finally:
        SwapFile.read = original  # type: ignore[method-assign]
    after = engine.full_state_dict(model, rank0_only=False)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    backward(engine, model, 2)
    with pytest.raises(StorageError, match="an earlier step failed"):
        optimizer.step()


def test_interrupt_in_the_middle_of_a_step(pool: RankPool, tmp_path: Path) -> None:
    pool.run(interrupted, 1, str(tmp_path))


def vanished(root: str) -> None:
    engine, model, optimizer = train(2, "nvme", root, "adamw", flat=True, steps=2)
    backward(engine, model, 2)
    before = engine.full_state_dict(model, rank0_only=False)
    if engine.rank == 1:
        shutil.rmtree(engine._offload.optimizer_tier.path.parent)  # type: ignore[union-attr]
    with raises_everywhere(StorageError, "state.swap of", "gone or another"):
        optimizer.step()
    after = engine.full_state_dict(model, rank0_only=False)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    engine.save(f"{root}/still", optimizers=[optimizer])  # as the message says
    other = fresh("nvme", root, "adamw")
    other[0].load(f"{root}/still", optimizers=[other[2]])
    run(*other, range(2, 4))
    expected = train(2, "none", None, "adamw", flat=True, steps=4)
    same_weights(other[:2], expected[:2])


def test_vanished_folder(pool: RankPool, tmp_path: Path) -> None:
    pool.run(vanished, 2, str(tmp_path))


def at_set_up(root: str) -> None:
    rank = dist.get_rank()

    def full(file: int, offset: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = ZeroEngine(config(2, "nvme", root))
    model = engine.shard(Flat())
    optimizer = torch.optim.AdamW(model.parameters())
    reserve = os.posix_fallocate
    if rank == 1:
        os.posix_fallocate = full
    try:
        with raises_everywhere(StorageError, "Expected room for", root, "bytes free: No space"):
            engine.prepare_optimizer(optimizer)
    finally:
        os.posix_fallocate = reserve
    assert engine.prepare_optimizer(optimizer) is optimizer  # there is room now
    run(engine, model, optimizer, range(2))

    missing = f"{root}/rank0/only"
    if rank == 0:
        Path(missing).mkdir(parents=True)
    dist.barrier()
    theirs = missing if rank == 0 else f"{missing}/not"
    with raises_everywhere(ConfigError, "not does not exist"):
        ZeroEngine(ZeroConfig(stage=1, offload_optimizer="nvme", nvme_path=theirs))
    dist.barrier()
    assert not list(Path(missing).iterdir()), "the ranks that succeeded have cleaned up"
    with raises_everywhere(ConfigError, "nvme_path", PATH_VARIABLE, 'offload_optimizer="nvme"'):
        ZeroEngine(ZeroConfig(offload_optimizer="nvme"))
    os.environ[PATH_VARIABLE] = missing
    tier = ZeroEngine(ZeroConfig(offload_optimizer="nvme"))._offload.optimizer_tier
    assert tier is not None and str(tier.path).startswith(missing)  # type: ignore[attr-defined]


def test_set_up_fails_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(at_set_up, 2, str(tmp_path))


def two_runs(root: str) -> None:
    one = train(2, "nvme", root, "adamw", flat=True, steps=2)
    two = train(2, "nvme", root, "sgd", flat=True, steps=2)
    run(*one, range(2, 4))
    run(*two, range(2, 4))
    same_weights(one[:2], train(2, "none", None, "adamw", flat=True, steps=4)[:2])
    same_weights(two[:2], train(2, "none", None, "sgd", flat=True, steps=4)[:2])


def test_two_runs_in_one_folder(pool: RankPool, tmp_path: Path) -> None:
    pool.run(two_runs, 2, str(tmp_path))


def memory_filesystem(root: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = train(1, "nvme", root, "adamw", steps=2)
    notices = [str(w.message) for w in caught if "tmpfs" in str(w.message)]
    assert len(notices) == (ours[0].rank == 0)
    same_weights(ours[:2], train(1, "none", None, "adamw", steps=2)[:2])


def test_memory_filesystem_works_with_one_notice(pool: RankPool, tmp_path: Path) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("needs a writable /dev/shm")
    folder = shm / f"shardplug-test-{os.getpid()}"
    folder.mkdir()
    try:
        pool.run(memory_filesystem, 2, str(folder))
    finally:
        shutil.rmtree(folder)


def killed(root: str) -> None:
    engine, model, optimizer = train(3, "nvme", root, "adamw", flat=True, steps=2)
    engine.save(f"{root}/last", optimizers=[optimizer])
    backward(engine, model, 2)
    if engine.rank == 0:
        original = SwapFile.write

        def dies(*args: Any) -> None:
            original(*args)
            os.kill(os.getpid(), signal.SIGKILL)

        SwapFile.write = dies  # type: ignore[method-assign]
    optimizer.step()


def resumed(root: str) -> None:
    ours = fresh("nvme", root, "adamw", stage=3)
    ours[0].load(f"{root}/last", optimizers=[ours[2]])
    run(*ours, range(2, 5))
    expected = train(3, "none", None, "adamw", flat=True, steps=5)
    same_weights(ours[:2], expected[:2])
    assert same_state(ours[2], expected[2])


def test_a_killed_run_is_resumed_and_leaves_nothing(pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        pool.run(killed, 2, str(tmp_path), group_timeout=10.0)
    pool.run(resumed, 2, str(tmp_path))
    pool.close()
    remove_dead(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def capped(root: str) -> None:
    """The system itself refuses, as on a small filesystem."""
    engine = ZeroEngine(config(1, "nvme", root))
    model = engine.shard(torch.nn.Linear(1000, 400))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with raises_everywhere(StorageError, "Expected room for 32", "File too large"):
            engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with engine.micro_step():
        model(torch.ones(2, 1000)).sum().backward()
    optimizer.step()


def test_a_limit_of_the_system(pool: RankPool, tmp_path: Path) -> None:
    pool.run(capped, 1, str(tmp_path))
