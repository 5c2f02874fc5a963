"""Whole parameters with gradients: penalties, gradients of layers and of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ScheduleError
from tests.support.parity import GRADIENTS, assert_close, gradients, raises_everywhere
from tests.support.pool import RankPool

Context = Callable[..., AbstractContextManager[None]]
"""Makes parameters of a part whole; on one process it does nothing."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.l(x)) + 0.1 * self.frozen(x)


class Model(nn.Module):
    """Rows that two or three ranks share unevenly, a tied pair, a parameter without dimension."""

    def __init__(self, reads_blocks: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(4, 5)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.reads_blocks = reads_blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            x = self.emb(x)
        for block in self.blocks:
            x = block(x)
        if self.reads_blocks:
            x = F.linear(x, self.blocks[1].l.weight)
        return torch.cat([self.out(x), self.head(x)], -1) * self.scale


def batch(micro: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 7, (3,), generator=torch.Generator().manual_seed(10 * micro + rank))


def nll(model: nn.Module, micro: int, rank: int) -> torch.Tensor:
    tokens = batch(micro, rank)
    return F.cross_entropy(model(tokens).float(), tokens)


def all_squares(model: nn.Module) -> torch.Tensor:
    return 0.1 * sum(p.pow(2).sum() for p in model.parameters() if p.requires_grad)


def penalty(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    loss = nll(model, micro, rank)
    with whole(model):
        return loss + all_squares(model)


def penalty_before(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    with whole(model):
        term = all_squares(model)
    return nll(model, micro, rank) + term


def penalty_of_one_layer(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    loss = nll(model, micro, rank)
    with whole(model.blocks[1].l):
        weight = model.blocks[1].l.weight
        loss = loss + ((weight @ weight.T - torch.eye(4)) ** 2).sum()
        loss.backward(retain_graph=True)  # in the context, and a second time after it
    return loss


def penalty_alone(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    nll(model, micro, rank).backward()
    with whole(model):
        return all_squares(model)


def penalty_on_one_rank(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    with whole(model):
        loss = nll(model, micro, rank)
        if rank == micro == 0:
            loss = loss + model.blocks[0].l.weight.exp().sum()
    return loss + nll(model, micro + 5, rank)


def layer_gradient(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    with whole():
        loss = nll(model, micro, rank)
        wanted = [model.out.weight, model.blocks[0].l.weight]
        found = torch.autograd.grad(loss, wanted, create_graph=True)
        return loss + sum(grad.norm() for grad in found)


def gradient_penalty(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), requires_grad=True)
    with whole(model):
        (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return nll(model, micro, rank) + ((found.norm(2, dim=1) - 1) ** 2).mean()


def layer_read_by_parent(model: nn.Module, whole: Context, micro: int, rank: int) -> torch.Tensor:
    model.reads_blocks = True
    with whole(model):
        return nll(model, micro, rank)


LOSSES = (
    penalty,
    penalty_before,
    penalty_of_one_layer,
    penalty_alone,
    penalty_on_one_rank,
    layer_gradient,
    gradient_penalty,
    layer_read_by_parent,
)


def _matches_one_process(stage: int, accumulate: int = 2, **config: Any) -> None:
    for loss in LOSSES:
        torch.manual_seed(3)
        model = Model()
        reference = copy.deepcopy(model)
        engine = ZeroEngine(ZeroConfig(stage=stage, **config))  # type: ignore[arg-type]
        engine.shard(model)
        ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        theirs = torch.optim.SGD(reference.parameters(), lr=0.1)

        def whole(part: nn.Module | None = None, engine: ZeroEngine = engine) -> Any:
            return engine.gathered(part, grad=True)

        for _ in range(2):
            for micro in range(accumulate):
                with engine.micro_step(last=micro == accumulate - 1):
                    loss(model, whole, micro, engine.rank).backward()
                for rank in range(engine.world_size):
                    alone = loss(reference, lambda *_: nullcontext(), micro, rank)
                    # What a loss runs by itself counts for one rank as well.
                    alone.backward()
            for parameter in reference.parameters():
                if parameter.grad is not None:
                    parameter.grad /= engine.world_size
            norm = engine.clip_grad_norm(1.0)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            assert abs(norm - float(expected)) < 1e-5 * norm, (loss.__name__, norm, expected)
            found = gradients(model)
            assert assert_close(found, gradients(reference), 3 * GRADIENTS) > 8, loss.__name__
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        engine.forget(model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_of_whole_parameters_match_one_process(pool: RankPool, stage: int) -> None:
    pool.run(_matches_one_process, 2, stage)


def _masters_are_shown() -> None:
    """With bf16 the copies are fp32, and bf16 within a forward, whose values are the usual ones."""
    for stage in (1, 3):
        torch.manual_seed(3)
        model = Model()
        reference = copy.deepcopy(model)
        engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="bf16"))  # type: ignore[arg-type]
        engine.shard(model)
        seen: list[torch.dtype] = []
        model.blocks[0].register_forward_pre_hook(
            lambda m, *_, seen=seen: seen.append(m.l.weight.dtype)
        )
        with engine.gathered(model, grad=True):
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            weight = model.blocks[0].l.weight
            term = (weight @ weight.T - torch.eye(4)).pow(2).sum()
            inside = nll(model, 0, engine.rank)
            assert model.blocks[0].l.weight is weight
            (by_layer,) = torch.autograd.grad(inside, weight, retain_graph=True)
        with engine.micro_step():
            term.backward()
        alone = reference.blocks[0].l.weight
        (alone @ alone.T - torch.eye(4)).pow(2).sum().backward()
        found = gradients(model)["blocks.0.l.weight"]
        torch.testing.assert_close(found, alone.grad)  # as exact as in fp32
        model.zero_grad()
        with engine.micro_step():
            inside.backward()
        first = gradients(model)
        model.zero_grad()
        with engine.micro_step():
            outside = nll(model, 0, engine.rank)
            outside.backward()
        assert torch.equal(inside, outside) and seen == [torch.bfloat16] * 2
        assert assert_close(first, gradients(model), 2e-3) > 8
        dist.all_reduce(by_layer)
        close = {"weight": by_layer / 2}
        assert_close(close, {"weight": first["blocks.0.l.weight"]}, 1e-6)
        with engine.gathered(model, grad=True):
            with raises_everywhere(RuntimeError):
                model.blocks[0](torch.ones(3, 5))  # an exception in a forward
            engine.reset()
            assert nll(model, 0, engine.rank).requires_grad
            assert model.out.weight.dtype == torch.float32


def _refused() -> None:
    torch.manual_seed(3)
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with engine.gathered(model, grad=True):
        nll(model, 0, engine.rank).backward()
        with raises_everywhere(ScheduleError, "optimizer.step() outside of gathered(grad=True)"):
            optimizer.step()
        with raises_everywhere(ScheduleError, "state_dict"):
            model.state_dict()
        with raises_everywhere(ScheduleError, "gathered(grad=False) by itself"):
            engine.gathered(model).__enter__()
        with torch.no_grad():
            before = nll(model, 0, 0)  # an evaluation leaves the copies in their place
        assert model.out.weight.shape == (5, 4)
        engine.clip_grad_norm(1.0, model.parameters())
    assert torch.equal(before, _evaluated(model))
    with engine.gathered(model), raises_everywhere(ScheduleError, "gradients are off"):
        engine.gathered(model, grad=True).__enter__()
    optimizer.step()


def _evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return nll(model, 0, 0)


def _advised() -> None:
    """Uses that cannot work outside of the context name the parameter and the context."""
    torch.manual_seed(3)
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)

    def penalty() -> None:
        terms = sum(p.pow(2).sum() for p in (model.out.weight, model.blocks[0].l.bias))
        (nll(model, 0, engine.rank) + 0.1 * terms).backward()

    def orthogonality() -> None:
        weight = model.out.weight
        (weight @ weight.T - torch.eye(5)).pow(2).sum().backward()

    def read_by_parent() -> None:
        model.reads_blocks = True
        nll(model, 0, engine.rank)

    def layer() -> None:
        torch.autograd.grad(nll(model, 0, engine.rank), model.out.weight, retain_graph=True)

    def twice() -> None:
        x = torch.randn(3, 4, requires_grad=True)
        (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        found.pow(2).sum().backward()

    cases = (
        (penalty, "out.weight, blocks.0.l.bias"),
        (orthogonality, "out.weight"),
        (layer, "out.weight"),
        (twice, "gone"),
        (read_by_parent, "blocks.1.l.weight"),
    )
    for case, named in cases:
        with raises_everywhere(RuntimeError, named, "engine.gathered(model, grad=True)"):
            with engine.micro_step():
                case()
        engine.reset()
    with raises_everywhere(RuntimeError, "blocks.1.l.weight", "engine.gathered(model, grad=True)"):
        read_by_parent()  # the outermost call explains it as well


def test_uses_outside_of_the_context_are_explained(pool: RankPool) -> None:
    pool.run(_advised, 2)


def test_whole_parameters_in_mixed_precision(pool: RankPool) -> None:
    pool.run(_masters_are_shown, 2)


def test_what_whole_parameters_refuse(pool: RankPool) -> None:
    pool.run(_refused, 2)
