"""Optimizers built before, after and long before sharding; several of them; wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError, OptimizerError, ScheduleError
from tests.support.models import Block, TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    assert_close,
    assert_same_weights,
    assert_sharded,
    gradients,
    raises_everywhere,
    reference_window,
    sharded_window,
    whole,
)
from tests.support.pool import RankPool

STAGES = (1, 2, 3)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    return lm_loss(model(batch), batch)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def _groups(model: nn.Module) -> torch.optim.Optimizer:
    """Decay by number of dimensions, a frozen part, an empty group."""
    model.blocks[0].requires_grad_(False)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": decay, "weight_decay": 0.3, "name": "decay"},
            {"params": plain, "weight_decay": 0.0, "lr": 3e-3, "name": "plain"},
            {"params": [], "lr": 1.0, "name": "empty"},
        ],
        lr=1e-3,
    )


def _train(
    engine: ZeroEngine,
    model: nn.Module,
    ours: torch.optim.Optimizer,
    reference: nn.Module,
    theirs: torch.optim.Optimizer,
    steps: range,
) -> None:
    for step in steps:
        reference_window(reference, _loss, step, accumulate=2)
        sharded_window(engine, model, _loss, step, accumulate=2)
        assert_close(gradients(model), gradients(reference), GRADIENTS)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(engine, model, reference)
    options = [{k: v for k, v in g.items() if k != "params"} for g in ours.param_groups]
    assert options == [{k: v for k, v in g.items() if k != "params"} for g in theirs.param_groups]
    assert [len(g["params"]) for g in ours.param_groups] == [
        len(g["params"]) for g in theirs.param_groups
    ]
    held = [p for group in ours.param_groups for p in group["params"]]
    assert {id(p) for p in held} <= {id(p) for p in model.parameters()}
    assert sum(isinstance(p, DTensor) for p in held) == len(held) - 1  # the 0-dim scale


def _built_at(stage: int, make: Make, when: str, tied: bool) -> None:
    torch.manual_seed(7)
    model = TinyLM(tied=tied)
    reference = copy.deepcopy(model)
    theirs = make(reference)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    if when == "after sharding":
        engine.shard(model)
        ours = make(model)
    else:
        ours = make(model)
        if when == "after steps unsharded":
            for step in range(3):
                for one, optimizer in ((model, ours), (reference, theirs)):
                    reference_window(one, _loss, 100 + step)
                    optimizer.step()
                    optimizer.zero_grad()
        scheduler = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (1 + step))
        engine.shard(model)
    assert engine.prepare_optimizer(ours) is ours
    assert engine.prepare_optimizer(ours) is ours
    if when == "after sharding":
        scheduler = torch.optim.lr_scheduler.LambdaLR(ours, lambda step: 1 / (1 + step))
    other = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: 1 / (1 + step))
    for step in range(3):
        _train(engine, model, ours, reference, theirs, range(step, step + 1))
        scheduler.step()
        other.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] == 1e-3 / 4
    names = {id(p): n for n, p in model.named_parameters()}
    compared = 0
    for parameter, state in ours.state.items():
        expected = theirs.state[reference.get_parameter(names[id(parameter)])]
        assert set(state) == set(expected)
        for key, value in state.items():
            assert key == "step" or isinstance(value, DTensor) == isinstance(parameter, DTensor)
            torch.testing.assert_close(whole(value), expected[key], atol=1e-7, rtol=1e-4)
            compared += 1
    assert compared == sum(len(state) for state in theirs.state.values()) > 10


def _built_before_and_upcast(stage: int) -> None:
    """bf16 parameters become fp32 masters under an optimizer that holds them already."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="bf16"))
    engine.shard(model)
    engine.prepare_optimizer(optimizer)
    before = engine.full_state_dict(rank0_only=False)
    model(torch.randn(4, 5)).float().square().sum().backward()
    optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    assert all(value.dtype == torch.float32 for value in after.values())
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(s["exp_avg"].dtype == torch.float32 for s in optimizer.state.values())


