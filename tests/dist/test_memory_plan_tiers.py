"""The plan of optimizer state in CPU memory and in files, held against what an engine holds.

Equal to the byte: kinds on the device at the ends of the phases, state in CPU memory and in files
(each region rounded up to 4 KiB), one block's gradients beside files, and the size of the swap
file. Staging buffers follow a rule: a first step makes one for each region, up to 64 MiB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.config import PRESETS
from shardplug.errors import ConfigError
from shardplug.memory import (
    MODEL_STATE_KINDS,
    CountedAllocations,
    Machine,
    accelerate_yaml,
    lightning_line,
    plan,
)
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.protocol import BLOCK_BYTES
from shardplug.tiers.staging import STAGING_BYTES
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

MIB = 2**20


class Wide(nn.Module):
    """Several blocks in both tiers, cut parameters and a scalar; 11.5 million elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(9, 1_000_003)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.down = nn.Linear(7, 211_111)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, 9); returns a loss."""
        first = self.up(x).square().mean() * self.scale
        return first + self.down(x[:, :7]).square().mean()


def _model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Wide() if kind == "wide" else TinyLM(tied=kind == "tied")


def _batch(kind: str, rank: int) -> torch.Tensor:
    return torch.full((2, 9), 0.1 + rank) if kind == "wide" else tokens(0, 0, rank)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    return found if isinstance(model, Wide) else lm_loss(found, batch)


def _planned(
    kind: str,
    stage: int,
    tier: str,
    optimizer: str,
    devices: int,
    params: str = "none",
    **options: Any,
) -> Any:
    found = plan(
        _model(kind),
        devices=devices,
        device_memory_gib=4,
        stage=stage,  # type: ignore[arg-type]
        optimizer=optimizer,
        activation_checkpointing=False,
        batch=_batch(kind, 0),
        loss=_loss,
        **{"device": "cpu", "loop": "pytorch", "precision": "32-true", **options},
    )
    tiers = tier, params
    return next(c for c in found.choices if (c.offload_optimizer, c.offload_params) == tiers)


def _hold(
    kind: str, stage: int, tier: str, optimizer: str, folder: str, budget: float | None = None
) -> tuple[dict[str, dict[str, int]], int, int, float]:
    """Train two steps; return books by phase, the swap file's size, the second's peak and bytes."""
    path = folder if tier == "nvme" else None
    engine = ZeroEngine(
        ZeroConfig(stage=stage, offload_optimizer=tier, nvme_path=path, offload_cpu_gib=budget)  # type: ignore[arg-type]
    )
    model = engine.shard(_model(kind))
    made: dict[str, Any] = {
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-3),
    }
    trained = engine.prepare_optimizer(made[optimizer](model.parameters()))
    states: dict[str, dict[str, int]] = {}
    batch = _batch(kind, engine.rank)
    peak = 0
    for step in range(2):
        loss = _loss(model, batch)
        states["after_forward"] = engine.memory()
        loss.backward()
        engine.after_backward()
        del loss
        states["after_backward"] = engine.memory()
        if step == 0:
            trained.step()
        else:
            with CountedAllocations() as counted, counted.stretch("step"):
                trained.step()
            peak = counted.peak("step")
        states["after_step"] = engine.memory()
        trained.zero_grad()
        states["at_rest"] = engine.memory()
    on_disk, traffic = 0, engine.traffic()
    if isinstance(engine._offload.optimizer_tier, DiskTier):
        on_disk = engine._offload.optimizer_tier.path.stat().st_size
        engine._offload.optimizer_tier.close()
    return states, on_disk, peak, traffic["bytes_read"] + traffic["bytes_written"]


def _compare(pool: RankPool, folder: Path, world_size: int, *case: Any) -> None:
    kind, stage, tier, optimizer = case
    choice = _planned(kind, stage, tier, optimizer, world_size)
    ranks = pool.run(_hold, world_size, kind, stage, tier, optimizer, str(folder))
    states, on_disk, peak, moved = ranks[0]  # the plan's rank: no other has more rows
    compared = 0
    for phase, held in states.items():
        planned = choice.timeline.phases[phase]
        for one in (*MODEL_STATE_KINDS, "optimizer_state_cpu", "staging"):
            assert held[one] == planned[one], (phase, one)
            compared += 1
        assert held["snapshot"] == 0
    assert compared == 24
    assert choice.host == 0, "the memory of CPU ranks is the device's"
    last = states["at_rest"]
    if tier == "cpu":
        assert last["optimizer_state_cpu"] > 0
        assert choice.disk == last["optimizer_state_nvme"] == on_disk == 0
    else:
        assert choice.disk == world_size * last["optimizer_state_nvme"]
        assert on_disk == last["optimizer_state_nvme"] > 0
        assert last["optimizer_state_cpu"] == 0
        for held, *_ in ranks:
            buffers = held["at_rest"]["staging"]
            assert BLOCK_BYTES <= buffers <= STAGING_BYTES + BLOCK_BYTES
    for other, *_ in ranks[1:]:
        assert sum(other["at_rest"].values()) <= sum(last.values()) + 64 * 4096  # rounding
    per_second = Machine().nvme_gb_s * 1e9
    assert choice.time.transfers * per_second == pytest.approx(moved * world_size)
    work = max(p.held["optimizer_work"] for p in choice.timeline.points)
    if optimizer == "adagrad":  # of model "wide" on 2 ranks
        # A tensor for one parameter is there beside that for the one before, where both are in a
        # block; the plan has two of the largest.
        largest, after_it = -(-1_000_003 // 2) * 9 * 4, -(-1_000_003 // 2) * 4
        sizes = (largest, after_it) if tier == "cpu" else (BLOCK_BYTES, 0)
        assert work == 2 * sizes[0]
        assert peak == pytest.approx(sum(sizes), abs=256)
    else:
        assert peak == pytest.approx(work, abs=256)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_what_is_held_is_the_plans_to_the_byte(
    pool: RankPool, tmp_path: Path, tier: str, stage: int, world_size: int
) -> None:
    kind = "tied" if stage == 2 else "tiny"
    _compare(pool, tmp_path, world_size, kind, stage, tier, "adamw")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum", "adagrad"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_many_blocks_and_other_optimizers_are_the_plans_too(
    pool: RankPool, tmp_path: Path, tier: str, optimizer: str
) -> None:
    _compare(pool, tmp_path, 2, "wide", 3, tier, optimizer)


def test_a_budget_before_files_is_the_plans_too(pool: RankPool, tmp_path: Path) -> None:
    budget = 21.5 / 1024
    choice = _planned("wide", 3, "nvme", "adamw", 2, offload_cpu_gib=budget)
    ranks = pool.run(_hold, 2, "wide", 3, "nvme", "adamw", str(tmp_path), budget)
    states, _, _, moved = ranks[0]
    for phase, held in states.items():
        planned = choice.timeline.phases[phase]
        for one in (*MODEL_STATE_KINDS, "optimizer_state_cpu", "staging"):
            assert held[one] == planned[one], (phase, one)
    last = states["at_rest"]
    assert 20 * MIB <= last["optimizer_state_cpu"] <= 21.5 * MIB
    assert choice.disk == 2 * last["optimizer_state_nvme"] > 0
    assert choice.time.transfers * Machine().nvme_gb_s * 1e9 == pytest.approx(2 * moved)
    on_gpu = _planned("wide", 3, "nvme", "adamw", 2, offload_cpu_gib=budget, device="cuda")
    without = _planned("wide", 3, "nvme", "adamw", 2, device="cuda")
    assert 0 < without.disk - on_gpu.disk <= 2 * budget * 2**30
    assert on_gpu.time.transfers < without.time.transfers
    with pytest.raises(ConfigError, match="GiB of at least 0, got -1"):
        _planned("tiny", 3, "nvme", "adamw", 2, offload_cpu_gib=-1)


def test_a_budget_is_printed_to_be_copied() -> None:
    found = plan(
        TinyLM(),
        devices=2,
        device_memory_gib=4,
        batch=tokens(0, 0, 0),
        loss=_loss,
        offload_cpu_gib=1.5,
    )
    for choice in found.choices:
        if choice.offload_optimizer == "nvme" and not choice.unavailable:
            text = accelerate_yaml(found, choice).partition("shardplug:")[2].partition('"')[0]
            assert ZeroConfig.parse(text).offload_cpu_gib == 1.5
            assert "offload_cpu_gib=1.5" in lightning_line(found, choice)
        elif choice.offload_optimizer == "cpu":
            assert "offload_cpu_gib" not in lightning_line(found, choice)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exactly_what_runs_is_offered(stage: int) -> None:
    found = plan(TinyLM(), devices=2, device_memory_gib=4, batch=tokens(0, 0, 0), loss=_loss)
    mine = [c for c in found.choices if c.stage == stage and not c.activation_checkpointing]
    offered = {(c.offload_optimizer, c.offload_params): not c.unavailable for c in mine}
    for tiers in (("cpu", "cpu"), ("nvme", "cpu"), ("nvme", "nvme")):
        assert offered.pop(tiers, False) == (stage == 3)
    assert offered == {("none", "none"): True, ("cpu", "none"): True, ("nvme", "none"): True}
    for choice in mine:
        fields = {
            "stage": stage,
            "offload_optimizer": choice.offload_optimizer,
            "offload_params": choice.offload_params,
        }
        if choice.unavailable:
            with pytest.raises(ConfigError, match="not available"):
                ZeroConfig(**fields)
            assert "parameters cannot leave the device" in choice.reason
            continue
        # What is printed to be copied means this very choice.
        text = accelerate_yaml(found, choice).partition("shardplug:")[2].partition('"')[0]
        assert text.split(",")[0] in PRESETS
        parsed = ZeroConfig.parse(text)
        assert {name: getattr(parsed, name) for name in fields} == fields
        line = lightning_line(found, choice)
        assert choice.offload_optimizer == "none" or choice.offload_optimizer in line
        assert ("nvme_path=" in line) == (choice.offload_optimizer == "nvme")


def test_on_gpus_state_is_the_hosts_memory() -> None:
    """By formula: pinned regions take a power of two, and gradients stay on the device."""
    on = {t: _planned("wide", 3, t, "adamw", 2, device="cuda") for t in ("none", "cpu", "nvme")}
    after = {tier: choice.timeline.phases["after_backward"] for tier, choice in on.items()}
    assert after["none"]["gradients"] == after["cpu"]["gradients"] == after["nvme"]["gradients"] > 0
    for tier in ("cpu", "nvme"):
        assert after[tier]["optimizer_state"] < 100 < MIB < after["none"]["optimizer_state"]
        assert after[tier]["optimizer_state_cpu"] == 0
        assert on[tier].time.transfers > 0
    state = after["none"]["optimizer_state"]
    assert state <= on["cpu"].host / 2 < 2 * state and on["cpu"].disk == 0
    assert on["nvme"].host == 2 * min(STAGING_BYTES, on["nvme"].host // 2) > 0
    assert state <= on["nvme"].disk / 2 < state + 20 * 4096


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_on_gpus_parameters_are_the_hosts_memory(tier: str) -> None:
    """By formula: nothing rests on the device, and shards and gradients are pinned on the host."""
    options: dict[str, Any] = {"device": "cuda", "precision": "bf16-mixed", "accumulate": 3}
    beside = _planned("wide", 3, tier, "adamw", 2, **options)
    all_off = _planned("wide", 3, tier, "adamw", 2, params="cpu", **options)
    scalar = 4
    rest = all_off.timeline.phases["at_rest"]
    assert rest["master_shards"] == scalar and rest["optimizer_state"] == rest["staging"] == 0
    masters = beside.timeline.phases["at_rest"]["master_shards"] - scalar
    assert masters > 20 * MIB
    for phase in ("after_backward_between", "after_backward", "after_step"):
        held = all_off.timeline.phases[phase]
        used_up = phase == "after_step" and tier == "nvme"
        assert held["gradients"] == (0 if used_up else scalar) and held["gathered"] == 0
        assert not any(size for kind, size in held.items() if kind.endswith("_cpu"))
    # The unit is on the device while it is computed with, and its gradients until they have gone.
    points = all_off.timeline.points
    gathered = {max(p.held["gathered"] for p in c.timeline.points) for c in (beside, all_off)}
    assert len(gathered) == 1 and gathered.pop() > 0
    assert max(p.held["gradients"] for p in points if p.phase == "backward") >= masters
    assert all(p.held["optimizer_work"] == 0 for p in points)
    # The host has shards and gradients, each pinned region rounded up to a power of 2.
    more = all_off.host / 2 - beside.host / 2
    assert 2 * masters <= more < 4 * masters + 64 * MIB
    assert all_off.disk == beside.disk
    # Each of 3 micro-batches gathers twice and sends its gradients; the step runs on the host.
    seconds = all_off.time.transfers - beside.time.transfers
    assert seconds * Machine().host_gb_s * 1e9 == pytest.approx((6 + 3 + 3) * masters)
    assert all_off.timeline.moved == beside.timeline.moved


def test_parameters_in_cpu_memory_are_printed_to_be_copied() -> None:
    found = plan(TinyLM(), devices=2, device_memory_gib=4, batch=tokens(0, 0, 0), loss=_loss)
    seen = set()
    for choice in found.choices:
        if choice.offload_params != "cpu" or choice.activation_checkpointing:
            continue
        text = accelerate_yaml(found, choice).partition("shardplug:")[2].partition('"')[0]
        parsed = ZeroConfig.parse(text)
        assert (parsed.offload_optimizer, parsed.offload_params) == (
            choice.offload_optimizer,
            "cpu",
        )
        assert 'offload_params="cpu"' in lightning_line(found, choice)
        assert choice.name == f"zero3_{choice.offload_optimizer} offload_params=cpu"
        seen.add(choice.offload_optimizer)
    assert seen == {"cpu", "nvme"}
