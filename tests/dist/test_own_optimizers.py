"""Optimizers that users wrote: the same as in one process, or refused by name on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import OptimizerError, ZeroConfig, ZeroEngine
from tests.support.parity import assert_close
from tests.support.pool import RankPool

STEPS = 3


class Own(torch.optim.Optimizer):
    """Subclasses compute one parameter's change."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.change(p, p.grad, self.state[p]), alpha=-group["lr"])

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        raise NotImplementedError


class SignMomentum(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        m = state.setdefault("m", torch.zeros_like(p))
        update = (0.9 * m + 0.1 * g).sign()
        m.mul_(0.99).add_(g, alpha=0.01)
        return update


class Bytes(Own):
    """Keeps momentum in whole blocks of bytes, as 8-bit optimizers do."""

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        codes = state.setdefault("codes", torch.zeros(p.numel(), dtype=torch.uint8))
        m = (codes.float() - 128).view_as(p) / 128 * 0.9 + g
        state["codes"] = ((m.clamp(-1, 1) * 127).round() + 128).to(torch.uint8).view(-1)
        return m


class LocalBytes(Own):
    """The same of this rank's rows: plain state that differs between ranks."""

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        local = g.to_local() if isinstance(g, DTensor) else g
        m = state.setdefault("m", torch.zeros(local.numel()))
        m.mul_(0.9).add_(local.reshape(-1))
        update = m.view_as(local)
        return (
            DTensor.from_local(
                update, g.device_mesh, g.placements, shape=g.shape, stride=g.stride()
            )
            if isinstance(g, DTensor)
            else update
        )


class ColumnMeans(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        return g - g.mean(0, keepdim=True)


class Factored(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if g.ndim < 2:
            return g
        row = state.setdefault("row", torch.zeros_like(p[:, 0]))
        column = state.setdefault("column", torch.zeros_like(p[0]))
        row.lerp_(g.square().mean(1), 0.1)
        column.lerp_(g.square().mean(0), 0.1)
        return g / (row[:, None] * column[None] / row.mean()).sqrt().add(1e-3)


class OwnMuon(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if g.ndim < 2:
            return g
        x = g / (g.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return x


class LocalNorm(Own):
    """Scales by a norm that is each rank's own: wrong without an error."""

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        local = g.to_local() if isinstance(g, DTensor) else g
        return g / (local.norm() + 1.0)


class LargestGradient(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        return g / g.abs().max()


class AdaptiveClip(Own):
    """Adaptive gradient clipping, with norms that are changed in place."""

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        dims = tuple(range(1, p.ndim))
        norm = p.norm(2, dim=dims, keepdim=True) if dims else p.detach().norm(2)
        most = norm.clamp_(min=1e-3).mul_(0.5)
        size = g.norm(2, dim=dims, keepdim=True) if dims else g.norm(2)
        return torch.where(size < most, g, g * (most / size.clamp(min=1e-6)))


class ReadNorm(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        return g / max(1.0, g.norm().item())


class LastRankFails(Own):
    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if isinstance(p, DTensor) and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("only here")
        return g / (g.norm() + 1)


class Centred(torch.optim.SGD):
    """A class of torch with another beginning of its step."""

    def _init_group(self, group: Any, params: Any, grads: Any, momenta: Any) -> Any:
        result = super()._init_group(group, params, grads, momenta)
        grads[:] = [g - g.mean(0) for g in grads]
        return result


class OwnLBFGS(torch.optim.LBFGS):
    def step(self, closure: Any) -> Any:
        return super().step(closure)


class KeepsList(Own):
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        params = list(params)
        super().__init__(params)
        self.mine = params

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.mine:
            if p.grad is not None:
                p.add_(p.grad, alpha=-0.1)


class InitialState(Own):
    """Makes state with the optimizer, and begins at a learning rate of 0."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, lr=0.0)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full_like(p, 0.1)

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        state["sum"].addcmul_(g, g)
        return g / state["sum"].sqrt()


class NeedsMode(Own):
    """Raises in one process too, until a call that comes after set-up."""

    def change(self, p: Any, g: Any, state: dict[str, Any]) -> Any:
        if not self.param_groups[0].get("training"):
            raise RuntimeError("call train() first")
        return g


class Model(nn.Module):
    """Rows that two ranks share evenly, unevenly, and not at all (four ranks)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.Linear(8, 5, bias=False)
        self.last = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.block(torch.tanh(self.first(x)))))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    return (model(x) * torch.tensor([3.0, 1.0])).square().mean()


RIGHT = (
    SignMomentum,
    ColumnMeans,
    Factored,
    OwnMuon,
    LargestGradient,
    AdaptiveClip,
    InitialState,
    Centred,
)
REFUSED = {
    Bytes: "raised RuntimeError",
    LocalBytes: "state m of first.weight has the shape",
    LocalNorm: "the values of first.weight came out unlike those of whole tensors",
    ReadNorm: "partly reduced",
    LastRankFails: "raised ValueError: only here",
    OwnLBFGS: "changed nothing",
    KeepsList: "changed nothing",
}


def one_process(kind: Callable[..., Any], world_size: int) -> nn.Module:
    torch.manual_seed(3)
    model = Model()
    optimizer = kind(model.parameters())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05
        for rank in range(world_size):
            (loss_of(model, step, rank) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def outcome(kind: Callable[..., Any], stage: int) -> str:
    """Train, and return "right" or the refusal's text; assert that nothing else happens."""
    torch.manual_seed(3)
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = Model()
    optimizer = kind(model.parameters())
    engine.shard(model)
    state = torch.get_rng_state()
    try:
        engine.prepare_optimizer(optimizer)
    except OptimizerError as error:
        return str(error)
    assert torch.equal(state, torch.get_rng_state())
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.05
        with engine.micro_step():
            loss_of(model, step, engine.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    reference = one_process(kind, engine.world_size)
    found = engine.full_state_dict(model, rank0_only=False)
    assert assert_close(found, reference.state_dict(), 1e-5) == 5
    return "right"


def run_all(stage: int, names: list[str]) -> dict[str, str]:
    return {name: outcome(globals()[name], stage) for name in names}


def untried() -> tuple[int, str]:
    """Return how many warnings set-up gave, and the first."""
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(Model())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = engine.prepare_optimizer(NeedsMode(model.parameters()))
    said = [str(w.message) for w in caught if "NeedsMode" in str(w.message)]
    optimizer.param_groups[0]["training"] = True
    with engine.micro_step():
        loss_of(model, 0, engine.rank).backward()
    optimizer.step()
    return len(said), said[0]


def test_own_optimizers_are_as_in_one_process_or_refused(pool: RankPool) -> None:
    names = [kind.__name__ for kind in (*RIGHT, *REFUSED)]
    for found in pool.run(run_all, 2, 3, names):
        assert [found[kind.__name__] for kind in RIGHT] == ["right"] * len(RIGHT)
        for kind, text in REFUSED.items():
            assert text in found[kind.__name__], found[kind.__name__]
            assert f"got {kind.__name__}" in found[kind.__name__]


def test_ranks_without_rows(pool: RankPool) -> None:
    """Four ranks, of which two hold nothing of a matrix with two rows."""
    results = pool.run(
        run_all, 4, 1, ["LargestGradient", "AdaptiveClip", "LastRankFails", "OwnMuon"]
    )
    for found in results:
        assert found["LargestGradient"] == found["AdaptiveClip"] == "right"
        assert "failed on rank 3: " in found["LastRankFails"]
        # DTensor has no product for it, so it is refused by the name of that matrix.
        assert "last.weight, of shape (2, 5)" in found["OwnMuon"]
    assert all(found == results[0] for found in results)


def test_what_cannot_be_tried_is_said(pool: RankPool) -> None:
    count, said = pool.run(untried, 2)[0]
    assert count == 1 and "raised RuntimeError: call train() first" in said
