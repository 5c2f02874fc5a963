"""Blocks compiled one by one, with and without recomputed activations (case 67)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shardplug import ZeroConfig, ZeroEngine
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    assert_close,
    assert_same_weights,
    assert_sharded,
    gradients,
    reference_window,
    sharded_window,
)
from tests.support.pool import RankPool


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    return lm_loss(model(batch), batch)


def _make() -> TinyLM:
    torch.manual_seed(7)
    return TinyLM()


def _train(
    engine: ZeroEngine, model: nn.Module, reference: nn.Module, optimizers: Any, steps: range
) -> None:
    for step in steps:
        expected = reference_window(reference, _loss, step, accumulate=2)
        found = sharded_window(engine, model, _loss, step, accumulate=2)
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert assert_close(gradients(model), gradients(reference), GRADIENTS) > 15
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_sharded(model, plain=1)


def _evaluate(model: nn.Module, reference: nn.Module) -> None:
    batch = tokens(9, 0, 0)
    with torch.no_grad():
        torch.testing.assert_close(model(batch), reference(batch))


def _compiled(stage: int, backend: Any, recompute: bool, before: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, reference = _make(), _make()
    config = ZeroConfig(stage=stage, activation_checkpointing=recompute)  # type: ignore[arg-type]
    engine = ZeroEngine(config)
    if not before:
        engine.shard(model)
    for block in model.blocks:
        block.compile(backend=backend)
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    optimizers = (ours, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    _train(engine, model, reference, optimizers, range(3))
    _evaluate(model, reference)
    frames = counters["frames"]["ok"]
    assert frames > 0, "nothing was compiled"
    _train(engine, model, reference, optimizers, range(3, 5))
    _evaluate(model, reference)
    assert counters["frames"]["ok"] <= frames + 1, "compiled again after the first steps"
    assert_same_weights(engine, model, reference)


def _recording(seen: list[str]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        for part in graph.modules():
            if isinstance(part, torch.fx.GraphModule):
                seen.extend(str(node.target) for node in part.graph.nodes)
        return graph.forward

    return backend


def _all(stage: int) -> None:
    for recompute in (False, True):
        for before in (False, True):
            seen: list[str] = []
            _compiled(stage, _recording(seen), recompute, before)
            # The block's own arithmetic is in the graphs: two products and the activation.
            assert sum("linear" in one for one in seen) >= 2, seen
            assert any("gelu" in one for one in seen), seen
        _compiled(stage, "aot_eager", recompute, True)


SLOW = [pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2)]


@pytest.mark.parametrize("stage", [*SLOW, 3])
def test_compiled_blocks_train_as_in_one_process(pool: RankPool, stage: int) -> None:
    pool.run(_all, 2, stage, timeout=200)
