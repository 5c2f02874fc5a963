"""Runs that are killed in the middle of a save go on from the last whole one; case 32."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardplug import collective
from shardplug.checkpoint import resume_point
from shardplug.checkpoint.write import writer
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import make_run
from tests.support.pool import RankPool


@pytest.mark.timeout(300)
def test_a_sample_of_kills_is_resumed() -> None:
    """The whole is `python -m tests.dist.kill_harness --kills 200`."""
    # In a process of its own: it forks, and must have no threads.
    done = subprocess.run(
        [sys.executable, "-m", "tests.dist.kill_harness", "--kills", "8", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    assert re.search(r"^8 kills, all resumed", done.stdout, re.MULTILINE), done.stdout


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """Ranks that may die."""
    ranks = RankPool()
    yield ranks
    ranks.close()


def _dies(root: str, victim: int, phase: str, asynchronous: bool) -> tuple[str, float]:
    """One rank dies in a phase of a save; return what the others raise, and after how long."""
    run = make_run("plain", 3)
    run.engine.save(f"{root}/a", optimizers=[run.optimizer])
    if dist.get_rank() == victim:
        # Only this process: it is not used again.
        setattr(writer.CheckpointWrite, phase, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    began = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        run.engine.save(f"{root}/a", optimizers=[run.optimizer], async_save=asynchronous)
        run.engine.wait_for_save()
    return str(error.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("victim", "phase", "asynchronous"), [(2, "_write_tensors", False), (0, "_publish", True)]
)
def test_the_ranks_that_are_left_end_soon(
    own_pool: RankPool, tmp_path: Path, victim: int, phase: str, asynchronous: bool
) -> None:
    """Three ranks, as with two nobody waits for one who waits for the dead one."""
    arguments: tuple[Any, ...] = (str(tmp_path), victim, phase, asynchronous)
    left = [one for one in own_pool.run(_dies, 3, *arguments, expect_death=True) if one]
    assert len(left) == 2
    for text, seconds in left:
        assert text.endswith(f"Saving failed. {collective._GONE}")
        assert text == left[0][0] and seconds < 30
    point = resume_point(tmp_path, verify=True, warn=False)
    assert point is not None and point.path == tmp_path / "a"


def _dies_before_the_group_is_made(root: str) -> tuple[str, float]:
    run = make_run("plain", 3)
    if dist.get_rank() == 1:
        collective._make_group = lambda: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(CheckpointError) as error:
        run.engine.save(f"{root}/a", optimizers=[run.optimizer], async_save=True)
    return str(error.value), time.monotonic() - began


def test_the_first_save_in_the_background_waits_for_no_dead_rank(
    own_pool: RankPool, tmp_path: Path
) -> None:
    left = own_pool.run(_dies_before_the_group_is_made, 2, str(tmp_path), expect_death=True)
    text, seconds = left[0]
    assert text == f"Saving failed. {collective._GONE}"
    assert seconds < 30 and os.listdir(tmp_path) == [] and left[1] is None
