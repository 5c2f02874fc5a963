"""Accumulation, token-weighted losses, norms, precision: numbers that change with sharding."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import local_tensor
from shardplug.core.precision import GradScaler
from shardplug.errors import ScheduleError
from tests.support.models import VOCAB, TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    assert_close,
    assert_same_weights,
    gradients,
    raises_everywhere,
    reference_window,
    sharded_window,
    whole,
)
from tests.support.pool import RankPool

STAGES = (1, 2, 3)


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    return lm_loss(model(batch), batch)


def _pair(stage: int, *, tied: bool = False, **config: object) -> tuple:
    """Return (engine, sharded model, unsharded copy)."""
    torch.manual_seed(7)
    model = TinyLM(tied=tied)
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage, **config))  # type: ignore[arg-type]
    return engine, engine.shard(model), reference


# ------------------------------------------------------------------ accumulation (2, 3)


def _manual_accumulation(stage: int, windows: bool) -> None:
    """Four backwards, then the gradient is the sum of the four."""
    engine, model, reference = _pair(stage)
    for micro in range(4):
        for rank in range(engine.world_size):
            (_loss(reference, 0, micro, rank) / engine.world_size).backward()
        if windows:
            with engine.micro_step(last=micro == 3):
                _loss(model, 0, micro, engine.rank).backward()
        else:  # a bare loop that knows of no window
            _loss(model, 0, micro, engine.rank).backward()
    engine.after_backward()
    assert assert_close(gradients(model), gradients(reference), GRADIENTS) > 10


def _short_last_window(stage: int) -> None:
    """Ten batches in windows of four: the last window has two."""
    engine, model, reference = _pair(stage)
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for window, size in enumerate((4, 4, 2)):
        before = engine.full_state_dict(model, rank0_only=False)
        loss = reference_window(reference, _loss, window, accumulate=size)
        assert abs(sharded_window(engine, model, _loss, window, accumulate=size) - loss) < 1e-5
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(engine, model, reference)
        after = engine.full_state_dict(model, rank0_only=False)
        assert any(not torch.equal(before[name], after[name]) for name in before)


def _cut_window(stage: int) -> None:
    """A window that ends early is refused or dropped, and leaves nothing to the next."""
    engine, model, reference = _pair(stage)
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for drop in (ours.zero_grad, model.zero_grad):
        with engine.micro_step(last=False):
            _loss(model, 90, 0, engine.rank).backward()
        with raises_everywhere(ScheduleError, "optimizer.step()", "last=False", "zero_grad"):
            ours.step()
        with raises_everywhere(ScheduleError, "clipping"):
            engine.clip_grad_norm(1.0)
        with raises_everywhere(ScheduleError, "clipping"):
            engine.grad_norm()
        drop()
        assert all(grad is None for grad in gradients(model).values())
        for step in range(2):
            reference_window(reference, _loss, step, accumulate=2)
            sharded_window(engine, model, _loss, step, accumulate=2)
            assert_close(gradients(model), gradients(reference), GRADIENTS)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(engine, model, reference)


# ------------------------------------------------------------------ token-weighted loss (4)


def _token_loss(model: nn.Module, labels: torch.Tensor, weight: float) -> torch.Tensor:
    """Sum over label tokens times `weight`; labels (b, s), -100 where there is none."""
    logits = model(labels.clamp(min=0))
    return weight * F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def _labels(micro: int, rank: int, count: int) -> torch.Tensor:
    """Labels (3, 27), of which `count` are trained on."""
    labels = tokens(5, micro, rank, batch=3, length=27)
    rows = labels[:, 1:].clone().flatten()
    rows[count:] = -100
    labels[:, 1:] = rows.view(3, 26)
    return labels


def _token_weighted(stage: int, counts: tuple[tuple[int, ...], ...]) -> None:
    """How to write it by hand: sum of losses * world size / label tokens of the whole window.

    The engine averages gradients over ranks, so world size cancels and every token of the
    window, wherever it lies, weighs the same.
    """
    engine, model, reference = _pair(stage)
    batches = [[_labels(m, r, n) for m, n in enumerate(row)] for r, row in enumerate(counts)]
    mine = batches[engine.rank]
    label_tokens = torch.tensor(sum(int((b[:, 1:] != -100).sum()) for b in mine))
    dist.all_reduce(label_tokens)
    assert label_tokens == 110
    for micro, batch in enumerate(mine):
        with engine.micro_step(last=micro == len(mine) - 1):
            scale = engine.world_size / label_tokens.item()
            loss = _token_loss(model, batch, scale)
            loss.backward()
            assert torch.isfinite(loss)
    for row in batches:
        for batch in row:
            _token_loss(reference, batch, 1 / 110).backward()
    ours = torch.cat([g.flatten() for g in gradients(model).values() if g is not None])
    theirs = torch.cat([g.flatten() for g in gradients(reference).values() if g is not None])
    assert ours.numel() > 10_000 and not ours.isnan().any()
    assert F.cosine_similarity(ours.double(), theirs.double(), dim=0) >= 0.999999
    assert abs(ours.double().norm() / theirs.double().norm() - 1) <= 1e-6


# ------------------------------------------------------------------ norms and clipping (6, 9)


def _norms(stage: int, replicate_size: int = 1) -> list[float]:
    """The 0-dim scale is replicated: it counts once, and its gradient is the average."""
    engine, model, reference = _pair(stage, replicate_size=replicate_size)
    returned = []
    reference_window(reference, _loss, 0, accumulate=2)
    saved = gradients(reference)
    for norm_type in (2.0, 1.0, math.inf):
        for name, parameter in reference.named_parameters():
            parameter.grad = saved[name].clone()  # type: ignore[union-attr]
        true = torch.nn.utils.get_total_norm(
            [p.grad.double() for p in reference.parameters()],  # type: ignore[union-attr]
            norm_type,
        ).item()
        model.zero_grad()
        sharded_window(engine, model, _loss, 0, accumulate=2)
        assert_close(gradients(model), saved, GRADIENTS)
        assert engine.grad_norm(norm_type=norm_type) == pytest.approx(true, rel=1e-6)
        norm = engine.clip_grad_norm(true / 10, norm_type=norm_type)
        assert type(norm) is float and norm == pytest.approx(true, rel=1e-6)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), true / 10, norm_type)
        clipped = engine.grad_norm(norm_type=norm_type)
        assert clipped == pytest.approx(true / 10, abs=1e-6, rel=1e-6)
        assert assert_close(gradients(model), gradients(reference), GRADIENTS) > 10
        assert engine.clip_grad_norm(true, norm_type=norm_type) == clipped  # nothing to do
        assert_close(gradients(model), gradients(reference), GRADIENTS)
        returned += [norm, clipped]
    scale = saved["scale"]
    assert scale is not None
    assert engine.grad_norm([model.scale]) == pytest.approx(
        reference.scale.grad.abs().item(), rel=1e-5
    )
    some = [model.scale, model.embed.weight]
    subset = [reference.scale.grad, reference.embed.weight.grad]
    assert engine.grad_norm(iter(some)) == pytest.approx(
        torch.nn.utils.get_total_norm(subset).item(), rel=1e-6
    )
    return returned


def _value_clipping(stage: int) -> None:
    engine, model, reference = _pair(stage)
    reference_window(reference, _loss, 0)
    sharded_window(engine, model, _loss, 0)
    torch.nn.utils.clip_grad_value_(reference.parameters(), 1e-3)
    engine.clip_grad_value(1e-3)
    clipped = gradients(model)
    assert_close(clipped, gradients(reference), GRADIENTS)
    assert max(g.abs().max() for g in clipped.values() if g is not None) == pytest.approx(1e-3)


def _nonfinite_norm(stage: int) -> None:
    engine, model, _ = _pair(stage)
    factor = math.nan if engine.rank == 0 else 1.0
    (_loss(model, 0, 0, engine.rank) * factor).backward()
    with raises_everywhere(RuntimeError, "norm of order 2.0 is nan"):
        engine.clip_grad_norm(1.0, error_if_nonfinite=True)


def _mixed_kinds_step(stage: int) -> None:
    """Optimizers that update many tensors in one call meet shards beside plain tensors."""
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        engine, model, reference = _pair(stage)
        ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), 1e-3, **options))
        theirs = torch.optim.AdamW(reference.parameters(), 1e-3, **options)
        for step in range(3):
            reference_window(reference, _loss, step)
            sharded_window(engine, model, _loss, step)
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            engine.clip_grad_norm(0.1)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert not torch.equal(reference.scale, torch.tensor(1.3))
        assert_same_weights(engine, model, reference)


# ------------------------------------------------------------------ low precision (10, 11)


class _Normed(nn.Module):
    """RMSNorms whose weights start at 1, where bf16 has steps of 2**-8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.RMSNorm(6)
        self.up = nn.Linear(6, 9)
        self.second = nn.RMSNorm(9)
        self.down = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 6) -> (b, 3)."""
        return self.down(self.second(torch.tanh(self.up(self.first(x)))))


def _regression(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(31 * (step % 3) + rank)
    x = torch.randn(4, 6, generator=generator)
    target = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x.sum(-1)], dim=-1)
    return F.mse_loss(model(x).float(), target)


def _masters_of_bf16_checkpoint(stage: int) -> None:
    torch.manual_seed(3)
    model = _Normed().bfloat16()
    reference = copy.deepcopy(model).float()
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="bf16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.shard(model)
    start = engine.full_state_dict(model, rank0_only=False)
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-5))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-5)
    for step in range(200):
        loss = sharded_window(engine, model, _regression, step)
        expected = reference_window(reference, _regression, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    end = engine.full_state_dict(model, rank0_only=False)
    changed = sum(int((end[name] != start[name]).sum()) for name in start)
    assert changed >= 0.99 * sum(value.numel() for value in start.values())
    assert loss == pytest.approx(expected.item(), rel=0.01)


def _pure_bf16(stage: int) -> int:
    torch.manual_seed(3)
    model = _Normed().bfloat16()
    engine = ZeroEngine(ZeroConfig(stage=stage))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.shard(model)
        for step in range(2):
            (model(torch.randn(2, 6).bfloat16()).sum() * step).backward()
            model.zero_grad()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    return sum("no fp32 master weights" in str(warning.message) for warning in caught)


class _LoraLinear(nn.Module):
    """A linear layer with an adapter whose weights sit on the module itself."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(2, base.in_features))
        self.b = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, in) -> (b, out) in the base's dtype."""
        base = self.base(x.to(self.base.weight.dtype))
        return base + F.linear(F.linear(x.to(self.a.dtype), self.a), self.b).to(base.dtype)


