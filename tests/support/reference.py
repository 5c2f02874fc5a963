"""The reference every sharded run is compared with: one process, whole model, whole batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import TinyLM, lm_loss, tokens

SEED = 7


@dataclass
class Trace:
    """What a run leaves behind to be compared."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: dict[str, torch.Tensor] = field(default_factory=dict)
    """First moments (AdamW) or momentum (SGD): averages of the gradients."""
    noise: dict[str, torch.Tensor] = field(default_factory=dict)
    """Elements that AdamW divided by a root mean square at rounding level, in any step."""


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build one of the optimizers that parity is shown for."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def window(step: int, steps: int, accumulate: int) -> int:
    """Number of micro-batches of a step; the last window is short."""
    return accumulate if step < steps - 1 else max(1, accumulate - 1)


def train_whole(
    world_size: int,
    accumulate: int,
    optimizer_name: str,
    *,
    steps: int = 10,
    tied: bool = False,
    build: Callable[[], nn.Module] | None = None,
) -> Trace:
    """Train in one process on all ranks' batches joined."""
    torch.manual_seed(SEED)
    model = build() if build else TinyLM(tied=tied)
    optimizer = make_optimizer(optimizer_name, model)
    trace = Trace()
    for step in range(steps):
        micros = window(step, steps, accumulate)
        total = 0.0
        for micro in range(micros):
            batch = torch.cat([tokens(step, micro, rank) for rank in range(world_size)])
            loss = lm_loss(model(batch), batch) / micros
            loss.backward()
            total += float(loss.detach())
        trace.losses.append(total)
        trace.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        if optimizer_name == "adamw":
            _mark_noise(trace, model, optimizer)
        optimizer.zero_grad()
    trace.weights = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        _record_state(trace, name, optimizer.state[parameter])
    return trace


def _record_state(trace: Trace, name: str, state: dict[str, torch.Tensor]) -> None:
    def whole(value: torch.Tensor) -> torch.Tensor:
        return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()

    if "momentum_buffer" in state:
        trace.moments[name] = whole(state["momentum_buffer"])
        return
    trace.moments[name] = whole(state["exp_avg"])


def _mark_noise(trace: Trace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        rms = (state["exp_avg_sq"] / (1 - 0.999 ** float(state["step"]))).sqrt()
        small = (rms > 0) & (rms <= 1e-6 * trace.norms[-1])  # an exact zero is no noise
        trace.noise[name] = small | trace.noise.get(name, torch.zeros_like(small))


def train_sharded(
    stage: int,
    accumulate: int,
    optimizer_name: str,
    *,
    steps: int = 10,
    tied: bool = False,
    replicate_size: int = 1,
) -> Trace:
    """Train the same on this rank's part of each batch; called on every rank."""
    from shardplug import ZeroConfig, ZeroEngine
    from shardplug.core._torch.tensors import local_tensor

    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED + rank)  # rank 0's weights have to win
    model = TinyLM(tied=tied)
    optimizer = make_optimizer(optimizer_name, model)
    engine = ZeroEngine(ZeroConfig(stage=stage, replicate_size=replicate_size))  # type: ignore[arg-type]
    engine.shard(model)
    engine.prepare_optimizer(optimizer)
    trace = Trace()
    for step in range(steps):
        micros = window(step, steps, accumulate)
        total = torch.zeros(())
        for micro in range(micros):
            with engine.micro_step(last=micro == micros - 1):
                batch = tokens(step, micro, rank)
                loss = lm_loss(model(batch), batch) / micros
                loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        trace.losses.append(float(total) / world_size)
        trace.norms.append(engine.grad_norm())
        optimizer.step()
        optimizer.zero_grad()
    trace.weights = engine.full_state_dict(rank0_only=False)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        moment = state.get("exp_avg", state.get("momentum_buffer"))
        assert local_tensor(moment).shape == local_tensor(parameter).shape
        _record_state(trace, name, state)
    return trace


def assert_same_training(sharded: Trace, whole: Trace, case: str) -> None:
    """Compare weights and moments of two runs at the tolerances of fp32 training.

    AdamW divides the gradient by its own size. Where the gradient is at rounding level (below
    1e-6 of the gradient norm) the quotient, and with it the weight, is noise in both runs; there
    only the gradients are compared, at 1e-6 of their norm, as everywhere.
    """
    assert sharded.losses == pytest.approx(whole.losses, rel=1e-5), case
    assert sharded.norms == pytest.approx(whole.norms, rel=1e-6), case
    assert whole.weights and set(sharded.weights) == set(whole.weights), case
    assert whole.moments and set(sharded.moments) == set(whole.moments), case
    norm = max(whole.norms)
    compared = skipped = 0
    for name, weight in whole.weights.items():
        moved = (sharded.weights[name] - weight).abs()
        if name in whole.noise:
            skipped += int(whole.noise[name].sum())
            moved = moved[~whole.noise[name]]
        compared += moved.numel()
        assert moved.numel() == 0 or float(moved.max()) <= 2e-6, (case, name, float(moved.max()))
    for name, moment in whole.moments.items():
        assert float((sharded.moments[name] - moment).abs().max()) <= 1e-6 * norm, (case, name)
    assert compared > 100 * skipped, (case, compared, skipped)
