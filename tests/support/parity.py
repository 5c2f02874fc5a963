"""Compare a sharded run with one process that sees every rank's data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroEngine

WEIGHTS = 2e-6  # after ten fp32 steps
GRADIENTS = 1e-6

MicroLoss = Callable[[nn.Module, int, int, int], torch.Tensor]
"""(model, step, micro-batch, rank) -> loss of that rank's micro-batch."""


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full value on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return each parameter's full gradient, by name."""
    return {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}


def reference_window(
    model: nn.Module, loss: MicroLoss, step: int, *, accumulate: int = 1
) -> torch.Tensor:
    """Run one window's forwards and backwards on all ranks' data; return the mean loss."""
    count = dist.get_world_size() * accumulate
    total = torch.zeros(())
    for micro in range(accumulate):
        for rank in range(dist.get_world_size()):
            part = loss(model, step, micro, rank) / count
            part.backward()
            total += part.detach()
    return total


def sharded_window(
    engine: ZeroEngine, model: nn.Module, loss: MicroLoss, step: int, *, accumulate: int = 1
) -> torch.Tensor:
    """Run one window's forwards and backwards on this rank's data; return the global mean loss."""
    total = torch.zeros(())
    for micro in range(accumulate):
        with engine.micro_step(last=micro == accumulate - 1):
            part = loss(model, step, micro, engine.rank) / accumulate
            part.backward()
        total += part.detach().float()
    dist.all_reduce(total)
    return total / engine.world_size


def assert_close(
    ours: Mapping[str, torch.Tensor | None],
    theirs: Mapping[str, torch.Tensor | None],
    tolerance: float,
) -> int:
    """Compare two sets of tensors by name and max-abs difference; return how many were compared.

    None (no gradient) equals None only.
    """
    assert sorted(ours) == sorted(theirs), sorted(set(ours) ^ set(theirs))
    compared = 0
    for name, theirs_one in theirs.items():
        ours_one = ours[name]
        assert (ours_one is None) == (theirs_one is None), f"{name}: {ours_one} {theirs_one}"
        if ours_one is None or theirs_one is None:
            continue
        assert ours_one.shape == theirs_one.shape, name
        if not ours_one.numel():
            continue
        difference = (ours_one.double() - theirs_one.double()).abs().max().item()
        assert difference <= tolerance, f"{name}: differs by {difference:.3g} > {tolerance:.3g}"
        compared += 1
    assert compared, "nothing was compared"
    return compared


def assert_same_weights(
    engine: ZeroEngine, model: nn.Module, reference: nn.Module, tolerance: float = WEIGHTS
) -> None:
    """Compare parameters and persistent buffers with the reference's, on every rank."""
    assert_close(engine.full_state_dict(model, rank0_only=False), reference.state_dict(), tolerance)


def assert_sharded(model: nn.Module, *, plain: int = 0) -> None:
    """Assert that the model is at rest: all but `plain` parameters are DTensors."""
    left = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    assert len(left) == plain, f"not sharded: {left}"


@contextlib.contextmanager
def raises_everywhere(kind: type[BaseException], *parts: str) -> Iterator[None]:
    """Expect an exception on this rank, and on all the others, whose message holds `parts`."""
    caught: BaseException | None = None
    try:
        yield
    except kind as error:
        caught = error
    assert caught is not None, f"{kind.__name__} was not raised"
    for part in parts:
        assert part in str(caught), f"{part!r} is not in: {caught}"