class _MixedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.lora = _LoraLinear(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 6)."""
        return x + self.lora(self.norm(x.to(self.norm.weight.dtype))).to(x.dtype)


class _Mixed(nn.Module):
    """bf16 linear layers beside fp32 norms and adapters, in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_MixedBlock() for _ in range(2))
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 6) -> (b, 3)."""
        for block in self.blocks:
            x = block(x)
        return self.out(x.to(self.out.weight.dtype))


def _mixed_dtypes(stage: int, low: bool, frozen_base: bool, param_dtype: str | None) -> None:
    torch.manual_seed(5)
    model = _Mixed()
    reference = copy.deepcopy(model)
    for block in model.blocks:
        if low:
            block.lora.base.bfloat16()
        block.lora.base.requires_grad_(not frozen_base)
    for block, ours_block in zip(reference.blocks, model.blocks, strict=True):
        block.lora.base.load_state_dict(ours_block.lora.base.state_dict())
        block.lora.base.requires_grad_(not frozen_base)
    declared = {name: p.dtype for name, p in model.named_parameters()}
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype=param_dtype))
    engine.shard(model)
    for name, p in model.named_parameters():
        kept = declared[name] if param_dtype is None or not p.requires_grad else torch.float32
        assert p.dtype == kept, name
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.01)
    for step in range(4):
        reference_window(reference, _regression, step, accumulate=2)
        sharded_window(engine, model, _regression, step, accumulate=2)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    tolerance = 1e-2 if low or param_dtype else 1e-6
    trained = {name: whole(p) for name, p in model.named_parameters()}
    assert_close(trained, {n: p.detach() for n, p in reference.named_parameters()}, tolerance)
    exported = engine.full_state_dict(model, rank0_only=False)
    if param_dtype is None:
        assert {name: value.dtype for name, value in exported.items()} == declared


# ------------------------------------------------------------------ ranks and rows (14, 15)


class _WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = TinyLM()
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(3), persistent=False)
        self.lora_a = nn.Parameter(torch.randn(3, 5))
        self.norm.running_mean = torch.randn(5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """batch: tokens (b, s)."""
        return self.lm(batch)


def _seeded_by_rank(stage: int) -> None:
    torch.manual_seed(0)
    first = _WithBuffers()
    torch.manual_seed(dist.get_rank())
    model = _WithBuffers()
    assert dist.get_rank() == 0 or not torch.equal(model.table, first.table)
    ZeroEngine(ZeroConfig(stage=stage)).shard(model)
    for kind in ("named_parameters", "named_buffers"):
        ours = {name: whole(tensor) for name, tensor in getattr(model, kind)()}
        assert_close(ours, dict(getattr(first, kind)()), 0)


def _uneven_rows(stage: int, tied: bool) -> None:
    """257 rows never divide: every row, the last one too, moves as in one process."""
    engine, model, reference = _pair(stage, tied=tied)
    start = engine.full_state_dict(model, rank0_only=False)
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        batch = tokens(step, micro, rank)
        batch[0, :2] = VOCAB - 1  # the last row is an input and a target
        return lm_loss(model(batch), batch)

    for step in range(10):
        reference_window(reference, loss, step)
        sharded_window(engine, model, loss, step)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(engine, model, reference, 1e-6)
    end = engine.full_state_dict(model, rank0_only=False)
    for name in ("embed.weight", "head.weight"):
        moved = (end[name] - start[name]).abs().amax(dim=1) > 0
        expected = (reference.state_dict()[name] - start[name]).abs().amax(dim=1) > 0
        assert torch.equal(moved, expected) and bool(moved[-1])


# ------------------------------------------------------------------ HSDP, fp16


def _replicas(stage: int) -> None:
    engine, model, reference = _pair(stage, replicate_size=2)
    assert engine.device_mesh.shape == (2, 2) and engine.shard_size == 2
    ours = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-3)
    for step, accumulate in enumerate((1, 3, 3, 2)):
        expected = reference_window(reference, _loss, step, accumulate=accumulate)
        loss = sharded_window(engine, model, _loss, step, accumulate=accumulate)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        assert_close(gradients(model), gradients(reference), GRADIENTS)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5).item()
        assert engine.clip_grad_norm(0.5) == pytest.approx(norm, rel=1e-6)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(engine, model, reference)


def _summed_over_replicas_later(dtype: str | None) -> None:
    """FSDP2's own switch leaves the sum over the replicas to a later backward."""
    engine, model, reference = _pair(2, replicate_size=2, param_dtype=dtype, reduce_dtype=dtype)
    for step in range(2):
        for last in (False, False, True):
            model.set_requires_all_reduce(last)
            (_loss(model, step, int(last), engine.rank) / 3).backward()
        for rank in range(engine.world_size):
            micros = (_loss(reference, step, micro, rank) / 3 for micro in (0, 0, 1))
            (sum(micros) / engine.world_size).backward()
        engine.after_backward()
        assert_close(gradients(model), gradients(reference), GRADIENTS if dtype is None else 2e-2)
        for net in (model, reference):
            net.zero_grad()


