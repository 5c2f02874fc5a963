"""Runs that the checkpoint tests save, load and compare; equal global batch at any world size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from tests.support.models import TinyLM, lm_loss, tokens

GLOBAL_BATCH = 12  # divisible by 1, 2, 3 and 4


class Layout(NamedTuple):
    """How a run is sharded."""

    stage: int
    world_size: int
    replicate_size: int = 1


class Run(NamedTuple):
    """One engine, model and optimizer."""

    engine: ZeroEngine
    model: nn.Module
    optimizer: torch.optim.Optimizer


class DropoutLM(TinyLM):
    """TinyLM that draws random numbers in each step."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: (b, s) -> logits (b, s, VOCAB)."""
        x = nn.functional.dropout(self.embed(ids), 0.2)
        for block in self.blocks:
            x = nn.functional.dropout(block(x), 0.1)
        return self.head(self.norm(x)) * self.scale


def make_model(kind: str, seed: int) -> nn.Module:
    """Build one of the models: plain, tied, frozen, groups, dropout, sgd, momentum, amsgrad."""
    torch.manual_seed(seed)
    model = DropoutLM() if kind == "dropout" else TinyLM(tied=kind == "tied")
    if kind == "frozen":
        model.embed.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
    return model


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer that goes with the model of this kind."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(parameters, 0.1)
    if kind == "momentum":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    if kind == "amsgrad":
        return torch.optim.AdamW(parameters, 1e-3, amsgrad=True, fused=True)
    if kind == "groups":
        matrices = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "lr": 2e-3, "name": "matrices"},
                {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.95)},
            ],
            lr=1e-3,
        )
    return torch.optim.AdamW(parameters, 1e-3)


def make_run(
    kind: str, stage: int, replicate_size: int = 1, *, seed: int = 5, **config: Any
) -> Run:
    """Build and shard; the ranks' seeds differ."""
    engine = ZeroEngine(ZeroConfig(stage=stage, replicate_size=replicate_size, **config))
    model = engine.shard(make_model(kind, seed + dist.get_rank()))
    optimizer = engine.prepare_optimizer(make_optimizer(kind, model))
    torch.manual_seed(100 * seed + dist.get_rank())  # the dropout of each rank
    return Run(engine, model, optimizer)


def batch_of(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Return this rank's part of a step's global batch."""
    size = GLOBAL_BATCH // world_size
    return tokens(step, 0, 0, batch=GLOBAL_BATCH)[rank * size : (rank + 1) * size]


def train(run: Run, steps: Iterable[int]) -> list[float]:
    """Train for some steps and return this rank's losses."""
    losses = []
    for step in steps:
        with run.engine.micro_step():
            batch = batch_of(step, dist.get_rank(), dist.get_world_size())
            loss = lm_loss(run.model(batch), batch)
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(value: Any) -> Any:
    """Return the full tensor behind a DTensor, or a copy."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Any]:
    """Return every weight, buffer and optimizer state in full, by name; collective.

    It reads models and optimizers directly, so it does not depend on the code under test.
    """
    found: dict[str, Any] = {}
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        found[f"weight {name}"] = whole(parameter)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = whole(buffer)
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"state {index} {names[parameter]} {key}"] = whole(value)
            found[f"options {index} {number}"] = {
                key: whole(value) for key, value in group.items() if key != "params"
            }
    return found


def tensors_of(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the part of a snapshot that is tensors."""
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def assert_equal(a: dict[str, Any], b: dict[str, Any], where: object = "") -> None:
    """Assert that two snapshots hold the same, bit for bit."""
    assert a.keys() == b.keys(), (where, a.keys() ^ b.keys())
    assert tensors_of(a), where
    for key, value in a.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == b[key].dtype, (where, key, value.dtype, b[key].dtype)
            assert torch.equal(value, b[key]), (where, key, (value - b[key]).abs().max())
        else:
            assert value == b[key], (where, key, value, b[key])


def assert_weights_close(
    a: dict[str, Any], b: dict[str, Any], tolerance: float, where: object = ""
) -> None:
    """Assert that the weights of two snapshots differ by at most `tolerance`."""
    keys = [key for key in a if key.startswith("weight ")]
    assert keys and keys == [key for key in b if key.startswith("weight ")], where
    for key in keys:
        difference = (a[key] - b[key]).abs().max().item()
        assert difference <= tolerance, (where, key, difference)
