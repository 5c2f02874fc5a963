"""Modules in several places, complex and sparse parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError
from tests.support.parity import (
    GRADIENTS,
    assert_close,
    assert_same_weights,
    gradients,
    raises_everywhere,
)
from tests.support.pool import RankPool


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.w(x)) * self.scale


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Inner()
        self.l = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.a(self.l(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last: nn.Module = nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x).pow(2).mean()


def _module_of_two_blocks(model: Model) -> None:
    model.blocks[3].a = model.blocks[0].a


def _two_such_pairs(model: Model) -> None:
    model.blocks[3].a = model.blocks[0].a
    model.blocks[2].a.w = model.blocks[1].a.w


def _module_of_block_and_root(model: Model) -> None:
    model.last = model.blocks[1].a


def _module_of_all(model: Model) -> None:
    for block in model.blocks:
        block.a = model.blocks[0].a
    model.last = model.blocks[0].a


def _block_twice(model: Model) -> None:
    model.blocks[3] = model.blocks[0]


def _weight_of_two_blocks(model: Model) -> None:
    model.blocks[3].l.weight = model.blocks[0].l.weight


def _window(model: nn.Module, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model((torch.arange(4) + rank) % 4)
    return loss


def _shared() -> None:
    changes: tuple[Callable[[Model], None], ...] = (
        _module_of_two_blocks,
        _two_such_pairs,
        _module_of_block_and_root,
        _module_of_all,
        _block_twice,
        _weight_of_two_blocks,
    )
    for change in changes:
        for units in ("auto", ("Block", "Inner")):
            torch.manual_seed(0)
            model = Model()
            change(model)
            reference = copy.deepcopy(model)
            engine = ZeroEngine(ZeroConfig(units=units))  # type: ignore[arg-type]
            engine.shard(model)
            with engine.micro_step():
                _window(model, engine.rank).backward()
            for rank in range(engine.world_size):
                (_window(reference, rank) / engine.world_size).backward()
            found, expected = gradients(model), gradients(reference)
            assert assert_close(found, expected, GRADIENTS) == len(expected) > 8, change.__name__


def test_modules_in_several_places_match_one_process(pool: RankPool) -> None:
    pool.run(_shared, 2)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, 4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(torch.complex64), self.w).abs().to(x.dtype)


class ComplexModel(nn.Module):
    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), Complex(), nn.Linear(5, 4)) for _ in range(2)
        )
        self.turn = nn.Parameter(torch.tensor(1 + 2j))
        if mixed:
            self.real = nn.Parameter(torch.randn(4))
            self.imaginary = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = x + block(x)
        return (x.float() * self.turn).abs().pow(2).mean()


def _complex() -> None:
    cases = ({}, {"stage": 1}, {"offload_optimizer": "cpu"}, {"param_dtype": "bf16"})
    for config in cases:
        torch.manual_seed(0)
        model = ComplexModel()
        reference = copy.deepcopy(model)
        engine = ZeroEngine(ZeroConfig(**{"stage": 3, **config}))  # type: ignore[arg-type]
        engine.shard(model)
        ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        theirs = torch.optim.AdamW(reference.parameters(), lr=0.01)
        tolerance = 0.05 if "param_dtype" in config else 1e-5
        for _ in range(2):
            with engine.micro_step():
                _window(model, engine.rank).backward()
            for rank in range(engine.world_size):
                (_window(reference, rank) / engine.world_size).backward()
            norm = engine.clip_grad_norm(0.5)
            expected = float(nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
            assert abs(norm - expected) < tolerance * expected
            found = gradients(model)
            assert found["blocks.0.1.w"].dtype is torch.complex64
            assert assert_close(found, gradients(reference), tolerance) == len(found) == 12
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(engine, model, reference, 2e-6 if tolerance < 0.05 else 0.02)
    for config in ({}, {"param_dtype": "bf16"}):
        with raises_everywhere(ModelError, "the model itself", "complex64, torch.float32"):
            ZeroEngine(ZeroConfig(**config)).shard(ComplexModel(mixed=True))  # type: ignore[arg-type]


def test_complex_parameters_match_one_process(pool: RankPool) -> None:
    pool.run(_complex, 2)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.table, sparse=True).sum()


def _sparse() -> None:
    for module in (nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)):
        model = nn.Sequential(nn.Sequential(module), nn.Linear(2, 2))
        with raises_everywhere(ModelError, "0.0 ", type(module).__name__, "sparse=False"):
            ZeroEngine(ZeroConfig()).shard(model)
    engine = ZeroEngine(ZeroConfig())
    model = Sparse()
    engine.shard(model)
    with raises_everywhere(ModelError, "table", "sparse=False"), engine.micro_step():
        model(torch.arange(4)).backward()
    engine.reset()


def test_sparse_gradients_are_refused(pool: RankPool) -> None:
    pool.run(_sparse, 2)