def _gradients_in(dtype: torch.dtype, replicate_size: int) -> None:
    """FSDP2 divides gradients of other dtypes than fp32 and bf16 before and after the sum."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(dtype)
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=3, units=("Linear",), replicate_size=replicate_size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no fp32 masters
        engine.shard(model)
    inputs = [torch.randn(4, 8).to(dtype) for _ in range(engine.world_size)]
    for x in inputs:
        (reference(x).square().sum() / engine.world_size).backward()
    model(inputs[engine.rank]).square().sum().backward()
    engine.after_backward()
    tolerance = 2e-2 if dtype == torch.float16 else 1e-9
    assert_close(gradients(model), gradients(reference), tolerance)


class _Scaled(nn.Module):
    """Has a 0-dim parameter, whose gradient is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 5) -> (b, 3)."""
        return self.layers(x) * self.gain


def _grad_scaler(stage: int) -> list[float]:
    """An overflow in one rank's rows alone skips the step on all of them."""
    torch.manual_seed(7)
    model = _Scaled()
    reference = copy.deepcopy(model)
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="fp16"))
    engine.shard(model)
    ours = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD(reference.parameters(), lr=0.1)
    scaler = GradScaler("cpu", init_scale=128.0, growth_interval=100)

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        return model(x).float().square().mean()

    scales = []
    for step in range(4):
        before = engine.full_state_dict(model, rank0_only=False)
        scaler.scale(loss(model, step, 0, engine.rank)).backward()
        if step == 1 and engine.rank == 1:
            local_tensor(model.layers[0].weight.grad)[0] = math.inf
        scaler.unscale_(ours)
        if step != 1:
            reference_window(reference, loss, step)
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1).item()
            assert engine.clip_grad_norm(0.1) == pytest.approx(norm, rel=2e-2)
            theirs.step()
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        theirs.zero_grad()
        after = engine.full_state_dict(model, rank0_only=False)
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        assert unchanged == (step == 1)
        scales.append(scaler.get_scale())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert sum(isinstance(p, DTensor) for p in model.parameters()) == 4
    assert_same_weights(engine, model, reference, 5e-3)
    return scales


