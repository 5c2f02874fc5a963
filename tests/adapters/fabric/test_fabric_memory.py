"""zero_auto and the report of an out-of-memory error, through Fabric."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.fabric import ZeroStrategy
from tests.adapters.fabric.test_fabric import fabric, loss_of
from tests.adapters.lightning.modules import Net, build, in_order
from tests.support.pool import RankPool


def _run() -> tuple[str, Any, str]:
    batches = list(in_order())
    budget = {"device_memory_gib": 1.0, "example_batch": batches[0][0]}
    said, written = io.StringIO(), io.StringIO()
    run = fabric(ZeroStrategy(budget=budget))
    model = build(Net)
    with contextlib.redirect_stdout(said):
        model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    for batch in batches[:2]:
        run.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    def too_much(*_: object) -> None:
        torch.empty(2**60)

    loss = loss_of(model, batches[0])
    loss.register_hook(too_much)
    with contextlib.redirect_stderr(written), pytest.raises(RuntimeError, match="can't allocate"):
        run.backward(loss)
    return said.getvalue(), run.strategy.engine.config, written.getvalue()


def test_fabric_decides_and_explains(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.run(_run, 2)
    assert "zero_auto takes zero" in first[0] and not second[0]
    assert first[1] == second[1] and first[1].offload_optimizer == "none"
    assert "during the backward" in first[2] + second[2]
