"""State that is partly in CPU memory and partly in files: a budget, held in bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardplug import StorageError, ZeroEngine
from shardplug.params import ParameterTier
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.host import HostTier
from shardplug.tiers.split import SplitTier
from shardplug.tiers.staging import Staging
from shardplug.tiers.swap import SwapFolder
from tests.dist.test_offload import (
    OPTIMIZERS,
    SMALL,
    Flat,
    config,
    run,
    same_state,
    same_weights,
    train,
)
from tests.dist.test_offload_checkpoint import fresh
from tests.dist.test_offload_faults import backward, failing
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool


def partly(
    stage: int,
    root: str,
    name: str,
    budget: int,
    *,
    steps: int = 0,
    clip: bool = False,
    mix: str = "nvme",
) -> tuple[ZeroEngine, torch.nn.Module, torch.optim.Optimizer]:
    """As `train(..., flat=True)` does, with a budget of CPU memory, in small blocks."""
    torch.manual_seed(5)
    asked = replace(config(stage, mix, root), offload_cpu_gib=budget / 2**30)
    engine = ZeroEngine(asked)
    assert (
        isinstance(engine._offload.optimizer_tier, SplitTier)
        and engine._offload.optimizer_tier._near_bytes == budget
    )
    folder = SwapFolder(root, f"split{id(engine)}", engine.rank)
    far = DiskTier(folder, Staging(limit_bytes=6 * SMALL, buffer_bytes=SMALL))
    if engine._offload.parameter_tier is not None:
        assert engine._offload.parameter_tier.tier is engine._offload.optimizer_tier.far, (
            "one swap file for both"
        )
        engine._offload.parameter_tier = ParameterTier(far, engine.config.prefetch, engine._control)
    engine._offload.optimizer_tier = SplitTier(HostTier(), far, budget)
    model = engine.shard(Flat())
    optimizer = engine.prepare_optimizer(OPTIMIZERS[name](model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    run(engine, model, optimizer, range(steps), clip=clip)
    scheduler.step()
    return engine, model, optimizer


def parity(root: str) -> None:
    for stage, (name, clip) in itertools.product((1, 3), (("adamw", False), ("sgd", True))):
        plain = train(stage, "none", None, name, flat=True, steps=5, clip=clip)
        whole = train(stage, "nvme", root, name, flat=True, steps=5)
        everything = whole[0].memory()["optimizer_state_nvme"]
        moved = whole[0].traffic()["bytes_read"]
        some = 0
        for budget in (4096, 3 * SMALL + 4096, everything // 2 // 4096 * 4096, everything):
            ours = partly(stage, root, name, budget, steps=5, clip=clip)
            same_weights(ours[:2], plain[:2])
            assert same_state(ours[2], plain[2])
            states = ours[0].memory()
            assert states["optimizer_state_cpu"] + states["optimizer_state_nvme"] == everything
            # The budget holds, and is used but for less than one block.
            assert states["optimizer_state_cpu"] <= budget
            assert ours[0]._offload.optimizer_tier.near_bytes <= budget  # type: ignore[union-attr]
            assert states["optimizer_state_cpu"] > budget - SMALL
            # What is in memory is not moved.
            traffic = ours[0].traffic()
            assert traffic["bytes_read"] == traffic["bytes_written"]
            assert traffic["bytes_read"] == moved - states["optimizer_state_cpu"]
            some += 0 < states["optimizer_state_cpu"] < everything
        assert some >= 2


@pytest.mark.parametrize("world_size", (1, 2))
def test_a_budget_holds_and_is_bit_equal(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    pool.run(parity, world_size, str(tmp_path))


def with_parameters(root: str) -> None:
    """Parameters and gradients are in the file, and the optimizer's state partly so."""
    plain = train(3, "none", None, "adamw", flat=True, steps=4, clip=True)
    whole = train(3, "infinity", root, "adamw", flat=True, steps=4, clip=True)
    ours = partly(3, root, "adamw", 5 * SMALL, steps=4, clip=True, mix="infinity")
    same_weights(ours[:2], plain[:2])
    assert same_state(ours[2], plain[2])
    states, without = ours[0].memory(), whole[0].memory()
    assert 4 * SMALL < states["optimizer_state_cpu"] <= 5 * SMALL
    assert states["master_shards_nvme"] == without["master_shards_nvme"] > 0
    saved = without["optimizer_state_nvme"] - states["optimizer_state_nvme"]
    assert saved == states["optimizer_state_cpu"]
    traffic, more = ours[0].traffic(), whole[0].traffic()
    for direction in ("bytes_read", "bytes_written"):
        assert more[direction] - traffic[direction] == saved


@pytest.mark.parametrize("world_size", (1, 2))
def test_a_budget_beside_parameters_in_files(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    pool.run(with_parameters, world_size, str(tmp_path))


def faults(root: str) -> None:
    """The memory's part of the state is not to be trusted either after a failed step."""
    engine, model, optimizer = partly(2, root, "adamw", 4 * SMALL, steps=3)
    engine.save(f"{root}/good", optimizers=[optimizer])
    before = engine.full_state_dict(model, rank0_only=False)
    backward(engine, model, 3)
    with raises_everywhere(StorageError, "Writing", "state.swap failed: ", "load the last"):
        if engine.rank == dist.get_world_size() - 1:
            with failing("write", 28):
                optimizer.step()
        else:
            optimizer.step()
    after = engine.full_state_dict(model, rank0_only=False)
    assert before and all(torch.equal(before[name], after[name]) for name in before)
    backward(engine, model, 3)
    with raises_everywhere(StorageError, "an earlier step failed"):
        optimizer.step()
    optimizer.zero_grad()
    engine.load(f"{root}/good", optimizers=[optimizer])
    run(engine, model, optimizer, range(3, 6))
    expected = train(2, "none", None, "adamw", flat=True, steps=6)
    same_weights((engine, model), expected[:2])
    assert same_state(optimizer, expected[2])
    # A checkpoint of it continues wherever the state lives then.
    engine.save(f"{root}/split", optimizers=[optimizer])
    for tier in ("none", "cpu", "nvme"):
        other = fresh(tier, root, "adamw")
        other[0].load(f"{root}/split", optimizers=[other[2]])
        run(*other, range(6, 7))
        more = train(2, "none", None, "adamw", flat=True, steps=7)
        same_weights(other[:2], more[:2])


def test_faults_and_checkpoints_of_a_split_state(pool: RankPool, tmp_path: Path) -> None:
    pool.run(faults, 2, str(tmp_path))