# ------------------------------------------------------------------ tests


def _two_ranks(stage: int) -> list[list[float]]:
    for windows in (True, False):
        _manual_accumulation(stage, windows)
    _short_last_window(stage)
    _cut_window(stage)
    for counts in (((5, 4), (50, 51)), ((0, 0), (50, 60)), ((5, 0), (50, 55)), ((70, 0), (40, 0))):
        _token_weighted(stage, counts)
    _value_clipping(stage)
    _mixed_kinds_step(stage)
    _seeded_by_rank(stage)
    for tied in (False, True):
        _uneven_rows(stage, tied)
    return [_norms(stage)]


def _low_precision(stage: int) -> int:
    _masters_of_bf16_checkpoint(stage)
    for low in (False, True):
        for frozen_base in (False, True):
            for param_dtype in (None, "bf16"):
                _mixed_dtypes(stage, low, frozen_base, param_dtype)
    _nonfinite_norm(stage)
    return _pure_bf16(stage)


def _other_world_sizes(stage: int) -> list[float]:
    _short_last_window(stage)
    for tied in (False, True):
        _uneven_rows(stage, tied)
    _seeded_by_rank(stage)
    return _norms(stage)


@pytest.mark.parametrize("stage", STAGES)
def test_numbers_two_ranks(pool: RankPool, stage: int) -> None:
    """Cases 2, 3, 4, 6, 9, 14, 15."""
    results = pool.run(_two_ranks, 2, stage)
    assert results[0] == results[1]  # norms are bit-equal on all ranks


