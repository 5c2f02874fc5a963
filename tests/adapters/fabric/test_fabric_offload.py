"""Optimizer state outside the device through Fabric: the same weights, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch

from shardplug.fabric import ZeroStrategy
from tests.adapters.fabric.test_fabric import fabric, loss_of
from tests.adapters.lightning.modules import Net, build, in_order, whole
from tests.support.activations import small_ones_move
from tests.support.pool import RankPool


def start(tier: str, root: str):  # type: ignore[no-untyped-def]
    strategy = {"none": "zero3", "cpu": "zero3_cpu"}.get(tier) or ZeroStrategy(
        stage=3,
        offload_optimizer="nvme",
        offload_params="nvme" if tier == "infinity" else "none",
        nvme_path=root,
        offload_cpu_gib=4096 / 2**30 if tier == "both" else None,
    )
    run = fabric(strategy)
    model = build(Net)
    model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return run, model, optimizer


def steps(run, model, optimizer, first: int, last: int) -> None:  # type: ignore[no-untyped-def]
    batches = list(in_order())
    for index in range(first, last):
        run.backward(loss_of(model, batches[index]))
        run.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def train(root: str) -> None:
    found = {}
    for tier in ("none", "cpu", "nvme", "infinity", "both"):
        run, model, optimizer = start(tier, root)
        steps(run, model, optimizer, 0, 3)
        run.save(f"{root}/{tier}", {"model": model, "optimizer": optimizer})
        steps(run, model, optimizer, 3, 5)
        found[tier] = whole(model)
    states = run.strategy.engine.memory()
    assert 0 < states["optimizer_state_cpu"] <= 4096 and states["optimizer_state_nvme"] > 0
    for before, after in (("infinity", "none"), ("none", "infinity"), ("cpu", "nvme")):
        run, model, optimizer = start(after, root)
        run.load(f"{root}/{before}", {"model": model, "optimizer": optimizer})
        steps(run, model, optimizer, 3, 5)
        found[f"{before}-{after}"] = whole(model)
    expected = found.pop("none")
    for case, weights in found.items():
        assert weights and all(torch.equal(weights[n], expected[n]) for n in expected), case


def activations() -> None:
    found = []
    with small_ones_move():
        for place in ("none", "cpu"):
            run = fabric(ZeroStrategy(stage=2, offload_activations=place))  # type: ignore[arg-type]
            model = build(Net)
            model, optimizer = run.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            steps(run, model, optimizer, 0, 3)
            found.append(whole(model))
            assert (run.strategy.engine.traffic()["bytes_read"] > 0) == (place == "cpu")
    assert found[0] and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_activations_in_cpu_memory(pool: RankPool) -> None:
    pool.run(activations, 2)


def test_fabric(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train, 2, str(tmp_path))
