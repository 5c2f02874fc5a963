"""Ten forced failures under a limit of the system: what the report recommends first fits.

The limit is RLIMIT_DATA: the allocation that exceeds it is refused by the kernel. Every tensor of
64 KiB or more gets a mapping of its own, so what is freed is given back at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import os
import re
import resource
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shardplug import ZeroConfig, ZeroEngine, default_listeners
from shardplug.memory import is_out_of_memory, plan
from shardplug.process.limits import process_used
from tests.support.models import Block
from tests.support.pool import RankPool


class _LM(nn.Module):
    def __init__(self, vocab: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (b, s) -> loss."""
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@dataclass(frozen=True)
class Case:
    """One run that does not fit, and the kind of memory that it has most of."""

    expected: str
    config: str
    width: int = 64
    hidden: int = 128
    layers: int = 3
    vocab: int = 257
    batch: int = 1
    length: int = 8
    accumulate: int = 1
    optimizer: str = "sgd"
    frozen: bool = False
    budget: float = 0.85
    """Share of the planned peak that there is."""
    disk: int = 0
    """Bytes that a file may have, or 0 for no limit."""
    fused: bool = False

    def build(self) -> nn.Module:
        """Build the model."""
        torch.manual_seed(0)
        model = _LM(self.vocab, self.width, self.hidden, self.layers)
        if self.frozen:
            model.requires_grad_(False)
            model.blocks[0].norm.requires_grad_(True)
        return model


LARGE: dict[str, Any] = {"width": 512, "hidden": 2048}
CASES = {
    "parameters": Case("master_shards", "zero3", **LARGE, layers=10, length=224, frozen=True),
    "activations by sequence": Case("activations", "zero2", length=6000, layers=6),
    "activations by micro-batch": Case("activations", "zero2", batch=48, length=128, layers=6),
    "logits by vocabulary": Case(
        "logits_and_loss", "zero2", vocab=20_011, width=16, batch=8, length=64
    ),
    "gathered units": Case("gathered", "zero2", **LARGE, layers=6, budget=0.93),
    "whole gradients": Case("gradients", "zero1", **LARGE, layers=6, accumulate=3),
    "frozen part": Case("gathered", "zero2", **LARGE, layers=6, frozen=True, optimizer="adamw"),
    "host tier": Case(
        "optimizer_state_cpu", "zero3_cpu", **LARGE, layers=16, optimizer="adamw", budget=0.92
    ),
    "optimizer state": Case(
        "optimizer_state", "zero3", **LARGE, layers=16, optimizer="adamw", budget=0.92
    ),
}


@contextlib.contextmanager
def _limited(base: int, case: Case, budget: int) -> Iterator[None]:
    """Let this process map no more than the budget above its base."""
    before = {n: resource.getrlimit(n) for n in (resource.RLIMIT_DATA, resource.RLIMIT_FSIZE)}
    resource.setrlimit(resource.RLIMIT_DATA, (base + budget, before[resource.RLIMIT_DATA][1]))
    if case.disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (case.disk, before[resource.RLIMIT_FSIZE][1]))
    try:
        yield
    finally:
        for name, value in before.items():
            resource.setrlimit(name, value)


def _planned(case: Case, config: ZeroConfig) -> int:
    found = plan(
        case.build().to("meta"),
        devices=2,
        device_memory_gib=4,
        precision="32-true",
        optimizer=case.optimizer,
        accumulate=case.accumulate,
        device="cpu",
        loop="pytorch",
        batch=torch.zeros(case.batch, case.length, dtype=torch.int64),
        loss=lambda model, ids: model(ids),
        activation_checkpointing=False,
        stage=config.stage,
    )
    choice = next(c for c in found.choices if c.offload_optimizer == config.offload_optimizer)
    return choice.device


