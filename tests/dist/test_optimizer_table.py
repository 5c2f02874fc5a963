"""The table of optimizers in the guide: each row is run, and the page says what the run shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug import OptimizerError, ZeroEngine
from shardplug.core._torch.tensors import local_tensor
from shardplug.params.stored_shard import ShardTensor
from tests.dist import test_quantised_optimizers as quantised
from tests.dist.test_cases_offload import Matrices, matrix_loss, muon_and_adamw
from tests.dist.test_offload import config
from tests.support.parity import assert_close, raises_everywhere, whole
from tests.support.pool import RankPool

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "optimizers.md"
STEPS = 5
NOISE = {"equal": 0.0, "within 1e-7": 1e-7}
"""What a word of the table allows: the largest difference of any weight after `STEPS` steps."""

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def _factored(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters)


MAKE: dict[str, Make] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "Adagrad, fused=True": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "AdamW, foreach=True": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW, fused=True": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD, fused=True": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=1e-2),
    "transformers' Adafactor": _factored,
}
TABLE: dict[str, tuple[str, str]] = {
    "ASGD": ("equal", "equal"),
    "Adadelta": ("equal", "equal"),
    "Adafactor": ("refused", "refused"),
    "Adagrad": ("equal", "equal"),
    "Adagrad, fused=True": ("within 1e-7", "within 1e-7"),
    "Adam": ("equal", "equal"),
    "AdamW": ("equal", "equal"),
    "AdamW, foreach=True": ("equal", "equal"),
    "AdamW, fused=True": ("within 1e-7", "within 1e-7"),
    "Adamax": ("equal", "equal"),
    "LBFGS": ("refused", "refused"),
    "Muon, and AdamW for the rest": ("equal", "refused"),
    "NAdam": ("equal", "equal"),
    "RAdam": ("equal", "equal"),
    "RMSprop": ("equal", "equal"),
    "Rprop": ("equal", "equal"),
    "SGD": ("equal", "equal"),
    "SGD, fused=True": ("within 1e-7", "within 1e-7"),
    "SparseAdam": ("refused", "refused"),
    "transformers' Adafactor": ("refused", "refused"),
    **quantised.ROWS,
}
"""Optimizer: what is claimed with its state on the device, and in CPU memory or files."""

TIERS = {"none": 0, "cpu": 1, "nvme": 1, "infinity": 1}
"""Where state is (`tests.dist.test_offload.MIXES`): the column of the table."""


def make(name: str, model: nn.Module) -> list[torch.optim.Optimizer]:
    if name.startswith("Muon"):
        return muon_and_adamw(model)
    return [MAKE[name](list(model.parameters()))]


def train_alone(name: str, world_size: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """One process, the whole batch."""
    torch.manual_seed(7)
    model = Matrices()
    optimizers = make(name, model)
    for step in range(STEPS):
        for rank in range(world_size):
            (matrix_loss(model, step, rank) / world_size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizers


def train_sharded(name: str, tier: str, root: str) -> tuple[Any, nn.Module, list[Any]]:
    torch.manual_seed(7)
    engine = ZeroEngine(config(3, tier, root))
    model = engine.shard(Matrices())
    optimizers = [engine.prepare_optimizer(optimizer) for optimizer in make(name, model)]
    for step in range(STEPS):
        with engine.micro_step():
            matrix_loss(model, step, engine.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return engine, model, optimizers


def check_state(
    model: nn.Module,
    ours: list[torch.optim.Optimizer],
    alone: nn.Module,
    theirs: list[torch.optim.Optimizer],
    noise: float,
) -> int:
    """Compare the optimizers' state by name; return how many values were compared."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    compared = 0
    for one, other in zip(ours, theirs, strict=True):
        for parameter, state in one.state.items():
            expected = other.state[alone.get_parameter(names[parameter])]
            assert set(state) == set(expected)
            for key, value in expected.items():
                found = state[key]
                if isinstance(value, torch.Tensor):
                    found = whole(found)
                    assert torch.allclose(found, value, atol=noise, rtol=noise), key
                else:
                    assert found == value, key
                compared += 1
    return compared


def run_row(name: str, claims: tuple[str, str], root: str) -> None:
    world_size = torch.distributed.get_world_size()
    for tier, column in TIERS.items():
        if claims[column] == "refused":
            # By name and at set-up: training would begin otherwise, and go wrong later.
            kind = re.split(r"\W+", name)[-1] if "transformers" in name else name.split(",")[0]
            with raises_everywhere(OptimizerError, f"got {kind}", "Use "):
                train_sharded(name, tier, root)
            continue
        alone, theirs = train_alone(name, world_size)
        engine, model, ours = train_sharded(name, tier, root)
        noise = NOISE[claims[column]]
        found = engine.full_state_dict(model, rank0_only=False)
        assert assert_close(found, alone.state_dict(), noise) == 9
        assert check_state(model, ours, alone, theirs, noise) >= 9
        if tier == "infinity":
            assert all(isinstance(local_tensor(p), ShardTensor) for p in model.parameters())


def run_on_three(names: list[str], root: str) -> dict[str, float]:
    """Return each optimizer's largest difference of a weight."""
    worst = {}
    for name in names:
        alone, _ = train_alone(name, 3)
        engine, model, _ = train_sharded(name, "none", root)
        found = engine.full_state_dict(model, rank0_only=False)
        worst[name] = max(float((found[k] - v).abs().max()) for k, v in alone.state_dict().items())
    return worst


RUN = [name for name in TABLE if name not in quantised.ROWS]


@pytest.mark.parametrize("name", RUN)
def test_a_row_of_the_table(pool: RankPool, tmp_path: Path, name: str) -> None:
    """Two ranks at stage 3 against one process, wherever the state is."""
    pool.run(run_row, 2, name, TABLE[name], str(tmp_path))


def test_more_ranks_sum_in_another_order(pool: RankPool, tmp_path: Path) -> None:
    worst = pool.run(run_on_three, 3, [n for n in RUN if "refused" != TABLE[n][0]], str(tmp_path))[
        0
    ]
    assert len(worst) == 16 and max(worst.values()) <= 2e-6, worst


def test_every_optimizer_of_torch_has_a_row() -> None:
    kinds = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert kinds <= {re.split(r"\W", name)[0] for name in TABLE} and len(kinds) >= 14


def test_the_guide_says_what_was_run() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|", GUIDE.read_text(), re.M)
    said = {row[0].strip().replace("`", ""): (row[1].strip(), row[2].strip()) for row in rows}
    assert {name: said.get(name) for name in TABLE} == TABLE
