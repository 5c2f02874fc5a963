"""What is compiled stays compiled after a plan has traced it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardplug.memory import plan
from shardplug.plan.sizes.optimizer_probe import kind_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Compiled(torch.optim.SGD):
    """Compiles its update, as torchao's optimizers do."""

    update: Callable[..., None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                type(self).update(parameter, parameter.grad)


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    torch._dynamo.reset()
    return []


def backend(graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
    def compile_(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return compile_


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks
def test_compiled_blocks(graphs: list[torch.fx.GraphModule]) -> None:
    blocks = [Block(), Block()]
    model = nn.Sequential(*blocks, nn.Linear(8, 1))
    for block in blocks:
        block.compile(backend=backend(graphs))
    found = plan(
        model,
        devices=2,
        device_memory_gib=1,
        device="cpu",
        loop="pytorch",
        precision="32-true",
        batch=torch.empty(4, 8, device="meta"),
        loss=lambda model, batch: model(batch).square().mean(),
    )
    assert found.traced and not graphs
    model(torch.ones(4, 8)).sum().backward()
    assert graphs


def test_an_optimizer_that_compiles_its_step(graphs: list[torch.fx.GraphModule]) -> None:
    def update(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.sub_(gradient, alpha=0.1)

    Compiled.update = staticmethod(torch.compile(update, backend=backend(graphs), fullgraph=True))
    parameter = nn.Parameter(torch.ones(8, 8))
    parameter.grad = torch.ones_like(parameter)
    optimizer = Compiled([parameter], lr=0.1)
    assert kind_of(optimizer, optimizer.param_groups[0]).tensors == 0 and not graphs
    optimizer.step()
    assert graphs
    torch.testing.assert_close(parameter.detach(), torch.full((8, 8), 0.9))