def _run(case: Case, folder: Path, budget: int, fail: bool = False) -> tuple[str, str]:
    """Train two steps under the limit; return the error and what was printed."""
    libc = ctypes.CDLL("libc.so.6")
    assert libc.mallopt(-3, 64 * 2**10) and libc.mallopt(-8, 1)  # M_MMAP_THRESHOLD, M_ARENA_MAX
    threading.stack_size(2**18)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 * 2**10)  # the same, for the report
    (folder / "swap").mkdir(parents=True, exist_ok=True)
    os.environ["SHARDPLUG_NVME_PATH"] = str(folder / "swap")
    config = ZeroConfig.parse(case.config)
    engine = ZeroEngine(config, listeners=default_listeners(folder=folder))
    with _limited(2**40, case, 0):
        model = engine.shard(case.build())
    gc.collect()
    libc.malloc_trim(0)
    base = process_used()["data"]
    error, printed = "", io.StringIO()
    with contextlib.redirect_stderr(printed):
        try:
            with _limited(base - sum(engine.memory().values()), case, budget):
                _train(engine, model, case)
                if fail:
                    with engine.telling_errors():
                        torch.empty(2**60)
        except Exception as failure:
            other = "Another rank failed" in str(failure) or "closed" in str(failure)
            assert is_out_of_memory(failure) or other, repr(failure)
            error = repr(failure)
            if fail:
                raise
            failure.__traceback__ = None
    del model, engine
    gc.collect()
    return error, printed.getvalue()


def _train(engine: ZeroEngine, model: nn.Module, case: Case) -> None:
    trained = [p for p in model.parameters() if p.requires_grad]
    made: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    extra = {"fused": True} if case.fused else {}
    optimizer = made[case.optimizer](trained, lr=1e-4, **extra)
    ids = torch.randint(0, case.vocab, (case.batch, case.length))
    if case.disk:  # the plan of the report needs a forward that was seen
        with torch.enable_grad():
            model(ids)
    optimizer = engine.prepare_optimizer(optimizer)
    for _ in range(2):
        for micro in range(case.accumulate):
            with engine.micro_step(last=micro == case.accumulate - 1):
                model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def _follow(case: Case, report: str) -> Case:
    """Change the run as the first recommendation says."""
    first = report.split("\n  1. ", 1)[1].split("\n  2. ", 1)[0]
    line = re.search(r'Accelerate: .*"shardplug:([^"]+)"', first)
    assert line is not None, report
    text = re.sub(r",nvme_path=[^,]+", "", line.group(1))
    batch = re.search(r"a micro-batch of (\d+), accumulated (\d+) times", first)
    if batch:
        case = replace(case, batch=int(batch.group(1)), accumulate=int(batch.group(2)))
    return replace(case, config=text, fused="fused=True in the optimizer" in first)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own: memory that other tests have freed would be used past the limit."""
    ranks = RankPool()
    for config in ("zero3", "zero2,offload_optimizer=nvme"):  # modules are loaded before a limit
        ranks.run(_warm_up, 2, config)
    yield ranks
    ranks.close()


def _warm_up(config: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = Case("", config, optimizer="adamw", batch=2)
        assert _run(case, Path(folder), 2**40) == ("", "")
        with pytest.raises(RuntimeError, match="allocate"):
            _run(case, Path(folder), 2**40, fail=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_what_is_recommended_first_fits(ranks: RankPool, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    budget = int(case.budget * _planned(case, ZeroConfig.parse(case.config)))
    results = ranks.run(_run, 2, case, tmp_path, budget, group_timeout=20.0)
    assert any("memory" in error or "room" in error for error, _ in results), results
    report = (tmp_path / "out_of_memory.txt").read_text()
    printed = [text for _, text in results if "ran out of memory" in text]
    assert len(printed) == 1 and printed[0].strip() in report
    assert f"the largest kind is {case.expected}." in report, report
    other = _follow(case, report)
    assert other != case
    again = ranks.run(_run, 2, other, tmp_path / "again", budget)
    assert [error for error, _ in again] == ["", ""], report + again[0][1]
