"""Hooks on parameters, and losses of sharded parameters: as in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError, ScheduleError
from tests.dist.test_whole_parameters import Model, nll
from tests.support.parity import GRADIENTS, assert_close, gradients, raises_everywhere
from tests.support.pool import RankPool

MASK = (torch.arange(28).reshape(7, 4) % 3).float()


def _add_hooks(model: nn.Module, calls: list[torch.Size]) -> list[Any]:
    """A mask of the whole shape, a change in place, a scaling by the norm of the whole."""

    def scale(grad: torch.Tensor) -> torch.Tensor:
        calls.append(grad.shape)
        return grad / grad.norm()

    def double(grad: torch.Tensor) -> None:
        grad.mul_(2.0)

    return [
        model.emb.weight.register_hook(lambda grad: grad * MASK),
        model.blocks[0].l.weight.register_hook(scale),
        model.blocks[1].l.weight.register_hook(double),
        model.blocks[1].l.weight.register_hook(lambda grad: grad + 1),
        model.scale.register_hook(lambda grad: grad * 0.5),
    ]


def _hooked(stage: int, when: str, removed: bool = False, **config: Any) -> None:
    torch.manual_seed(3)
    model = Model()
    reference = copy.deepcopy(model)
    calls: list[torch.Size] = []
    after: list[bool] = []
    handles = _add_hooks(model, calls) if when == "before" else []
    if when == "before":
        model.out.weight.register_post_accumulate_grad_hook(
            lambda p: after.append(p.grad is not None)
        )
    engine = ZeroEngine(ZeroConfig(stage=stage, **config))  # type: ignore[arg-type]
    engine.shard(model)
    if when == "after":
        handles = _add_hooks(model, calls)
    for handle in handles if removed else ():
        handle.remove()
    engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    for _ in range(2):
        for micro in range(2):
            with engine.micro_step(last=micro == 1):
                (nll(model, micro, engine.rank) / 2).backward()
        total = sum(nll(reference, m, r) for m in range(2) for r in range(engine.world_size))
        (total / 2 / engine.world_size).backward()
        found = gradients(model)
        wanted = gradients(reference)
        if not removed:
            weight = wanted["blocks.1.l.weight"]
            wanted["emb.weight"] *= MASK
            wanted["blocks.0.l.weight"] /= wanted["blocks.0.l.weight"].norm()
            weight.mul_(2.0).add_(1)
            wanted["scale"] *= 0.5
        assert assert_close(found, wanted, 3 * GRADIENTS) > 8
        model.zero_grad()
        reference.zero_grad()
    assert calls == ([] if removed else [torch.Size([4, 4])] * 2)
    assert (when != "before") or (after and all(after))
    engine.forget(model)


def _hooks(stage: int, folder: Path) -> None:
    for when in ("before", "after"):
        _hooked(stage, when)
    _hooked(stage, "before", removed=True)
    if stage == 3:
        _hooked(stage, "after", offload_optimizer="cpu")
        tier = {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": str(folder)}
        _hooked(stage, "after", **tier)
        _hooked(stage, "before", **tier)
        _hooks_of_one_rank()


def _hooks_of_one_rank() -> None:
    """One that looks sees the whole gradient; one that changes it is refused on every rank."""
    torch.manual_seed(3)
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    seen: list[torch.Tensor] = []
    if engine.rank == 0:
        model.out.weight.register_hook(lambda grad: seen.append(grad.clone()))
    with engine.micro_step():
        nll(model, 0, engine.rank).backward()
    grad = gradients(model)["out.weight"]
    assert len(seen) == (engine.rank == 0) and all(torch.equal(one, grad) for one in seen)
    if engine.rank == 0:
        model.out.weight.register_hook(lambda grad: grad * 0)
    with raises_everywhere(ScheduleError, "out.weight", "1 of 2 ranks"), engine.micro_step():
        nll(model, 0, engine.rank).backward()
    engine.reset()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hooks_on_parameters_get_final_gradients(
    pool: RankPool, stage: int, tmp_path: Path
) -> None:
    pool.run(_hooks, 2, stage, tmp_path)


def _losses_of_shards(stage: int, folder: Path) -> None:
    """A penalty that DTensor computes keeps its gradient, with and without a forward."""
    torch.manual_seed(3)
    model = Model()
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    engine.shard(model)

    def penalty(model: nn.Module) -> torch.Tensor:
        parameters = [p for p in model.parameters() if p.requires_grad and p.ndim]
        total = sum(p.pow(2).sum() + p.sum() for p in parameters)
        return total.full_tensor() if isinstance(total, DTensor) else total

    for use_model in (True, False):
        loss = penalty(model) + (nll(model, 0, engine.rank) if use_model else 0)
        with engine.micro_step():
            loss.backward()
        for rank in range(engine.world_size):
            alone = penalty(reference) + (nll(reference, 0, rank) if use_model else 0)
            (alone / engine.world_size).backward()
        engine.clip_grad_norm(1.0)
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        assert assert_close(gradients(model), gradients(reference), 3 * GRADIENTS) > 7
        model.zero_grad()
        reference.zero_grad()
    if stage == 3:
        tier = {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": str(folder)}
        engine, model = ZeroEngine(ZeroConfig(**tier)), Model()  # type: ignore[arg-type]
        engine.shard(model)
        with raises_everywhere(ModelError, "out.weight", "gathered(model, grad=True)"):
            model.out.weight.sum().full_tensor().backward()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_losses_of_shards_match_one_process(pool: RankPool, stage: int, tmp_path: Path) -> None:
    pool.run(_losses_of_shards, 2, stage, tmp_path)
