"""zero_auto and the report of an out-of-memory error, through Accelerate."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug import ConfigError
from shardplug.integrations.accelerate.launch_options import ENVIRONMENT_NAME, LaunchOptions
from shardplug.plan.auto import split_auto
from tests.adapters.accelerate.common import accelerator, loader, samples, seeded_model
from tests.support.models import lm_loss
from tests.support.pool import RankPool


def _train(folder: str) -> tuple[str, Any, str]:
    said, written = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said):
        acc = accelerator(zero="zero_auto,device_memory_gib=1", project_dir=folder)
        model = seeded_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, batches = acc.prepare(model, optimizer, loader(samples()))
    with contextlib.redirect_stderr(written), pytest.raises(RuntimeError, match="can't allocate"):
        for step, batch in enumerate(batches):
            loss = lm_loss(model(batch), batch)
            if step == 1:
                loss.register_hook(lambda *_: torch.empty(2**60))
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return said.getvalue(), acc.engine.config, written.getvalue()


def test_accelerate_decides_and_explains(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_train, 2, str(tmp_path))
    assert "zero_auto takes zero" in first[0] and "zero_auto takes" not in second[0]
    assert first[1] == second[1] and first[1].offload_optimizer == "none"
    report = (tmp_path / "out_of_memory.txt").read_text()
    assert "during the backward" in report and 'fsdp_sharding_strategy: "shardplug:' in report
    assert sum("ran out of memory" in text for *_, text in (first, second)) == 1


def test_the_string_is_read() -> None:
    rest, budget = split_auto("zero_auto,device_memory_gib=24,nvme_path=swap,replicate_size=2")
    assert rest == "stage=3,replicate_size=2" and budget is not None
    assert (budget.device_memory_gib, budget.nvme_path) == (24.0, "swap")
    assert split_auto("zero3,prefetch=2") == ("zero3,prefetch=2", None)
    launched = {ENVIRONMENT_NAME: "shardplug:zero_auto,seq_length=64,micro_batch=2"}
    assert LaunchOptions.read(None, launched).config.stage == 3
    found = LaunchOptions.read(None, launched).budget
    assert found is not None and (found.seq_length, found.micro_batch) == (64, 2)
    assert LaunchOptions.read("zero3", {}).budget is None
    with pytest.raises(ConfigError, match="device_memory_gib to be a number"):
        split_auto("zero_auto,device_memory_gib=much")
    with pytest.raises(ConfigError, match="one ZeRO configuration"):
        LaunchOptions.read("zero3", launched)
