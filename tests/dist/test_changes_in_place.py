"""Blocks that return views, or change what they are given, and callers that change the result."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.groups import gathered_units
from shardplug.errors import ModelError
from tests.support.parity import assert_close, gradients, raises_everywhere
from tests.support.pool import RankPool

Change = Callable[[torch.Tensor], Any]


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x


def _add(x: torch.Tensor) -> torch.Tensor:
    x += 1
    return x


def _first(x: torch.Tensor) -> torch.Tensor:
    x[0] = 0
    return x


def _scale(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(x.detach() * 0.5 + 1)


RETURNS: dict[str, Change] = {
    "view": lambda y: y.view(y.shape),
    "view of a view": lambda y: y.view(-1)[1:].view(5, 3),
    "transposed": lambda y: y.t(),
    "expanded": lambda y: y[None].expand(2, -1, -1),
    "in a tuple": lambda y: (y[:, :3], y * 2),
    "in a dictionary": lambda y: {"a": y.view(-1)},
}
CHANGES: dict[str, Change] = {"add": _add, "relu": torch.relu_, "first": _first}


class Block(nn.Module):
    def __init__(self, returns: Change, changes: Change, identity: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.returns, self.changes, self.identity = returns, changes, identity

    def forward(self, x: torch.Tensor) -> Any:
        x = self.changes(x)
        if self.identity:
            return self.returns(x)
        return self.returns(self.b(torch.sin(self.a(x)) + x) * 1.0)


class Model(nn.Module):
    def __init__(self, returns: Change, caller: Change, inside: Change, identity: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(Block(returns, inside, identity and i == 1) for i in range(3))
        self.caller = caller

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) * 2
        total = x.new_zeros(())
        for block in self.blocks:
            given = x
            y = block(x)
            found = y[0] if isinstance(y, tuple) else y["a"] if isinstance(y, dict) else y
            found = self.caller(found)
            total = total + (given**2).sum()  # as the block, or the caller, has left it
            if isinstance(y, tuple):
                total = total + y[1].sum()
            flat = found.reshape(-1)[:16]
            x = torch.cat([flat, flat.new_zeros(16 - flat.numel())]).view(4, 4)
        return total + x.pow(2).sum()


def _matches(stage: int, *parts: Any, **config: Any) -> bool:
    """Compare gradients; return whether one process can run it at all."""
    torch.manual_seed(0)
    model = Model(*parts)
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage, **config))  # type: ignore[arg-type]
    batches = [(torch.arange(4) + rank) % 4 for rank in range(engine.world_size)]
    try:
        for batch in batches:
            (reference(batch) / engine.world_size).backward()
    except RuntimeError:
        return False
    engine.shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with engine.micro_step():
            model(batches[engine.rank]).backward()
    trained = 9 if parts[-1] else 13  # a block that gives back its input trains nothing
    assert assert_close(gradients(model), gradients(reference), 2e-4) == trained
    assert engine.memory()["gathered"] == 0
    return True


def _in_place(stage: int) -> None:
    ran = [
        _matches(stage, returns, caller, _plain, False)
        for returns in RETURNS.values()
        for caller in (CHANGES.values() if stage == 3 else (_first,))
    ]
    # Nothing can be added to an expanded tensor in place.
    assert sum(ran) == (len(ran) - 2 if stage == 3 else len(ran)) > 5
    for inside in (*CHANGES.values(), _scale):
        assert _matches(stage, _plain, _plain, inside, False)
    for returns in (_plain, RETURNS["view"]):  # what the block was given itself
        for inside in (_plain, _scale):
            assert _matches(stage, returns, _scale, inside, True)
    if stage == 3:
        for config in ({"activation_checkpointing": True}, {"offload_activations": "cpu"}):
            assert _matches(stage, RETURNS["view"], _add, _plain, False, **config)
        with raises_everywhere(ModelError, "leave its inputs as they are"):
            _matches(stage, _plain, _plain, _scale, False, activation_checkpointing=True)


@pytest.mark.parametrize("stage", [2, 3])
def test_changes_in_place_match_one_process(pool: RankPool, stage: int) -> None:
    pool.run(_in_place, 2, stage)


class _Recomputed(nn.Module):
    """Blocks that are computed again in the backward, by torch's reentrant function."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(Block(_plain, _plain) for _ in range(3))
        self.passes = passes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for _ in range(self.passes):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
        return x.pow(2).sum()


def _twice(stage: int) -> None:
    for passes in (1, 2):
        torch.manual_seed(0)
        model = _Recomputed(passes)
        reference = copy.deepcopy(model)
        engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
        engine.shard(model)

        def loss(model: nn.Module, micro: int, rank: int) -> torch.Tensor:
            shifted = (torch.arange(4) + rank + micro) % 4
            return model(shifted) + model(shifted[:2]).exp().mean()  # each block twice or more

        for micro in range(2):
            with engine.micro_step(last=micro == 1):
                loss(model, micro, engine.rank).backward()
            for rank in range(engine.world_size):
                (loss(reference, micro, rank) / engine.world_size).backward()
        assert assert_close(gradients(model), gradients(reference), 1e-4) == 13
        assert not gathered_units(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_blocks_recomputed_twice_in_one_backward(pool: RankPool, stage: int) -> None:
    pool.run(_twice, 2, stage)
