"""Optimizer state in CPU memory and in files: weights bit for bit those of a run without."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import local_tensor
from shardplug.memory import TIER_KINDS
from shardplug.params import ParameterTier
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.host import HostTier
from shardplug.tiers.protocol import ALIGNMENT
from shardplug.tiers.staging import Staging
from shardplug.tiers.swap import SwapFolder
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

STEPS = 10
SIZES = (1, 511, 513, 4097, 30001)
_NUMBERS = itertools.count()
SMALL = 16384  # bytes: 4096 elements, the least that parameters are cut at

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adam_foreach": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
}


class Flat(nn.Module):
    """Parameters of awkward sizes; the one of one element leaves the second rank's shard empty."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(size) for size in SIZES)
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: one number; returns a loss."""
        return sum((p * x).cos().mean() * self.scale for p in self.parts)  # type: ignore[return-value]


MIXES = {  # name of a mix: where the optimizer's state and the parameters are
    "none": ("none", "none"),
    "cpu": ("cpu", "none"),
    "nvme": ("nvme", "none"),
    "infinity": ("nvme", "nvme"),
    "params_nvme": ("cpu", "nvme"),
    "params_cpu": ("nvme", "cpu"),
    "all_cpu": ("cpu", "cpu"),
}


def mixes(stage: int) -> tuple[str, ...]:
    """Every mix that the stage allows, but "none"."""
    return tuple(name for name in MIXES if name != "none" and (stage == 3 or "none" in MIXES[name]))


def config(stage: int, tier: str, path: str | None) -> ZeroConfig:
    optimizer, parameters = MIXES[tier]
    return ZeroConfig(
        stage=stage,  # type: ignore[arg-type]
        offload_optimizer=optimizer,  # type: ignore[arg-type]
        offload_params=parameters,  # type: ignore[arg-type]
        nvme_path=path if "nvme" in MIXES[tier] else None,
    )


def use_small_blocks(engine: ZeroEngine) -> None:
    """Cut even small parameters, and let no more than six blocks be on their way."""
    disk = None
    if engine.config.nvme_path is not None:
        name = f"20260101-{next(_NUMBERS):06d}-{os.getpid():08x}"
        folder = SwapFolder(str(engine.config.nvme_path), name, engine.rank)
        disk = DiskTier(folder, Staging(limit_bytes=6 * SMALL, buffer_bytes=SMALL))
    on_cpu = engine.config.offload_optimizer == "cpu"
    engine._offload.optimizer_tier = HostTier(block_bytes=SMALL) if on_cpu else disk
    if engine._offload.parameter_tier is not None:
        assert disk is not None
        engine._offload.parameter_tier = ParameterTier(
            disk, engine.config.prefetch, engine._control
        )


def train(
    stage: int,
    tier: str,
    path: str | None,
    optimizer_name: str,
    *,
    accumulate: int = 1,
    clip: bool = False,
    flat: bool = False,
    steps: int = STEPS,
    replicate_size: int = 1,
) -> tuple[ZeroEngine, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    engine = ZeroEngine(replace(config(stage, tier, path), replicate_size=replicate_size))
    if flat and tier != "none":
        use_small_blocks(engine)
    model = engine.shard(Flat() if flat else TinyLM())
    optimizer = engine.prepare_optimizer(OPTIMIZERS[optimizer_name](model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    run(engine, model, optimizer, range(steps), accumulate=accumulate, clip=clip)
    scheduler.step()
    return engine, model, optimizer


def run(
    engine: ZeroEngine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    *,
    accumulate: int = 1,
    clip: bool = False,
) -> None:
    for step in steps:
        for micro in range(accumulate):
            with engine.micro_step(last=micro == accumulate - 1):
                if isinstance(model, Flat):
                    number = 0.1 * step + 0.3 * micro + 0.7 * engine.rank
                    loss = model(torch.tensor(1.0 + number))
                else:
                    batch = tokens(step, micro, engine.rank)
                    loss = lm_loss(model(batch), batch)
                (loss / accumulate).backward()
        if clip:
            engine.clip_grad_norm(0.05)
        optimizer.step()
        optimizer.zero_grad()


def same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> int:
    """Compare all state of two optimizers to the bit; return how many values were compared."""
    compared = 0
    mine = [p for group in ours.param_groups for p in group["params"]]
    others = [p for group in theirs.param_groups for p in group["params"]]
    for p, q in zip(mine, others, strict=True):
        assert set(ours.state[p]) == set(theirs.state[q])
        for key, value in theirs.state[q].items():
            found = ours.state[p][key]
            if isinstance(value, torch.Tensor):
                assert found.shape == value.shape and found.dtype == value.dtype, key
                if hasattr(value, "full_tensor"):
                    found, value = found.full_tensor(), value.full_tensor()
                assert torch.equal(found, value), key
            else:
                assert found == value, key
            compared += 1
    return compared


def same_weights(one: tuple[ZeroEngine, nn.Module], two: tuple[ZeroEngine, nn.Module]) -> None:
    ours = one[0].full_state_dict(one[1], rank0_only=False)
    theirs = two[0].full_state_dict(two[1], rank0_only=False)
    assert ours and set(ours) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def against_plain(
    stage: int, name: str, folder: str, tiers: tuple[str, ...] = (), **options: Any
) -> None:
    """Train without and with a tier, and compare weights and state."""
    plain = train(stage, "none", None, name, **options)
    assert not any(plain[0].traffic().values())
    for tier in tiers or mixes(stage):
        ours = train(stage, tier, folder, name, **options)
        same_weights(ours[:2], plain[:2])
        assert same_state(ours[2], plain[2]) or name == "sgd_plain"


def grid(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for accumulate, clip in itertools.product((1, 3), (False, True)):
            against_plain(stage, "adamw", folder, accumulate=accumulate, clip=clip, flat=True)
        for name in ("adam", "sgd"):
            against_plain(stage, name, folder, accumulate=3, clip=True, flat=True)


@pytest.mark.parametrize("world_size", (1, 2))
@pytest.mark.parametrize("stage", (1, 2, 3))
def test_offload_is_bit_equal(pool: RankPool, stage: int, world_size: int) -> None:
    pool.run(grid, world_size, stage)


def replicas() -> None:
    with tempfile.TemporaryDirectory() as folder:
        against_plain(3, "adamw", folder, steps=3, replicate_size=2)  # 2 x 2 ranks


def test_replicas_of_shards_are_bit_equal(pool: RankPool) -> None:
    pool.run(replicas, 4)


def language_model(stage: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        against_plain(stage, "adamw", folder, accumulate=3, clip=True, steps=4)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_a_model_with_units_is_bit_equal(pool: RankPool, stage: int) -> None:
    pool.run(language_model, 2, stage)


def every_class() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in OPTIMIZERS:
            against_plain(2, name, folder, flat=True, steps=4)


def test_every_elementwise_optimizer_is_bit_equal(pool: RankPool) -> None:
    pool.run(every_class, 2)


def owned(model: nn.Module) -> list[int]:
    """Elements that this rank has of each parameter with a dimension."""
    return [local_tensor(p).numel() for p in model.parameters() if p.ndim]


def accounts(folder: str) -> None:
    for name, moments in (("adamw", 2), ("sgd", 1), ("sgd_plain", 0)):
        engine, model, optimizer = train(2, "nvme", folder, name, flat=True, steps=1)
        sizes = owned(model)
        first = engine.traffic()
        states = engine.memory()
        run(engine, model, optimizer, range(1, 2))
        traffic = engine.traffic()
        # Each moment of an owned element is read once and written once, in its own 4 bytes. What
        # comes on top is rounding: 64 bytes for a piece, 4 KiB for a region (here SMALL bytes).
        exact = 4 * moments * sum(sizes)
        pieces = sum(max(1, -(-size * 4 // SMALL)) for size in sizes)
        slack = moments * (64 * pieces + ALIGNMENT * pieces)
        assert exact <= traffic["bytes_read"] <= exact + slack
        assert traffic["bytes_written"] == traffic["bytes_read"]
        assert (traffic["waited_seconds"] > 0) == (moments > 0)
        assert first["bytes_read"] == 0 and first["bytes_written"] == traffic["bytes_written"]
        assert states["optimizer_state_nvme"] == traffic["bytes_written"]
        assert states["optimizer_state_cpu"] == 0
        # In memory: one number per parameter, 6 buffers at most, and one block's gradients.
        assert states["optimizer_state"] <= 4 * (len(sizes) + 3)
        assert 0 < states["staging"] <= 6 * SMALL + SMALL
        assert states["gradients"] == 0  # used up by the step
    engine, model, optimizer = train(3, "cpu", None, "adamw", flat=True, steps=2)
    states = engine.memory()
    exact = 8 * sum(owned(model))
    assert exact <= states["optimizer_state_cpu"] <= exact + 2 * len(SIZES) * (64 + ALIGNMENT)
    assert states["staging"] == states["optimizer_state_nvme"] == 0
    assert not any(engine.traffic().values())  # on CPU ranks the state is used where it is
    assert not set(TIER_KINDS) & set(ZeroEngine(ZeroConfig()).memory())


@pytest.mark.parametrize("world_size", (1, 2))
def test_bytes_moved_and_held_are_those_of_the_formulas(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    pool.run(accounts, world_size, str(tmp_path))


def accounts_of_parameters(folder: str) -> None:
    for accumulate in (1, 3):
        engine, model, _ = train(
            3, "infinity", folder, "adamw", flat=True, steps=3, accumulate=accumulate
        )
        sizes = owned(model)
        exact = sum(sizes)
        pieces = sum(max(1, -(-size * 4 // SMALL)) for size in sizes)
        slack = pieces * (64 + ALIGNMENT)
        traffic, states = engine.traffic(), engine.memory()
        # Read: the gathers (this model is one unit, gathered again for the backward), what is
        # there of the gradient before each further micro-batch, and weights, gradient and two
        # moments in the step. Written: a gradient for each micro-batch, weights and moments.
        gathers = 2 * accumulate
        reads, writes = gathers + accumulate - 1 + 4, accumulate + 3
        assert 4 * reads * exact <= traffic["bytes_read"] <= 4 * reads * exact + reads * slack
        written = traffic["bytes_written"]
        assert 4 * writes * exact <= written <= 4 * writes * exact + writes * slack
        assert 4 * exact <= states["master_shards_nvme"] <= 4 * exact + slack
        assert 8 * exact <= states["optimizer_state_nvme"] <= 8 * exact + 2 * slack
        # At rest nothing of a parameter is in memory but its scale, which every rank holds whole,
        # and what is read ahead for the next forward.
        assert states["master_shards"] == 4 and states["gathered"] == states["gradients"] == 0
        ahead = 4 * sum(-(-size // engine.world_size) for size in SIZES) + len(SIZES) * ALIGNMENT
        assert 0 < states["staging"] <= 6 * SMALL + 3 * SMALL + ahead
        with engine.micro_step(last=True):
            model(torch.tensor(0.5)).backward()
        held = engine.memory()
        assert 4 * exact <= held["gradients_nvme"] <= 4 * exact + slack
        assert held["gradients"] == 4


@pytest.mark.parametrize("world_size", (1, 2))
def test_bytes_of_parameters_in_files_are_those_of_the_formulas(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    pool.run(accounts_of_parameters, world_size, str(tmp_path))


def without_gradients(folder: str) -> None:
    """Blocks without a gradient are neither read nor written."""
    engine, model, optimizer = train(3, "nvme", folder, "adamw", flat=True, steps=2)
    everything = engine.traffic()["bytes_read"]
    large = model.parts[-1]  # type: ignore[index]
    large.requires_grad_(False)
    run(engine, model, optimizer, range(2, 3))
    assert 0 < engine.traffic()["bytes_read"] < everything / 2
    assert engine.traffic()["bytes_read"] == engine.traffic()["bytes_written"]


def test_what_is_not_trained_is_not_moved(pool: RankPool, tmp_path: Path) -> None:
    pool.run(without_gradients, 1, str(tmp_path))
