"""Mixed precision: fp32 masters and losses, fp16 scaling, steps skipped together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import GradScalerKwargs
from torch import nn

from shardplug.core._torch.tensors import local_tensor
from tests.adapters.accelerate.common import WORLD, accelerator, seeded_model
from tests.support.models import lm_loss, tokens
from tests.support.pool import RankPool


def whole(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in net.named_parameters()
    }


def train_mixed(precision: str, stage: int, low_weights: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if precision == "fp16":
        kwargs["kwargs_handlers"] = [GradScalerKwargs(init_scale=1024.0)]
    acc = accelerator(zero=f"zero{stage}", mixed_precision=precision, **kwargs)
    net = seeded_model()
    if low_weights:
        net = net.to(torch.bfloat16)  # as checkpoints come
    net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    start = whole(net)
    dtypes = set()
    inside: list[torch.dtype] = []
    net.blocks[0].up.register_forward_hook(lambda m, a, out: inside.append(out.dtype))
    losses = []
    for step in range(6):
        batch = tokens(0, 0, dist.get_rank())
        logits = net(batch)
        loss = lm_loss(logits, batch)
        acc.backward(loss)
        acc.clip_grad_norm_(net.parameters(), 1.0)
        dtypes |= {logits.dtype, loss.dtype} | {p.grad.dtype for p in net.parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(acc.reduce(loss.detach(), "mean").item())
        assert not acc.optimizer_step_was_skipped, step
    dtypes |= {p.dtype for p in net.parameters()}
    moved = [(value != start[name]).float() for name, value in whole(net).items()]
    share = sum(float(m.sum()) for m in moved) / sum(m.numel() for m in moved)
    plain = acc.unwrap_model(net, keep_fp32_wrapper=False)
    assert plain is net and "forward" not in plain.__dict__
    return {"losses": losses, "dtypes": dtypes, "inside": set(inside), "moved": share}


def plain_losses() -> list[float]:
    net = seeded_model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batch = torch.cat([tokens(0, 0, rank) for rank in range(WORLD)])
    losses = []
    for _ in range(6):
        loss = lm_loss(net(batch), batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("precision", "stage", "low_weights"),
    [("bf16", 1, False), ("bf16", 3, False), ("bf16", 3, True), ("fp16", 2, False)],
)
def test_low_precision_keeps_fp32_masters_and_losses(
    pool: RankPool, precision: str, stage: int, low_weights: bool
) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for found in pool.run(train_mixed, WORLD, precision, stage, low_weights):
        assert found["dtypes"] == {torch.float32}  # parameters, gradients, logits and loss
        assert found["inside"] == {dtype}
        assert found["losses"] == pytest.approx(plain_losses(), rel=0.02)
        assert found["losses"][-1] < found["losses"][0] * 0.9
        # The embedding's unused rows move by weight decay; nothing is lost below half a ULP.
        assert found["moved"] > 0.99


def overflow(replicated: bool) -> dict[str, Any]:
    acc = accelerator(
        zero="zero3",
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    # One row: the second rank has nothing of it, and learns of the overflow from the first.
    net: nn.Module = seeded_model() if replicated else nn.Linear(5, 1)
    net, optimizer = acc.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    skipped, scales = [], []
    for step in range(3):
        if replicated:
            batch = tokens(step, 0, dist.get_rank())
            loss = lm_loss(net(batch), batch)
        else:
            loss = net(torch.ones(2, 5)).mean()
        acc.backward(loss)
        if step == 1 and dist.get_rank() == int(replicated):  # in one rank's rows alone
            matrix = next(p for p in net.parameters() if p.ndim == 2)
            local_tensor(matrix.grad)[0] = float("inf")
        if step == 2:
            acc.clip_grad_norm_(net.parameters(), 1.0)
        before = [p.detach().clone() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(acc.optimizer_step_was_skipped)
        scales.append(acc.scaler.get_scale())
        same = all(
            bool((b == p.detach()).all().item())
            if not hasattr(p, "full_tensor")
            else torch.equal(b.full_tensor(), p.detach().full_tensor())
            for b, p in zip(before, net.parameters(), strict=True)
        )
        assert same == skipped[-1]
    return {"skipped": skipped, "scales": scales, "steps": acc.completed_steps}


@pytest.mark.parametrize("replicated", [False, True])
def test_ranks_skip_an_overflowing_step_together(pool: RankPool, replicated: bool) -> None:
    for found in pool.run(overflow, WORLD, replicated):
        assert found["skipped"] == [False, True, False]
        assert found["scales"] == [1024.0, 512.0, 512.0]
        assert found["steps"] == 2


def scaled_norm() -> tuple[float, float]:
    acc = accelerator(
        zero="zero2",
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
    )
    nets = [nn.Linear(5, 3), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    one, two, first, second = acc.prepare(*nets, *optimizers)
    acc.backward(two(one(torch.ones(2, 5))).sum())
    # Each clip unscales only the optimizer it belongs to.
    norms = (
        acc.clip_grad_norm_(one.parameters(), 1e3).item(),
        acc.clip_grad_norm_(two.parameters(), 1e3).item(),
    )
    first.step()
    second.step()
    return norms


def test_norms_are_unscaled_before_clipping(pool: RankPool) -> None:
    first, second = pool.run(scaled_norm, WORLD)
    assert first == second
    torch.manual_seed(1234)
    one, two = nn.Linear(5, 3), nn.Linear(3, 2)
    two(one(torch.ones(2, 5))).sum().backward()
    for norm, net in zip(first, (one, two), strict=True):
        expected = float(torch.cat([p.grad.flatten() for p in net.parameters()]).norm())
        assert norm == pytest.approx(expected, rel=0.01)


class Keeps(nn.Linear):
    """Keeps what it was called with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.called_with = x
        return super().forward(x)


def exact_inputs() -> None:
    acc = accelerator(zero="zero3", mixed_precision="bf16")
    net = acc.prepare(Keeps(6, 3))
    x = torch.full((2, 6), 1 + 2**-12)  # which bf16 rounds
    assert net(x).dtype == torch.float32
    assert torch.equal(net.called_with, x)


def test_inputs_are_not_rounded(pool: RankPool) -> None:
    pool.run(exact_inputs, WORLD)


def scaler_in_a_folder(folder: str) -> None:
    acc = accelerator(
        zero="zero2_cpu",
        mixed_precision="fp16",
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0)],
    )
    net = seeded_model()
    optimizer = acc.prepare(torch.optim.AdamW(net.parameters(), lr=1e-2))  # before its model
    net = acc.prepare(net)
    before = whole(net)
    batch = tokens(0, 0, dist.get_rank())
    acc.backward(lm_loss(net(batch), batch))
    optimizer.step()
    assert not torch.equal(whole(net)["embed.weight"], before["embed.weight"])
    acc.scaler.update(32.0)
    acc.save_state(folder)
    acc.scaler.update(16.0)
    acc.load_state(folder)
    assert acc.scaler.get_scale() == 32.0


def test_the_scaler_steps_a_tier_and_is_saved(pool: RankPool, tmp_path: Path) -> None:
    pool.run(scaler_in_a_folder, WORLD, str(tmp_path))
