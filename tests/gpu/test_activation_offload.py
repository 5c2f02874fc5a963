"""Activations in CPU memory beside a GPU: gradients bit for bit, and memory as planned."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import plan
from tests.support.parity import whole

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, TOKENS, BLOCKS = 512, 4096, 12
MIB = 2**20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(batch)
    return out.float().square().mean()


def train(
    where: str, recompute: bool, stage: int, compiled: bool
) -> tuple[list[torch.Tensor], int, int, dict[str, float]]:
    """Return the third step's gradients, bytes after its forward, its peak, and what it moved."""
    gc.collect()
    base = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    config = ZeroConfig(
        stage=stage,  # type: ignore[arg-type]
        param_dtype="bf16",
        activation_checkpointing=recompute,
        offload_activations=where,  # type: ignore[arg-type]
    )
    engine = ZeroEngine(config)
    model = engine.shard(Model())
    if compiled:
        for block in model.blocks:
            block.compile()
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(TOKENS, WIDTH, device=engine.device)
        torch.cuda.reset_peak_memory_stats()
        with engine.micro_step():
            loss = loss_of(model, batch)
            torch.cuda.synchronize()
            after = torch.cuda.memory_allocated() - base
            loss.backward()
        peak = torch.cuda.max_memory_allocated() - base
        found = [whole(p.grad) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        del loss
        if step < 2:
            del found
    return found, after, peak, engine.traffic()


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    ("stage", "recompute", "compiled"),
    [(1, False, False), (3, False, False), (3, True, False), (3, False, True)],
)
def test_gradients_are_equal_and_memory_falls(stage: int, recompute: bool, compiled: bool) -> None:
    there, after, peak, none = train("none", recompute, stage, compiled)
    away, less, lower, moved = train("cpu", recompute, stage, compiled)
    assert there and all(torch.equal(one, two) for one, two in zip(there, away, strict=True))
    assert not none["bytes_written"]
    out = moved["bytes_written"]
    assert moved["bytes_read"] == out > (20 if recompute else 200) * MIB
    assert after - less >= 0.9 * out
    assert lower < peak - (0 if recompute else 0.5 * out)


@pytest.mark.usefixtures("one_gpu")
def test_the_peak_is_the_planned_one() -> None:
    *_, peak, moved = train("cpu", False, 3, False)
    found = plan(
        Model(),
        devices=1,
        device_memory_gib=16,
        precision="bf16-mixed",
        optimizer="sgd",
        activation_checkpointing=False,
        offload_activations="cpu",
        stage=3,
        offload=False,
        loop="pytorch",
        batch=torch.empty(TOKENS, WIDTH),
        loss=loss_of,
    )
    walk = found.choices[0].timeline
    assert found.traced and walk.activations_out == moved["bytes_written"]
    assert abs(walk.peak.total / peak - 1) < 0.1
