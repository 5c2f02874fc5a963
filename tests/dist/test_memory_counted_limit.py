"""Forced failures under a limit of all that a process holds, as a control group has one.

The limit counts private resident memory: the interpreter, libraries, gloo and what glibc keeps of
what was freed are in it, and no option of the C allocator is set. It is looked at after every
operation, and the one that exceeds it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import TorchDispatchMode
from shardplug.memory import is_out_of_memory
from shardplug.oom.watch import OomWatch
from shardplug.process.limits import ControlGroup
from shardplug.process.meter import private_bytes
from tests.dist.test_memory_forced import LARGE, Case, _follow, _planned
from tests.support.pool import RankPool

MIB = 2**20
CASES = {
    # Nothing was done yet when the first step fails: what glibc will keep is not known.
    "activations, first step": (Case("activations", "zero2", batch=48, length=256, layers=6), 0),
    "whole gradients, first step": (
        Case("gradients", "zero1", **LARGE, layers=8, accumulate=2, length=16),
        0,
    ),
    # A longer batch comes after two steps of short ones.
    "activations, third step": (
        Case("activations", "zero2", width=256, hidden=512, layers=6, batch=16, length=512),
        2,
    ),
}


class Counted(ControlGroup):
    """A control group of this process alone, whose limit the test sees to."""

    def __init__(self, limit: int) -> None:
        super().__init__(Path("no such folder"))
        self._limit = limit

    @property
    def limit(self) -> int | None:
        return self._limit

    @property
    def used(self) -> int | None:
        return private_bytes()

    def near(self, share: float = 0.95) -> str:
        return ""


class Limited(TorchDispatchMode):
    """Fails the first operation after which this process has more than the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.peak, self.holds = limit, 0, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        now = private_bytes()
        assert now is not None
        self.peak = max(self.peak, now)
        if now > self.limit and self.holds:
            del result  # as if it had been refused
            self.holds = False  # the report needs room too
            raise RuntimeError("can't allocate memory: the counted limit is exceeded")
        return result


def _train(engine: ZeroEngine, model: Any, case: Case, short_steps: int) -> None:
    made: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = engine.prepare_optimizer(made[case.optimizer](model.parameters(), lr=1e-4))
    for step in range(short_steps + 2):
        length = case.length // 16 if step < short_steps else case.length
        ids = torch.randint(0, case.vocab, (case.batch, length))
        for micro in range(case.accumulate):
            with engine.micro_step(last=micro == case.accumulate - 1):
                model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def _run(
    case: Case,
    folder: Path,
    short_steps: int,
    budget: int,
    room: int = 0,
    mmap_threshold: int | None = None,
) -> Any:
    """Train under the limit; return the error, what was printed, the limit and the peak."""
    if mmap_threshold is not None:  # what MALLOC_MMAP_THRESHOLD_ does in a process that starts
        assert ctypes.CDLL("libc.so.6").mallopt(-3, mmap_threshold)
    (folder / "swap").mkdir(parents=True, exist_ok=True)
    os.environ["SHARDPLUG_NVME_PATH"] = str(folder / "swap")
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    watch = OomWatch(folder=folder)
    engine = ZeroEngine(ZeroConfig.parse(case.config), listeners=[watch])
    model = engine.shard(case.build())
    before = private_bytes()
    assert before is not None
    limited = Limited(room or before - sum(engine.memory().values()) + budget)
    watch._group = Counted(limited.limit)
    error, printed = "", io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            with limited:
                _train(engine, model, case, short_steps)
        except Exception as failure:
            other = "Another rank failed" in str(failure) or "closed" in str(failure)
            assert is_out_of_memory(failure) or other, repr(failure)
            error = repr(failure)
            failure.__traceback__ = None
    return error, printed.getvalue(), limited.limit, limited.peak


@pytest.fixture
def fresh() -> Iterator[list[RankPool]]:
    """Makes pools of new processes; nothing that another test has left over is in them."""
    pools: list[RankPool] = [RankPool(), RankPool()]
    yield pools
    for pool in pools:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_what_is_recommended_first_fits(fresh: list[RankPool], tmp_path: Path, name: str) -> None:
    case, short_steps = CASES[name]
    budget = int(0.85 * _planned(case, ZeroConfig.parse(case.config)))
    small = Case("", case.config, batch=case.accumulate, length=32, accumulate=case.accumulate)
    fresh[0].run(_run, 2, small, tmp_path / "warm", 0, 2**40)
    results = fresh[0].run(_run, 2, case, tmp_path, short_steps, budget, group_timeout=20.0)
    assert any("can't allocate" in error for error, *_ in results), results
    report = (tmp_path / "out_of_memory.txt").read_text()
    assert f"the largest kind is {case.expected}." in report, report
    overhead = re.search(r"besides the plan: ([\d.]+) (MiB|GiB)", report)
    assert overhead is not None, report
    size = float(overhead.group(1)) * {"MiB": MIB, "GiB": 2**30}[overhead.group(2)]
    assert size > 50 * MIB, "the interpreter and libraries alone"
    first = next(line for line in report.splitlines() if line.startswith("  1. "))
    assert ", fits; " in first, report
    other = _follow(case, report)
    threshold = re.search(r"MALLOC_MMAP_THRESHOLD_=(\d+)", first)
    given_back = None if threshold is None else int(threshold.group(1))
    assert (other, given_back) != (case, None)
    # In new processes, under what the failed rank had.
    fresh[1].run(_run, 2, small, tmp_path / "warm", 0, 2**40)
    rooms = max(results, key=lambda result: "can't allocate" in result[0])[2]
    again = fresh[1].run(
        *(_run, 2, other, tmp_path / "again", short_steps, 0, rooms, given_back), group_timeout=20.0
    )
    assert [error for error, *_ in again] == ["", ""], report + again[0][1]
    assert all(0 < peak <= rooms for *_, peak in again)