def _group_added_later(stage: int) -> None:
    """Parameters kept from before sharding are found again, also in a group added later."""
    torch.manual_seed(7)
    model = TinyLM()
    reference = copy.deepcopy(model)
    kept = {id(one): list(one.head.parameters()) for one in (model, reference)}
    pairs = []
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    for one in (model, reference):
        pairs.append(torch.optim.AdamW(one.blocks.parameters(), lr=1e-3))
    engine.prepare_optimizer(pairs[0])
    for step in range(4):
        if step == 2:
            for one, optimizer in zip((model, reference), pairs, strict=True):
                optimizer.add_param_group({"params": kept[id(one)], "lr": 1e-2})
        reference_window(reference, _loss, step)
        sharded_window(engine, model, _loss, step)
        for one, optimizer in zip((model, reference), pairs, strict=True):
            optimizer.step()
            one.zero_grad()
    assert_same_weights(engine, model, reference)


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _closures(stage: int) -> None:
    """`step(closure)` runs the forward and backward itself."""
    torch.manual_seed(7)
    model = TinyLM()
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            ours.zero_grad()
            if step == 1:  # one micro-batch, without micro_step
                own = _loss(model, step, 0, engine.rank)
                own.backward()
                return mean_over_ranks(own)
            return sharded_window(engine, model, _loss, step, accumulate=2)

        def whole_closure(step: int = step) -> torch.Tensor:
            theirs.zero_grad()
            return reference_window(reference, _loss, step, accumulate=1 if step == 1 else 2)

        loss = ours.step(closure) if step else ours.step(closure=closure)
        assert loss == pytest.approx(theirs.step(whole_closure).item(), rel=1e-5)
        assert_sharded(model, plain=1)
    assert_same_weights(engine, model, reference)


# ------------------------------------------------------------------ several optimizers


class _Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 18)
        self.blocks = nn.ModuleList(Block(18, 9) for _ in range(2))
        self.out = nn.Linear(18, 5)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """noise: (b, 3) -> (b, 5)."""
        x = self.up(noise)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 18)
        self.blocks = nn.ModuleList(Block(18, 9) for _ in range(2))
        self.out = nn.Linear(18, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 5) -> (b, 1)."""
        x = self.up(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.gain


class _Gan(nn.Module):
    """Both in one model, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = _Generator()
        self.critic = _Critic()

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """noise: (b, 3) -> (b, 1)."""
        return self.critic(self.generator(noise))


def _gan_parts(owner: Any, step: int, ranks: range) -> tuple[Callable, Callable]:
    """Losses of the critic and of the generator on the data of `ranks`."""

    def draw(seed: int, width: int) -> torch.Tensor:
        rows = [
            torch.randn(4, width, generator=torch.Generator().manual_seed(97 * step + 7 * r + seed))
            for r in ranks
        ]
        return torch.cat(rows)

    def critic_loss() -> torch.Tensor:
        with torch.no_grad():
            fake = owner.generator(draw(0, 3))
        return (owner.critic(fake) - owner.critic(draw(1, 5) + 1)).mean() + (
            owner.critic(fake).square().mean()
        )

    def generator_loss() -> torch.Tensor:
        return -owner.critic(owner.generator(draw(2, 3))).mean()

    return critic_loss, generator_loss


class _Two:
    def __init__(self) -> None:
        self.generator = _Generator()
        self.critic = _Critic()


