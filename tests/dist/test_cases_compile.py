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


@pytest.mark.timeout(240)
@pytest.mark.parametrize("stage", [*SLOW, 3])
def test_compiled_blocks_train_as_in_one_process(pool: RankPool, stage: int) -> None:
    pool.run(_all, 2, stage, timeout=200)


class _Spied(nn.Module):
    """A block that fills a list it is given, and keeps a tensor: every hook has work to do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 5)
        self.aside: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, router: list[torch.Tensor]) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        self.aside = x.mean()
        router.append(x.sum())
        return x


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Spied() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, router)
        return x.mean() + sum(router)


def _hooks_are_not_traced(whole: bool, offload: bool) -> None:
    from shardplug.core import arguments, root
    from shardplug.core.activations import unit_hooks as activation_hooks

    torch._dynamo.reset()
    seen: dict[str, list[bool]] = {}

    def spy(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, []).append(torch.compiler.is_dynamo_compiling())
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    with pytest.MonkeyPatch.context() as patch:
        spy(root, "_tensors")
        spy(root.RootForwardHooks, "_enter")
        spy(root.RootForwardHooks, "_leave")
        spy(arguments._Call, "pair")
        spy(arguments, "_Call")
        spy(arguments, "register_extra_outputs")
        spy(activation_hooks, "gathered_storages")
        torch.manual_seed(7)
        model = _Stack()
        options: Any = {"offload_activations": "cpu"} if offload else {}
        engine = ZeroEngine(ZeroConfig(stage=3, units=("_Spied",), **options))
        engine.shard(model)
        counters.clear()
        for module in (model,) if whole else model.blocks:
            module.compile(backend="eager")
        optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            with engine.micro_step():
                model(torch.ones(2, 5)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert counters["frames"]["ok"] > 0, "nothing was compiled"
    assert len(seen) == 6 + offload, sorted(seen)
    traced = sorted(name for name, calls in seen.items() if any(calls))
    assert not traced, f"Dynamo looked into the hooks that call {traced}"


@pytest.mark.parametrize(("whole", "offload"), [(False, False), (False, True), (True, False)])
def test_hooks_stay_out_of_graphs(pool: RankPool, whole: bool, offload: bool) -> None:
    pool.run(_hooks_are_not_traced, 2, whole, offload)
