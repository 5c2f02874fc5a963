"""Runs that the checkpoint tests save, load and compare; equal global batch at any world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import CheckpointError
from tests.support.models import TinyLM, lm_loss, tokens

GLOBAL_BATCH = 12  # rows of a step, over all ranks


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
    """Build one of the models: plain, odd, groups, dropout, sgd, momentum, amsgrad.

    "odd" has all that is awkward at once: rows of 257, 7 and 5, a tied head, a frozen block, a
    parameter without a dimension, two groups with options of their own.
    """
    torch.manual_seed(seed)
    if kind == "odd":
        model = TinyLM(width=7, hidden=5, tied=True)
        model.blocks[1].requires_grad_(False)
        return model
    return DropoutLM() if kind == "dropout" else TinyLM()


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer that goes with the model of this kind."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(parameters, 0.1)
    if kind == "momentum":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    if kind == "amsgrad":
        return torch.optim.AdamW(parameters, 1e-3, amsgrad=True, fused=True)
    if kind in ("groups", "odd"):
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
    """Return this rank's rows of a step's global batch; some ranks may have one row more."""
    return tokens(step, 0, 0, batch=GLOBAL_BATCH).tensor_split(world_size)[rank]


def train(run: Run, steps: Iterable[int]) -> list[float]:
    """Train for some steps and return this rank's losses."""
    losses = []
    for step in steps:
        with run.engine.micro_step():
            batch = batch_of(step, dist.get_rank(), dist.get_world_size())
            loss = lm_loss(run.model(batch), batch)
            # The engine averages over the ranks; each counts by its rows.
            (loss * (len(batch) * dist.get_world_size() / GLOBAL_BATCH)).backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def average(of: nn.Module, into: nn.Module, decay: float) -> None:
    """Move an average of weights one step; works alike on whole parameters and on shards."""
    for kept, current in zip(into.parameters(), of.parameters(), strict=True):
        kept.lerp_(current, 1 - decay)


def whole(value: Any) -> Any:
    """Return the full tensor behind a DTensor, or a copy."""
    if isinstance(value, DTensor):
        return value.detach().full_tensor().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def own_part(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Cut out of a whole tensor what this rank holds of `like`; not with the code under test."""
    if not isinstance(like, DTensor):
        return value
    mesh = like.device_mesh
    parts = value.chunk(mesh.size(mesh.ndim - 1))
    rank = mesh.get_coordinate()[-1]  # type: ignore[index]
    return parts[rank] if rank < len(parts) else value[:0]


def snapshot(
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    read: Callable[[Any], Any] = whole,
) -> dict[str, Any]:
    """Return every weight, buffer and optimizer state by name; in full, which is collective.

    It reads models and optimizers directly, so it does not depend on the code under test.
    """
    found: dict[str, Any] = {}
    names = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name
        found[f"weight {name}"] = read(parameter)
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = read(buffer)
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"state {index} {names[parameter]} {key}"] = read(value)
            found[f"options {index} {number}"] = {
                key: read(value) for key, value in group.items() if key != "params"
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


def assert_holds(
    expected: dict[str, Any],
    model: nn.Module,
    *optimizers: torch.optim.Optimizer,
    close: float | None = None,
    where: object = "",
) -> None:
    """Assert that this rank holds its part of a snapshot; no rank waits for another.

    Args:
        expected: Weights, states and options in full.
        model: Whose parts are looked at.
        *optimizers: Likewise.
        close: Compare weights and first moments alone, with this tolerance; None compares
            everything, bit for bit.
        where: For the message.
    """
    found = snapshot(model, *optimizers, read=lambda value: value)
    own = {key: own_part(v, found[key]) if key in found else v for key, v in expected.items()}
    here = {key: v.to_local() if isinstance(v, DTensor) else v for key, v in found.items()}
    if close is None:
        assert_equal(own, here, where)
    else:
        assert_weights_close(own, here, close, where)


def assert_weights_close(
    a: dict[str, Any], b: dict[str, Any], tolerance: float, where: object = ""
) -> None:
    """Assert that weights and first moments of two snapshots differ by at most `tolerance`."""

    def chosen(found: dict[str, Any]) -> list[str]:
        return [key for key in found if key.startswith("weight ") or key.endswith(" exp_avg")]

    keys = chosen(a)
    assert any(key.startswith("weight ") for key in keys) and keys == chosen(b), where
    for key in keys:
        assert a[key].shape == b[key].shape, (where, key)
        difference = (a[key] - b[key]).abs().max().item() if a[key].numel() else 0.0
        assert difference <= tolerance, (where, key, difference)


def sharded(model: nn.Module, stage: int = 3) -> Run:
    """Shard a model and give it AdamW."""
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Run(engine, model, engine.prepare_optimizer(torch.optim.AdamW(parameters, 1e-3)))


def refused(run: Run, path: str, *parts: str, **options: Any) -> None:
    """Loading raises on this rank with all `parts` in the message, and changes nothing."""
    before = snapshot(run.model, run.optimizer)
    with pytest.raises(CheckpointError) as error:
        run.engine.load(path, optimizers=[run.optimizer], **options)
    for part in parts:
        assert part in str(error.value), (part, str(error.value))
    assert_equal(before, snapshot(run.model, run.optimizer))
