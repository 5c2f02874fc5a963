"""Activations recomputed in part, by torch's own means, inside and outside of units (case 68)."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardplug import ZeroConfig, ZeroEngine
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    assert_close,
    gradients,
    reference_window,
    sharded_window,
)
from tests.support.pool import RankPool

PRODUCTS = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)


class Ops(TorchDispatchMode):
    """Counts operations; those of the backward run under it too."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.count["products"] += 1
        if func is torch.ops.aten.gelu.default:
            self.count["activations"] += 1
        return func(*args, **(kwargs or {}))


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(call: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    options = {"context_fn": contexts} if selective else {}
    return functools.partial(checkpoint, call, use_reentrant=False, **options)


class Outside(TinyLM):
    """Recomputes around its blocks: what gathers them runs again with it."""

    selective: bool | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows)
        for block in self.blocks:
            x = block(x) if self.selective is None else _recomputed(block, self.selective)(x)
        return self.head(self.norm(x)) * self.scale


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    return lm_loss(model(batch), batch)


def _make(where: str, selective: bool | None) -> Outside:
    torch.manual_seed(7)
    model = Outside()
    if where == "outside":
        model.selective = selective
    elif selective is not None:
        for block in model.blocks:
            block.forward = _recomputed(block.forward, selective)
    return model


def _parity(stage: int, where: str) -> None:
    counted = {}
    for selective in (None, True, False):
        model, reference = _make(where, selective), _make(where, None)
        engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
        engine.shard(model)
        for step in range(2):
            ops = Ops()
            expected = reference_window(reference, _loss, step, accumulate=2)
            with ops:
                found = sharded_window(engine, model, _loss, step, accumulate=2)
            assert found == pytest.approx(expected.item(), rel=1e-5)
            assert assert_close(gradients(model), gradients(reference), GRADIENTS) > 15
            counted[selective] = ops.count
            model.zero_grad()
            reference.zero_grad()
    # One product and one activation in each of three blocks, of two micro-batches: torch stops
    # when it has what the backward needs, before the block's second product.
    assert counted[False]["products"] == counted[None]["products"] + 3 * 2
    assert counted[True]["products"] == counted[None]["products"]
    assert counted[True]["activations"] == counted[None]["activations"] + 3 * 2


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_selective_recomputation(pool: RankPool, stage: int, where: str) -> None:
    pool.run(_parity, 2, stage, where, timeout=60)
