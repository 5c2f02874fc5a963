"""A moving average of the weights, kept in shards beside the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import Reader
from tests.dist.checkpoint_runs import GLOBAL_BATCH, average, snapshot
from tests.support.pool import RankPool

DECAY = 0.9
STEPS = 10


class Net(nn.Module):
    """Rows of 5, which no two ranks share evenly, and a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (n, 5) -> (n, 5)."""
        return self.second(torch.tanh(self.first(x))) * self.gain


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Net()


def rows(step: int, rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, 5, generator=generator).chunk(world_size)[rank]


@contextmanager
def swapped(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Give a model the other's weights for a while."""

    @torch.no_grad()
    def swap() -> None:
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            before = mine.detach().clone()
            mine.copy_(theirs)
            theirs.copy_(before)

    swap()
    try:
        yield
    finally:
        swap()


class Averaged:
    """A run with an average that the engine knows as a second model."""

    def __init__(self, stage: int, seed: int) -> None:
        self.engine = ZeroEngine(ZeroConfig(stage=stage))
        self.model = self.engine.shard(build(seed + dist.get_rank()))
        self.average = self.engine.shard(build(seed + dist.get_rank()).requires_grad_(False))
        self.optimizer = self.engine.prepare_optimizer(
            torch.optim.AdamW(self.model.parameters(), 1e-2)
        )

    def train(self, steps: range) -> None:
        for step in steps:
            with self.engine.micro_step():
                self.loss(step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            average(self.model, self.average, DECAY)

    def loss(self, step: int) -> torch.Tensor:
        return self.model(rows(step, dist.get_rank(), dist.get_world_size())).square().mean()

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {"model": snapshot(self.model), "average": snapshot(self.average)}


def _save(path: str, stage: int) -> None:
    run = Averaged(stage, seed=1)
    run.train(range(STEPS))
    before = run.weights()
    assert all(isinstance(p, DTensor) for p in run.average.parameters() if p.ndim)
    own = run.loss(99).item()
    with pytest.raises(ZeroDivisionError), swapped(run.model, run.average), torch.no_grad():
        assert run.loss(99).item() != own
        assert torch.equal(
            run.model.first.bias.full_tensor(), before["average"]["weight first.bias"]
        )
        raise ZeroDivisionError
    with swapped(run.model, run.average):
        with torch.no_grad():
            run.loss(99)
    after = run.weights()
    assert len(before["model"]) == 5
    for which, tensors in before.items():  # bit for bit
        assert all(torch.equal(tensor, after[which][k]) for k, tensor in tensors.items())
    run.engine.save(path, optimizers=[run.optimizer])
    torch.save(before, f"{path}.weights")


def _go_on(path: str, stage: int) -> dict[str, dict[str, torch.Tensor]]:
    run = Averaged(stage, seed=50)
    run.engine.load(path, optimizers=[run.optimizer])
    saved = torch.load(f"{path}.weights")
    for which, tensors in run.weights().items():
        assert tensors and all(torch.equal(t, saved[which][k]) for k, t in tensors.items()), which
    run.train(range(STEPS, STEPS + 3))
    return run.weights()


def test_an_average_is_saved_and_goes_on_at_another_world_size(
    pool: RankPool, tmp_path: Path
) -> None:
    """Case 42."""
    model = build(1)
    kept = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(STEPS + 3):
        model(rows(step, 0, 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average(model, kept, DECAY)
    path = str(tmp_path / "averaged")
    pool.run(_save, 2, path, 3)
    for world_size, stage in ((3, 2), (1, 1)):
        found = pool.run(_go_on, world_size, path, stage)[0]
        for which, expected in (("model", model), ("average", kept)):
            for name, value in expected.named_parameters():
                assert (found[which][f"weight {name}"] - value).abs().max() <= 1e-6, (which, name)
    # The average alone, as a plain model, to be measured or published.
    alone = build(9)
    alone.load_state_dict(Reader(path).whole_state(1))
    saved = torch.load(f"{path}.weights")["average"]
    assert all(torch.equal(p, saved[f"weight {name}"]) for name, p in alone.named_parameters())
    gap = (
        saved["weight first.weight"] - torch.load(f"{path}.weights")["model"]["weight first.weight"]
    )
    assert gap.abs().max() > 1e-3, "the average must differ from the weights"