def _gan(stage: int, one_model: bool, toggle: bool, accumulate: int) -> None:
    torch.manual_seed(7)
    owner: Any = _Gan() if one_model else _Two()
    reference = copy.deepcopy(owner)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    if one_model:
        engine.shard(owner, child_units=True)
    else:
        engine.shard(owner.generator)
        engine.shard(owner.critic)

    def optimizers(who: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        return (
            torch.optim.SGD(who.critic.parameters(), lr=0.05, momentum=0.9),
            torch.optim.AdamW(who.generator.parameters(), lr=1e-3),
        )

    def run(who: Any, pair: Any, step: int, ranks: range, windows: bool) -> None:
        trained = (who.critic, who.generator)
        for index, optimizer in enumerate(pair):
            if toggle:
                for position, part in enumerate(trained):
                    part.requires_grad_(position == index)
            for micro in range(accumulate):
                loss = _gan_parts(who, 10 * step + micro, ranks)[index]
                if windows:
                    with engine.micro_step(last=micro == accumulate - 1):
                        loss().div(accumulate).backward()
                else:
                    loss().div(accumulate).backward()
            if toggle:
                for part in trained:
                    part.requires_grad_(True)
            if windows:
                norm = engine.clip_grad_norm(0.5, trained[index].parameters())
                norms.append(norm)
            else:
                norm = torch.nn.utils.clip_grad_norm_(trained[index].parameters(), 0.5).item()
                assert norms.pop() == pytest.approx(norm, rel=1e-5)
            optimizer.step()
            optimizer.zero_grad()
            if not toggle:
                pair[1 - index].zero_grad()

    norms: list[float] = []
    ours, theirs = optimizers(owner), optimizers(reference)
    for optimizer in ours:
        engine.prepare_optimizer(optimizer)
    for step in range(5):
        mine = range(engine.rank, engine.rank + 1)
        run(owner, ours, step, mine, True)
        norms.reverse()
        run(reference, theirs, step, range(engine.world_size), False)
    assert not norms
    if one_model:
        assert_same_weights(engine, owner, reference)
    else:
        assert_same_weights(engine, owner.generator, reference.generator)
        assert_same_weights(engine, owner.critic, reference.critic)
    touched = {id(p) for p in ours[0].state}
    assert touched == {id(p) for p in owner.critic.parameters()}


# ------------------------------------------------------------------ refusals


def _refusals(stage: int) -> None:
    torch.manual_seed(7)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    model = TinyLM()
    other = nn.Linear(3, 3)
    early = _adamw(model)
    with raises_everywhere(OptimizerError, "engine.shard(model) before"):
        engine.prepare_optimizer(early)
    engine.shard(model)
    with raises_everywhere(OptimizerError, "Adam", "shape (3, 3)", "train nothing"):
        engine.prepare_optimizer(torch.optim.AdamW(other.parameters()))
    with raises_everywhere(OptimizerError, "group 1"):
        engine.prepare_optimizer(
            torch.optim.AdamW([{"params": model.parameters()}, {"params": other.parameters()}])
        )
    with raises_everywhere(OptimizerError, "torch.optim.Optimizer", "str"):
        engine.prepare_optimizer("adamw")  # type: ignore[type-var]
    with raises_everywhere(OptimizerError, "all empty"):
        engine.prepare_optimizer(torch.optim.AdamW([{"params": []}]))
    copied = copy.deepcopy(TinyLM())
    with raises_everywhere(OptimizerError, "of this very model"):
        engine.prepare_optimizer(_adamw(copied))
    optimizer = engine.prepare_optimizer(_adamw(model))
    with raises_everywhere(OptimizerError, "group 1"):
        optimizer.add_param_group({"params": other.parameters()})
    assert len(optimizer.param_groups) == 1
    with raises_everywhere(ModelError, "that this engine sharded"):
        engine.full_state_dict(other)

    frozen = ZeroEngine(ZeroConfig(stage=stage))
    teacher = frozen.shard(TinyLM().requires_grad_(False))  # to evaluate with: fine
    with raises_everywhere(OptimizerError, "nothing to train"):
        frozen.prepare_optimizer(_adamw(teacher))


def _steps_at_the_wrong_time(stage: int) -> None:
    """With two models, one's window under way keeps the other's step back too."""
    torch.manual_seed(7)
    engine = ZeroEngine(ZeroConfig(stage=stage))
    first, second = engine.shard(_Generator()), engine.shard(_Critic())
    optimizer = engine.prepare_optimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    other = engine.prepare_optimizer(torch.optim.SGD(second.parameters(), lr=0.1))
    before = engine.full_state_dict(first, rank0_only=False)
    with engine.micro_step(last=False):
        second(first(torch.randn(4, 3))).mean().backward()
    for one in (optimizer, other):
        with raises_everywhere(ScheduleError, "last micro-batch", "not reduced over the ranks"):
            one.step()
    for name, value in engine.full_state_dict(first, rank0_only=False).items():
        assert torch.equal(value, before[name])
    optimizer.zero_grad()
    other.zero_grad()
    second(first(torch.randn(4, 3))).mean().backward()
    optimizer.step()
    other.step()
    assert dist.get_world_size() == 2


# ------------------------------------------------------------------ tests


def _preparing(stage: int) -> None:
    for when in ("before sharding", "after sharding", "after steps unsharded"):
        for make in (_adamw, _groups):
            _built_at(stage, make, when, tied=make is _groups)
    _built_before_and_upcast(stage)
    _group_added_later(stage)
    _closures(stage)
    _refusals(stage)
    _steps_at_the_wrong_time(stage)


def _gans(stage: int) -> None:
    for one_model in (False, True):
        for toggle, accumulate in ((False, 1), (True, 1), (True, 2)):
            _gan(stage, one_model, toggle, accumulate)


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_built_at_any_time_trains_the_shards(pool: RankPool, stage: int) -> None:
    pool.run(_preparing, 2, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_several_optimizers_by_hand(pool: RankPool, stage: int) -> None:
    """Two models with an optimizer each, and one model split between two optimizers."""
    pool.run(_gans, 2, stage)