@pytest.mark.parametrize("stage", STAGES)
def test_numbers_low_precision(pool: RankPool, stage: int) -> None:
    """Cases 10 and 11: masters, the warning (once, on rank 0), mixed dtypes in a block."""
    assert pool.run(_low_precision, 2, stage) == [1, 0]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", (1, 3, 4))
def test_numbers_other_world_sizes(pool: RankPool, world_size: int, stage: int) -> None:
    """Cases 3, 6, 14, 15 where shards are of different size, empty, or the whole."""
    results = pool.run(_other_world_sizes, world_size, stage)
    assert all(result == results[0] for result in results)


def _hsdp(stage: int) -> list[float]:
    _replicas(stage)
    if stage == 2:
        for low in (None, "bf16"):
            _summed_over_replicas_later(low)
    if stage == 3:
        for replicate_size in (1, 2):
            _gradients_in(torch.float64, replicate_size)
            _gradients_in(torch.float16, replicate_size)
    return _norms(stage, replicate_size=2)


@pytest.mark.parametrize("stage", STAGES)
def test_replicas_equal_one_process(pool: RankPool, stage: int) -> None:
    results = pool.run(_hsdp, 4, stage)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("stage", STAGES)
def test_fp16_overflow_on_one_rank_skips_all(pool: RankPool, stage: int) -> None:
    assert pool.run(_grad_scaler, 2, stage) == [[128.0, 64.0, 64.0, 64.0]] * 2
