"""zero_auto and the report of an out-of-memory error, through a Trainer."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.lightning import ZeroStrategy
from shardplug.memory import AutoBudget
from tests.adapters.lightning.modules import Plain, build, in_order, trainer
from tests.support.pool import RankPool


class _Traced(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)  # and reads no values, which a trace does not have


def _fit(strategy: Any) -> tuple[str, Any, bool]:
    module = build(_Traced)
    run = trainer(strategy, max_epochs=1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run.fit(module, in_order())
    return said.getvalue(), run.strategy.engine.config, run.global_step > 0


def _decided(folder: str) -> list[tuple[str, Any, bool]]:
    os.environ["SHARDPLUG_DEVICE_MEMORY_GIB"] = "1"
    by_name = _fit("zero_auto")
    smallest = AutoBudget(device_memory_gib=1e-6, nvme_path=folder)
    with pytest.raises(ValueError, match="nothing fits"):
        _fit(ZeroStrategy(budget=smallest))
    with pytest.raises(ValueError, match="zero_auto decides"):
        ZeroStrategy(stage=2, budget={"device_memory_gib": 1.0})
    return [by_name, _fit(ZeroStrategy(budget={"device_memory_gib": 1.0}))]


def test_zero_auto_takes_what_fits(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(_decided, 2, str(tmp_path))
    for said, config, trained in ranks[0]:
        assert "shardplug: zero_auto takes zero" in said and "formula" not in said
        assert config.offload_optimizer == "none" and trained
    assert [row[1] for row in ranks[0]] == [row[1] for row in ranks[1]]
    assert not any(said for said, *_ in ranks[1])


class _TooMuch(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 1:
            torch.empty(2**60)
        return super().training_step(batch, batch_idx)


def _out_of_memory(folder: str) -> str:
    run = trainer("zero2", max_epochs=1, default_root_dir=folder)
    written = io.StringIO()
    with contextlib.redirect_stderr(written), pytest.raises(RuntimeError, match="can't allocate"):
        run.fit(build(_TooMuch), in_order())
    return written.getvalue()


def test_a_trainer_explains_running_out_of_memory(pool: RankPool, tmp_path: Path) -> None:
    printed = [text for text in pool.run(_out_of_memory, 2, str(tmp_path)) if "ran out" in text]
    report = (tmp_path / "out_of_memory.txt").read_text()
    assert len(printed) == 1 and "planned at the peak" in report
    assert "during the forward in" in report and "Traceback" in report
    assert "What frees most:" in report
