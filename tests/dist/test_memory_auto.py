"""zero_auto: what it takes runs within the budget it was given."""

from __future__ import annotations

import contextlib
import gc
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug import ConfigError, ZeroConfig, ZeroEngine, default_listeners
from shardplug.memory import AutoBudget, CountedAllocations, auto_config
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

GIB = 2**30


def _build() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(width=256, hidden=1024)


def _batch(step: int, rank: int) -> torch.Tensor:
    return tokens(step, 0, rank, batch=4, length=256)


def _choose(budget_bytes: int, folder: str) -> tuple[ZeroConfig, str]:
    said = io.StringIO()
    model = _build()
    with contextlib.redirect_stdout(said):
        config = auto_config(
            model,
            AutoBudget(device_memory_gib=budget_bytes / GIB, nvme_path=folder),
            batch=_batch(0, 0),
            optimizer=torch.optim.AdamW(model.parameters()),
        )
    assert not any(parameter.is_meta for parameter in model.parameters())
    return config, said.getvalue()


def _three_budgets(folder: str) -> list[tuple[ZeroConfig, int, int, str]]:
    """Take away what the last choice needed, three times; measure each choice's peak."""
    budget, found = GIB, []
    for _ in range(3):
        config, said = _choose(budget, folder)
        found.append((config, budget, _measure(config), said))
        needs = [0]
        if torch.distributed.get_rank() == 0:
            size, unit = re.search(r"takes .*?: ([\d.e-]+) (MiB|GiB)", said).groups()  # type: ignore[union-attr]
            needs = [int(float(size) * {"MiB": 2**20, "GiB": GIB}[unit])]
        torch.distributed.broadcast_object_list(needs, src=0)
        budget = int(0.98 * needs[0])
    return found


def _measure(config: ZeroConfig) -> int:
    gc.collect()
    with CountedAllocations() as counted:
        engine = ZeroEngine(config)
        model = engine.shard(_build())
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(2):
            with counted.stretch(f"step {step}"):
                with engine.micro_step():
                    batch = _batch(step, engine.rank)
                    lm_loss(model(batch), batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return counted.peak("step 1")


def test_three_budgets_three_choices_that_fit(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_three_budgets, 2, str(tmp_path))
    assert [config for config, *_ in first] == [config for config, *_ in second]
    names = {
        (config.stage, config.offload_optimizer, config.activation_checkpointing)
        for config, *_ in first
    }
    assert len(names) == 3, first
    for config, budget, peak, _ in [*first, *second]:
        assert 2**20 < peak <= budget, (config, budget, peak)
    assert all(not said for *_, said in second), "rank 0 alone says what it takes"
    assert "zero_auto takes" in first[0][3] and "not taken" not in first[0][3]
    assert re.search(r"faster, but not taken: zero\d.*: [\d.]+ [MG]iB too much", first[2][3])


def _refused(kwargs: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        auto_config(_build(), AutoBudget(**kwargs), batch=_batch(0, 0))
    return str(caught.value)


def test_what_cannot_be_decided_is_refused_on_every_rank(pool: RankPool) -> None:
    for text in pool.run(_refused, 2, {"device_memory_gib": 0.001}):
        assert "nothing fits" in text and "The least that this version can do" in text
    for text in pool.run(_refused, 2, {}):
        assert "SHARDPLUG_DEVICE_MEMORY_GIB" in text


def test_a_budget_is_checked() -> None:
    with pytest.raises(ConfigError, match="device_memory_gib of zero_auto above 0"):
        AutoBudget(device_memory_gib=0)
    with pytest.raises(ConfigError, match="decided when the model is known"):
        ZeroConfig.preset("zero_auto")


def _offloaded(tier: str, folder: str) -> tuple[str, int]:
    said = io.StringIO()
    engine = ZeroEngine(
        ZeroConfig(stage=2, offload_optimizer=tier, nvme_path=folder if tier == "nvme" else None),  # type: ignore[arg-type]
        listeners=default_listeners(),
    )
    model = engine.shard(_build())
    with contextlib.redirect_stdout(said):
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    lm_loss(model(_batch(0, 0)), _batch(0, 0)).backward()
    optimizer.step()
    return said.getvalue(), engine.memory()[f"optimizer_state_{tier}"]


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_state_outside_the_device_is_announced(pool: RankPool, tmp_path: Path, tier: str) -> None:
    """Case 23: the estimate that is printed is within a tenth of what is held."""
    first, second = pool.run(_offloaded, 2, tier, str(tmp_path))
    assert not second[0]
    said = int(re.search(r"\((\d+) bytes\)", first[0]).group(1))  # type: ignore[union-attr]
    measured = first[1] + second[1]
    assert measured > 2**20 and abs(said - measured) < 0.1 * measured
