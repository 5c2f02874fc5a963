"""Optimizer state outside a GPU: weights bit for bit those of a run with it on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug import ZeroConfig, ZeroEngine
from tests.support.models import TinyLM, lm_loss, tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def train(
    stage: int, tier: str, path: Path, fused: bool, params: str = "none"
) -> tuple[ZeroEngine, Any]:
    torch.manual_seed(3)
    engine = ZeroEngine(
        ZeroConfig(
            stage=stage,  # type: ignore[arg-type]
            offload_optimizer=tier,  # type: ignore[arg-type]
            offload_params=params,  # type: ignore[arg-type]
            nvme_path=str(path) if "nvme" in (tier, params) else None,
        )
    )
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    )
    for step in range(5):
        batch = tokens(step, 0, 0).to(engine.device)
        with engine.micro_step():
            lm_loss(model(batch), batch).backward()
        engine.clip_grad_norm(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return engine, optimizer


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("fused", (False, True))
@pytest.mark.parametrize("stage", (1, 3))
def test_weights_are_bit_equal_and_state_is_not_on_the_gpu(
    stage: int, fused: bool, tmp_path: Path
) -> None:
    plain, _ = train(stage, "none", tmp_path, fused)
    expected = plain.full_state_dict()
    for tier in ("cpu", "nvme"):
        engine, optimizer = train(stage, tier, tmp_path, fused)
        found = engine.full_state_dict()
        assert found and all(torch.equal(found[name], expected[name]) for name in expected)
        states = engine.memory()
        assert states[f"optimizer_state_{tier}"] > 0
        assert states["optimizer_state"] < plain.memory()["optimizer_state"] / 50
        for values in optimizer.state.values():
            assert all(v.device.type == "cpu" for k, v in values.items() if v.ndim)


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(("tier", "params"), [("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")])
def test_parameters_are_not_on_the_gpu(tier: str, params: str, tmp_path: Path) -> None:
    """The update runs on the CPU then, whose last bits need not be the GPU's."""
    plain, _ = train(3, "none", tmp_path, True)
    expected = plain.full_state_dict()
    engine, _ = train(3, tier, tmp_path, True, params)
    found = engine.full_state_dict()
    assert found
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)
    states = engine.memory()
    assert states[f"master_shards_{params}"] > 0
    assert states["master_shards"] < plain.memory()["master_shards"] / 50
