"""Faults of the drive that the system itself raises, and processes that are killed."""

from __future__ import annotations

import encodings.unicode_escape  # noqa: F401  (another user may not read Python's own files)
import errno
import gc
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ConfigError, StorageError, ZeroEngine
from shardplug.checkpoint import resume_point
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.file import SwapFile
from shardplug.tiers.probe import probe_memory
from shardplug.tiers.swap import remove_dead
from tests.dist.test_offload import config, run, same_state, same_weights, train
from tests.dist.test_offload_checkpoint import fresh
from tests.dist.test_offload_faults import backward
from tests.support.drives import memory_drive, read_only, thin_drive
from tests.support.faults import files_in, no_fault, powerless
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool

MIB = 2**20


class Wide(nn.Module):
    """4 MiB of parameters, so 8 MiB of Adam's state."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: one number; returns a loss."""
        return sum((p * x).cos().mean() for p in self.parts)  # type: ignore[return-value]


def wide(tier: str, root: str) -> tuple[ZeroEngine, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    engine = ZeroEngine(config(2, tier, root))
    model = engine.shard(Wide())
    return engine, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def walk(engine: ZeroEngine, model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> None:
    for step in range(n):
        backward(engine, model, step)
        optimizer.step()
        optimizer.zero_grad()


def full_in_a_step(drive: str, root: str) -> None:
    """Room was reserved; the system refuses to fill it in the middle of the first step."""
    engine, model, optimizer = wide("nvme", drive)
    engine.prepare_optimizer(optimizer)
    engine.save(f"{root}/good", optimizers=[optimizer])
    before = engine.full_state_dict(model, rank0_only=False)
    backward(engine, model, 0)
    parts = ("Writing", "bytes at byte", drive, "state.swap failed: No space left", "load the last")
    parts += ("bytes free.",)
    with raises_everywhere(StorageError, *parts):
        optimizer.step()
    after = engine.full_state_dict(model, rank0_only=False)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    del engine, model, optimizer
    gc.collect()
    dist.barrier()
    assert not [name for name in files_in(drive) if "swap" in name], "no file is left"
    # On a drive that has the room, the last checkpoint continues as if nothing had been.
    other = wide("nvme", root)
    other[0].prepare_optimizer(other[2])
    other[0].load(f"{root}/good", optimizers=[other[2]])
    walk(*other, 2)
    expected = wide("none", root)
    expected[0].prepare_optimizer(expected[2])
    walk(*expected, 2)
    same_weights(other[:2], expected[:2])
    assert same_state(other[2], expected[2])


def test_a_drive_with_less_room_than_it_says(pool: RankPool, tmp_path: Path) -> None:
    """No function is replaced: a write of reserved room meets ENOSPC of the system."""
    with thin_drive(tmp_path / "drive", 64 * MIB, 4 * MIB) as drive:
        pool.run(full_in_a_step, 2, str(drive), str(tmp_path))


def without_a_reserve(drive: str, root: str) -> None:
    """As on a filesystem that cannot reserve: other files take the room before the step does."""

    def sparse(file: int, offset: int, count: int) -> None:
        os.ftruncate(file, offset + count)

    with mock.patch.object(os, "posix_fallocate", sparse):
        full_in_a_step(drive, root)


def test_a_small_filesystem_that_reserves_nothing(pool: RankPool, tmp_path: Path) -> None:
    with memory_drive(tmp_path / "drive", 5 * MIB) as drive:
        pool.run(without_a_reserve, 2, str(drive), str(tmp_path))


def without_rights(closed: str, missing: str, written: str) -> None:
    """Rank 1 is another user, whom the system denies the folder."""
    rank = dist.get_rank()
    user: AbstractContextManager[Any] = powerless() if rank == 1 else no_fault()
    with user, raises_everywhere(ConfigError, closed, "Permission denied", "Change its rights"):
        ZeroEngine(config(1, "nvme", closed))
    dist.barrier()
    assert not files_in(closed), "the rank that succeeded has cleaned up"
    with raises_everywhere(ConfigError, f"{missing} does not exist"):
        ZeroEngine(config(1, "nvme", missing))
    with raises_everywhere(ConfigError, f"{written} is a file"):
        ZeroEngine(config(1, "nvme", written))


def test_a_folder_that_may_not_be_written_to(pool: RankPool) -> None:
    with tempfile.TemporaryDirectory() as root:  # pytest's own folder is closed as a whole
        os.chmod(root, 0o755)
        Path(root, "closed").mkdir(mode=0o755)
        Path(root, "written").write_text("")
        pool.run(without_rights, 2, f"{root}/closed", f"{root}/missing", f"{root}/written")


def only_read(drive: str) -> None:
    with raises_everywhere(ConfigError, drive, "could not be made: Read-only file system"):
        ZeroEngine(config(1, "nvme", drive))


def test_a_filesystem_that_is_only_read(pool: RankPool, tmp_path: Path) -> None:
    with memory_drive(tmp_path / "drive", MIB) as drive, read_only(drive):
        pool.run(only_read, 2, str(drive))


def broken_calls(root: str) -> None:
    """EIO in the system's own calls, and calls that do a part of what they are asked for."""
    last = dist.get_world_size() - 1
    for call in ("preadv", "pwritev"):
        engine, model, optimizer = train(3, "nvme", root, "adamw", flat=True, steps=2)
        before = engine.full_state_dict(model, rank0_only=False)
        backward(engine, model, 2)
        fault: AbstractContextManager[Any] = no_fault()
        if engine.rank == last:
            original = getattr(os, call)

            def fails(*args: Any, _count: list[int] = [0]) -> int:  # noqa: B006
                _count[0] += 1
                if _count[0] > 2:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return int(original(*args))  # noqa: B023

            fault = mock.patch.object(os, call, fails)
        with fault, raises_everywhere(StorageError, "state.swap failed: Input/output error"):
            optimizer.step()
        after = engine.full_state_dict(model, rank0_only=False)
        assert before and all(torch.equal(before[name], after[name]) for name in before)

    read, write = os.preadv, os.pwritev
    partial = [0]

    def some(buffers: list[memoryview]) -> list[memoryview]:
        half = len(buffers[0]) // 2 // 4096 * 4096
        partial[0] += half > 0
        return [buffers[0][:half]] if half else buffers

    with (
        mock.patch.object(os, "preadv", lambda f, b, o: read(f, some(b), o)),
        mock.patch.object(os, "pwritev", lambda f, b, o: write(f, some(b), o)),
    ):
        ours = train(3, "nvme", root, "adamw", flat=True, steps=3)
    same_weights(ours[:2], train(3, "none", None, "adamw", flat=True, steps=3)[:2])
    assert partial[0] > 10


def test_calls_of_the_system_that_fail_or_do_a_part(pool: RankPool, tmp_path: Path) -> None:
    pool.run(broken_calls, 2, str(tmp_path))


def dies_somewhere(root: str, seed: int) -> None:
    """Save after each step; die after the first, at a read or a write that chance picks."""
    chance = random.Random(seed)
    victim, call = chance.randrange(2), chance.choice(("read", "write"))
    calls = chance.randrange(1, 30)
    engine, model, optimizer = fresh("nvme", root, "adamw", stage=3, seed=5)

    def step_and_save(step: int) -> None:
        run(engine, model, optimizer, range(step, step + 1))
        engine.save(f"{root}/step{step}", optimizers=[optimizer], extra={"step": step + 1})

    step_and_save(0)
    if engine.rank == victim:
        original = getattr(SwapFile, call)
        seen = 0

        def dies(*args: Any) -> None:
            nonlocal seen
            original(*args)
            seen += 1
            if seen >= calls:  # several threads count
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(SwapFile, call, dies)
    for step in range(1, 20):
        step_and_save(step)


def goes_on(root: str, found: str) -> int:
    ours = fresh("nvme", root, "adamw", stage=3)
    begin = ours[0].load(found, optimizers=[ours[2]])["step"]
    run(*ours, range(begin, begin + 3))
    expected = fresh("none", root, "adamw", stage=3, seed=5)
    run(*expected, range(begin + 3))
    same_weights(ours[:2], expected[:2])
    assert same_state(ours[2], expected[2])
    return int(begin)


def test_a_kill_at_a_random_step(pool: RankPool, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # shown where the test fails
    with pytest.raises(AssertionError, match="the process died|hung|failed"):
        pool.run(dies_somewhere, 2, str(tmp_path), seed, group_timeout=10.0)
    found = resume_point(tmp_path)
    assert found is not None
    assert all(begin >= 1 for begin in pool.run(goes_on, 2, str(tmp_path), str(found.path)))
    pool.close()
    remove_dead(tmp_path)
    for path in tmp_path.glob("step*"):
        shutil.rmtree(path)
    assert not [name for name in files_in(tmp_path) if "swap" in name]


def is_killed(root: str) -> None:
    engine, model, optimizer = train(1, "nvme", root, "sgd", steps=1)
    SwapFile.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    run(engine, model, optimizer, range(1, 2))


def beside(root: str, begun: str, over: str) -> None:
    """Train before, while and after another run in the same folder is killed."""
    engine, model, optimizer = train(2, "nvme", root, "adamw", flat=True, steps=2)
    tier = engine._offload.optimizer_tier
    assert isinstance(tier, DiskTier)
    dist.barrier()
    Path(begun).touch()
    while not Path(over).exists():
        time.sleep(0.02)
    run(engine, model, optimizer, range(2, 4))
    folders = {path.name for path in Path(root).glob("shardplug-swap-*")}
    dist.barrier()
    third = train(1, "nvme", root, "sgd", flat=True, steps=2)  # its start removes the dead one's
    dist.barrier()
    gone = {name for name in folders if not Path(root, name).exists()}
    assert gone and not any(tier.path.parent.name.startswith(name[:-1]) for name in gone)
    run(engine, model, optimizer, range(4, 6))
    same_weights((engine, model), train(2, "none", None, "adamw", flat=True, steps=6)[:2])
    same_weights(third[:2], train(1, "none", None, "sgd", flat=True, steps=2)[:2])


def test_a_run_beside_one_that_is_killed(pool: RankPool, tmp_path: Path) -> None:
    begun, over = tmp_path / "begun", tmp_path / "over"
    with ThreadPoolExecutor(1) as threads:
        living = threads.submit(pool.run, beside, 2, str(tmp_path), str(begun), str(over))
        while not begun.exists() and not living.done():
            time.sleep(0.02)
        other = RankPool()
        other.run(is_killed, 1, str(tmp_path), expect_death=True)
        other.close()
        assert len(list(tmp_path.glob("shardplug-swap-*/state.swap"))) > 2, "nobody removed it"
        over.touch()
        living.result()


def locks_nothing(root: str) -> None:
    """Files need no locked memory: buffers are pinned for a GPU only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
    os.chmod(root, 0o777)
    expected = train(1, "none", None, "adamw", flat=True, steps=3)
    try:
        with powerless():  # the limit is not for root
            found = probe_memory(MIB)
            assert found.lock_limit_bytes == 0 and not found.locks
            ours = train(1, "nvme", root, "adamw", flat=True, steps=3)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    same_weights(ours[:2], expected[:2])


def test_no_memory_may_be_locked(pool: RankPool) -> None:
    with tempfile.TemporaryDirectory() as root:
        pool.run(locks_nothing, 1, root)
