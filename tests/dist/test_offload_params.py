"""Parameters in files: what touching them gives, which dtypes they have, when they are read."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ModelError, StorageError, ZeroConfig, ZeroEngine
from shardplug.checkpoint import export_model
from shardplug.core._torch.tensors import local_tensor
from shardplug.core.tier_tensor import in_tier
from tests.dist.test_export import llama, tensors_in
from tests.dist.test_offload import run, same_weights, train
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool


def engine_of(root: str, **fields: Any) -> ZeroEngine:
    return ZeroEngine(
        ZeroConfig(
            stage=3, offload_params="nvme", offload_optimizer="nvme", nvme_path=root, **fields
        )
    )


def touched(root: str) -> None:
    plain = train(3, "none", None, "adamw", steps=2)
    ours = train(3, "infinity", root, "adamw", steps=2)
    pairs = list(zip(ours[1].parameters(), plain[1].parameters(), strict=True))
    in_files = [(p, q) for p, q in pairs if in_tier(local_tensor(p)) is not None]
    assert len(in_files) > 4
    for p, q in in_files:
        assert p.shape == q.shape and p.dtype == q.dtype and p.device == q.device
        ours_local, theirs_local = local_tensor(p), local_tensor(q)
        assert torch.equal(p.full_tensor(), q.full_tensor())
        assert float(p.norm().full_tensor()) == float(q.norm().full_tensor())
        assert torch.equal(ours_local.clone(), theirs_local)
        assert torch.equal((ours_local * 2 + theirs_local).sum(), (theirs_local * 3).sum())
        assert torch.equal(copy.deepcopy(ours_local.detach().clone()), theirs_local)
        if ours_local.numel() > 3:
            assert torch.equal(ours_local.view(-1)[1:3] + 0, theirs_local.view(-1)[1:3])
        assert not isinstance(torch.zeros_like(ours_local), type(ours_local))
    # An average of the weights, as training with EMA keeps one.
    average = {id(p): p.detach().clone() for p, _ in in_files}
    for p, q in in_files:
        average[id(p)].mul_(0.9).add_(p.detach(), alpha=0.1)
        expected = q.detach().clone().mul_(0.9).add_(q.detach(), alpha=0.1)
        assert torch.equal(local_tensor(average[id(p)]), local_tensor(expected))
    # What is written counts, also through a view, and is read by the next forward.
    with torch.no_grad():
        for one in pairs[0]:
            one.copy_(one * 0.5)
            if local_tensor(one).numel():
                local_tensor(one).view(-1)[0].fill_(2.0)
            one.add_(0.25)
    batch = tokens(7, 0, dist.get_rank())
    losses = [float(lm_loss(model(batch), batch)) for model in (ours[1], plain[1])]
    assert losses[0] == losses[1]
    run(*ours, range(2, 4))
    run(*plain, range(2, 4))
    same_weights(ours[:2], plain[:2])
    # Gradients too.
    batch = tokens(9, 0, dist.get_rank())
    for engine, model, _ in (ours, plain):
        with engine.micro_step():
            lm_loss(model(batch), batch).backward()
    for p, q in in_files:
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())
        for one in (p, q):
            one.grad.clamp_(-0.01, 0.01)
        assert torch.equal(local_tensor(p.grad) + 0, local_tensor(q.grad))
    ours[0].clip_grad_value(0.005)
    plain[0].clip_grad_value(0.005)
    assert ours[0].grad_norm() == plain[0].grad_norm()
    for _, _, optimizer in (ours, plain):
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # zeros count: momentum moves on
        optimizer.step()
    same_weights(ours[:2], plain[:2])


@pytest.mark.parametrize("world_size", (1, 2))
def test_touching_a_parameter_gives_its_values(
    pool: RankPool, tmp_path: Path, world_size: int
) -> None:
    pool.run(touched, world_size, str(tmp_path))


def in_bf16(root: str) -> None:
    results = []
    for make in (
        lambda: ZeroEngine(ZeroConfig(stage=3, param_dtype="bf16")),
        lambda: engine_of(root, param_dtype="bf16"),
    ):
        torch.manual_seed(3)
        engine = make()
        model = engine.shard(TinyLM())
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        run(engine, model, optimizer, range(3))
        results.append((engine, model))
    same_weights(results[1], results[0])
    engine, model = results[1]
    states = engine.memory()
    # Read for gathers is the copy in bf16, of half the size (regions are rounded up to 4 KiB).
    assert 0 < states["compute_copies_nvme"] < states["master_shards_nvme"]
    assert all(
        s.copy_bytes <= s.num_bytes / 2 + 4096 for s in engine._offload.parameter_tier._shards
    )  # type: ignore[union-attr]
    shard = max(engine._offload.parameter_tier._shards, key=lambda s: s.shape.numel())  # type: ignore[union-attr]
    assert shard.has_copy and shard.gather().dtype == torch.bfloat16
    before = engine.traffic()["bytes_read"]
    assert before > 0
    # Weights that were written by hand are read from the masters until the next step.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert not shard.has_copy
    assert torch.equal(
        shard.gather().view(-1)[: shard.shape.numel()], shard.read().to(torch.bfloat16).view(-1)
    )


def test_copies_in_the_dtype_of_the_computation(pool: RankPool, tmp_path: Path) -> None:
    pool.run(in_bf16, 2, str(tmp_path))


def without_masters(root: str) -> None:
    """Parameters in bf16 from the start: rounding a factor twice would show."""
    results = []
    for make in (lambda: ZeroEngine(ZeroConfig(stage=3)), lambda: engine_of(root)):
        torch.manual_seed(3)
        engine = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = engine.shard(TinyLM().to(torch.bfloat16))
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        run(engine, model, optimizer, range(3), clip=True)
        results.append((engine, model))
    same_weights(results[1], results[0])


def test_clipping_without_masters(pool: RankPool, tmp_path: Path) -> None:
    pool.run(without_masters, 2, str(tmp_path))


def frozen(root: str) -> None:
    """Frozen parameters rest in files in their own dtype, and have no gradient there."""
    engine = engine_of(root)
    torch.manual_seed(1)
    model = TinyLM()
    names = [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == names[-1])
    reference = copy.deepcopy(model)
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = tokens(0, 0, 0)
    with engine.micro_step():
        lm_loss(model(batch), batch).backward()
    held = engine.memory()
    assert 0 < held["gradients_nvme"] < held["master_shards_nvme"]
    optimizer.step()
    lm_loss(reference(batch), batch).backward()
    torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
    whole = engine.full_state_dict(model, rank0_only=False)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-6, atol=1e-7)
    # Unfrozen later: room for its gradient is made then.
    dict(model.named_parameters())[names[0]].requires_grad_(True)
    optimizer.zero_grad()
    with engine.micro_step():
        lm_loss(model(batch), batch).backward()
    optimizer.step()
    after = engine.full_state_dict(model, rank0_only=False)
    assert not torch.equal(after[names[0]], whole[names[0]])


def test_frozen_parameters(pool: RankPool, tmp_path: Path) -> None:
    pool.run(frozen, 2, str(tmp_path))


class Wandering(nn.Module):
    """Uses its blocks in an order that changes from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (batch, 8)."""
        self.calls += 1
        order = [0, 1, 2, 3] if self.calls % 3 else [2, 0, 3, 1]
        for index in order:
            x = torch.tanh(self.blocks[index](x))
        return x.square().mean()


def another_order(root: str) -> None:
    weights = []
    for make in (
        lambda: ZeroEngine(ZeroConfig(stage=3, units=("Linear",))),
        lambda: engine_of(root, units=("Linear",)),
        lambda: engine_of(root, units=("Linear",), prefetch=0),
        lambda: engine_of(root, units=("Linear",), prefetch=3),
    ):
        torch.manual_seed(2)
        engine = make()
        model = engine.shard(Wandering())
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(8):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step + engine.rank))
            if step == 4:
                with torch.no_grad():
                    model(x)  # an evaluation in between
            with engine.micro_step():
                model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(engine.full_state_dict(model, rank0_only=False))
    for other in weights[1:]:
        assert other and all(torch.equal(other[name], weights[0][name]) for name in other)


def test_a_changed_order_costs_no_correctness(pool: RankPool, tmp_path: Path) -> None:
    pool.run(another_order, 2, str(tmp_path))


def replaced(root: str) -> None:
    engine = engine_of(root)
    model = engine.shard(TinyLM())
    before = engine.full_state_dict(model)
    assert before
    model.load_state_dict({name: 2 * value for name, value in before.items()}, assign=True)
    after = engine.full_state_dict(model)
    assert all(torch.equal(after[name], 2 * before[name]) for name in before)
    block = model.blocks[0]
    block.up.weight = nn.Parameter(torch.zeros(block.up.weight.shape))
    with pytest.raises(ModelError, match=r"blocks\.0\.up\.weight"):
        model(tokens(0, 0, 0))


def test_replacing_a_parameter_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(replaced, 1, str(tmp_path))


def exported(root: str) -> None:
    for name, make in (
        ("memory", lambda: ZeroEngine(ZeroConfig(stage=3))),
        ("files", lambda: engine_of(root)),
    ):
        engine = make()
        engine.shard(llama(dtype=torch.float32))
        export_model(engine, f"{root}/{name}")
        whole = engine.full_state_dict(rank0_only=False)
        assert whole and all(type(value) is torch.Tensor for value in whole.values())


@pytest.mark.parametrize("world_size", (1, 2))
def test_a_model_in_files_is_exported(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    pool.run(exported, world_size, str(tmp_path))
    ours, theirs = tensors_in(tmp_path / "files"), tensors_in(tmp_path / "memory")
    assert ours and set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def needs_memory(root: str) -> None:
    model = engine_of(root).shard(TinyLM())
    local = next(t for p in model.parameters() if (t := in_tier(local_tensor(p))) is not None)
    expected = local.clone()
    assert type(expected) is torch.Tensor and expected.numel()
    for value in (local.cpu(), local.to(torch.float32), local.contiguous(), local.to("cpu")):
        assert type(value) is torch.Tensor and torch.equal(value, expected)
    assert (local.numpy() == expected.numpy()).all()
    buffer = io.BytesIO()
    torch.save(local, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), expected)
    with pytest.raises(StorageError, match="take a copy of it with .clone"):
        local.data_ptr()


def test_values_that_have_to_be_in_memory(pool: RankPool, tmp_path: Path) -> None:
    pool.run(needs_memory, 1, str(tmp_path))
