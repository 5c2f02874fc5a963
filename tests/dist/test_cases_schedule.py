"""Calls in an unusual order: evaluation, exceptions, skipped units, ranks that disagree."""

from __future__ import annotations

import copy
import functools
import gc
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.groups import unit_groups
from shardplug.core.ranks.peer import PeerGather
from shardplug.core.ranks.rank_sync import RankSync
from shardplug.errors import ScheduleError
from tests.support.models import Block, TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    MicroLoss,
    assert_close,
    assert_same_weights,
    assert_sharded,
    gradients,
    raises_everywhere,
    reference_window,
    sharded_window,
    whole,
)
from tests.support.pool import RankPool
from tests.support.traffic import Traffic

STAGES = (1, 2, 3)


def _loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    batch = tokens(step, micro, rank)
    return lm_loss(model(batch), batch)


class _Run:
    """A sharded model and an unsharded one, with their optimizers."""

    def __init__(self, stage: int, model: nn.Module | None = None, **config: object) -> None:
        torch.manual_seed(7)
        self.model = TinyLM() if model is None else model
        self.reference = copy.deepcopy(self.model)
        self.engine = ZeroEngine(ZeroConfig(stage=stage, **config))  # type: ignore[arg-type]
        self.engine.shard(self.model)
        self.optimizer = self.engine.prepare_optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.3)
        )
        self.theirs = torch.optim.AdamW(self.reference.parameters(), lr=1e-3, weight_decay=0.3)

    def compare(self, step: int, loss: MicroLoss = _loss, accumulate: int = 1) -> None:
        """Run one step of each and compare losses, gradients and weights."""
        expected = reference_window(self.reference, loss, step, accumulate=accumulate)
        found = sharded_window(self.engine, self.model, loss, step, accumulate=accumulate)
        assert found == pytest.approx(expected.item(), rel=1e-5)
        assert_close(gradients(self.model), gradients(self.reference), GRADIENTS)
        self.step()

    def step(self) -> None:
        for optimizer in (self.optimizer, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert_sharded(self.model, plain=1)
        assert self.engine.memory()["gathered"] == 0
        assert_same_weights(self.engine, self.model, self.reference)


# ------------------------------------------------------------------ evaluation (21)


def _evaluations(stage: int) -> None:
    run = _Run(stage)
    engine, model = run.engine, run.model
    batch = tokens(50, 0, engine.rank)
    for step in range(3):  # evaluation before training, too
        before = engine.memory()
        for _ in range(5):
            model.eval()
            with torch.no_grad():
                found = model(batch)
            model.train()
            with torch.no_grad():
                expected = run.reference(batch)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert_sharded(model, plain=1)
            assert engine.memory() == before and before["gathered"] == 0
        run.compare(step, accumulate=2)
    with engine.gathered():
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        with torch.no_grad():
            for _ in range(2):
                found = model(batch)
        torch.testing.assert_close(found, run.reference(batch), atol=1e-5, rtol=1e-5)
        assert engine.memory()["gathered"] > 0
    assert_sharded(model, plain=1)
    assert engine.memory()["gathered"] == 0
    run.compare(3, accumulate=2)


def _released(stage: int) -> None:
    """After `forget` no shard outlives the caller's model and optimizer."""
    run = _Run(stage)
    run.compare(0)
    alive = [weakref.ref(p) for p in run.model.parameters()]
    engine = run.engine
    engine.forget(run.model)
    del run
    gc.collect()
    assert len(alive) > 10 and all(ref() is None for ref in alive)
    assert engine.models == [] and sum(engine.memory().values()) == 0


def _evaluation_inside_a_window(stage: int) -> None:
    run = _Run(stage)
    for step in range(3):
        reference_window(run.reference, _loss, step, accumulate=3)
        for micro in range(3):
            if micro == 1:  # between micro-batches
                with torch.no_grad():
                    found = run.model(tokens(60, 0, run.engine.rank))
                    expected = run.reference(tokens(60, 0, run.engine.rank))
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            with run.engine.micro_step(last=micro == 2):
                with torch.no_grad():  # before the forward
                    run.model(tokens(61, 0, run.engine.rank))
                loss = _loss(run.model, step, micro, run.engine.rank) / 3
                loss.backward()
                with torch.no_grad():  # after the backward
                    run.model(tokens(62, 0, run.engine.rank))
        assert_close(gradients(run.model), gradients(run.reference), GRADIENTS)
        run.step()


def _inference_mode(stage: int) -> None:
    run = _Run(stage)
    for _ in range(2):
        with torch.inference_mode(), raises_everywhere(ScheduleError, "inference_mode", "no_grad"):
            run.model(tokens(0, 0, 0))
        run.compare(0)
    tensors = [*run.model.parameters(), *run.model.buffers()]
    assert tensors and not any(tensor.is_inference() for tensor in tensors)


# ------------------------------------------------------------------ forwards without backward


def _forward_only(stage: int) -> None:
    """Forwards that record gradients but are never differentiated leave nothing stale."""
    run = _Run(stage)
    extra = lambda: run.model(tokens(70, 0, run.engine.rank))  # noqa: E731
    for step in range(4):
        extra()
        if step % 2:
            extra()
        run.compare(step, accumulate=1 + step % 2)
        kept = extra()  # its graph stays alive over the next step
        expected = run.reference(tokens(70, 0, run.engine.rank))
        torch.testing.assert_close(kept, expected, atol=1e-5, rtol=1e-5)


class _Sometimes(TinyLM):
    """A part that is used on demand, by every rank alike."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = Block(18, 7)
        self.use = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.extra(x) if self.use else x
        return self.head(self.norm(x)) * self.scale


def _unused_after_forward_only(stage: int) -> None:
    """A forward between step and zero_grad must not turn "no gradient" into zeros."""
    torch.manual_seed(7)
    run = _Run(stage, _Sometimes())
    for step in range(4):
        for model in (run.model, run.reference):
            model.use = step % 2 == 0
        reference_window(run.reference, _loss, step)
        sharded_window(run.engine, run.model, _loss, step)
        assert_close(gradients(run.model), gradients(run.reference), GRADIENTS)
        for optimizer in (run.optimizer, run.theirs):
            optimizer.step()
        run.model(tokens(70, 0, run.engine.rank))  # for a log, gradients still there
        for optimizer in (run.optimizer, run.theirs):
            optimizer.zero_grad()
    assert_same_weights(run.engine, run.model, run.reference)


def _zeroed_between_forward_and_backward(stage: int) -> None:
    torch.manual_seed(7)
    run = _Run(stage, _Sometimes())
    for step in range(6):
        for model, optimizer in ((run.reference, run.theirs), (run.model, run.optimizer)):
            model.use = step % 3 == 0
            zero_grad = optimizer.zero_grad if step % 2 else model.zero_grad
            ranks = range(run.engine.world_size)
            if model is run.model:
                ranks = range(run.engine.rank, run.engine.rank + 1)
            losses = [_loss(model, step, 0, rank) for rank in ranks]
            zero_grad(set_to_none=step != 4)
            (sum(losses) / len(losses)).backward()
        run.engine.after_backward()
        if step != 4:  # zeros were asked for there
            assert_close(gradients(run.model), gradients(run.reference), GRADIENTS)
        run.optimizer.step()
        run.theirs.step()
        assert_same_weights(run.engine, run.model, run.reference)


# ------------------------------------------------------------------ skipped units


class _LayerDrop(TinyLM):
    """Blocks are skipped by a rule that is the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Block(18, 37))
        self.skip: tuple[int, ...] = ()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index not in self.skip:
                x = block(x)
        return self.head(self.norm(x)) * self.scale


def _skipped_units(stage: int, prefetch: int) -> None:
    torch.manual_seed(7)
    run = _Run(stage, _LayerDrop(), prefetch=prefetch)
    patterns = [(), (1,), (1, 2), (0,), (3,), (0, 3), (2,), (0, 1, 2, 3), ()]

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        model.skip = patterns[(step + 2 * micro) % len(patterns)]
        return _loss(model, step, micro, rank)

    for step in range(len(patterns)):
        run.compare(step, loss, accumulate=1 + step % 2)


def _gathers_ahead(prefetch: int) -> None:
    """As many blocks are gathered ahead of use as the option says, in both directions."""
    run = _Run(3, _LayerDrop(), prefetch=prefetch)
    begun: list[int] = []
    seen: dict[tuple[str, int], list[int]] = {}
    names = [name for name, _ in unit_groups(run.model)]

    def note(where: str, index: int) -> Callable[..., None]:
        return lambda *_: seen.update({(where, index): list(begun)})

    for index, block in enumerate(run.model.blocks):
        block.up.register_forward_hook(note("forward", index))
        block.up.register_full_backward_pre_hook(note("backward", index))
    gather = PeerGather.__call__

    def noting(self: PeerGather, *args: Any, **kwargs: Any) -> Any:
        if names[self._unit].startswith("blocks."):
            begun.append(int(names[self._unit].removeprefix("blocks.")))
        return gather(self, *args, **kwargs)

    with mock.patch.object(PeerGather, "__call__", noting), run.engine.micro_step():
        _loss(run.model, 0, 0, run.engine.rank).backward()
    last = len(run.model.blocks) - 1
    assert last == 3
    for index in range(last + 1):
        assert seen["forward", index] == list(range(min(index + prefetch, last) + 1))
        backward = seen["backward", index][last + 1 :]
        assert backward == list(range(last, max(index - prefetch, 0) - 1, -1)), (prefetch, index)


# ------------------------------------------------------------------ exceptions


class _Fails(TinyLM):
    """Raises in the forward, or in the backward, of its second block."""

    def __init__(self) -> None:
        super().__init__()
        self.where = "nowhere"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.where == "forward":
                raise ZeroDivisionError("on purpose")
            if index == 1 and self.where == "backward":
                x.register_hook(self._fail)
        return self.head(self.norm(x)) * self.scale

    def _fail(self, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("on purpose")


def _exceptions(stage: int) -> None:
    torch.manual_seed(7)
    run = _Run(stage, _Fails())
    step = 0
    for where in ("forward", "backward"):
        for fail_in in (0, 1):  # the first or the last micro-batch of a window
            run.compare(step, accumulate=2)
            run.model.where = "nowhere"
            with raises_everywhere(ZeroDivisionError, "on purpose"):
                for micro in range(2):
                    run.model.where = where if micro == fail_in else "nowhere"
                    with run.engine.micro_step(last=micro == 1):
                        _loss(run.model, 99, micro, run.engine.rank).backward()
            run.model.where = "nowhere"
            run.engine.reset()
            assert_sharded(run.model, plain=1)
            assert all(grad is None for grad in gradients(run.model).values())
            run.compare(step + 1, accumulate=2)
            step += 2
    run.model.where = "forward"
    with torch.no_grad(), raises_everywhere(ZeroDivisionError):
        _loss(run.model, 0, 0, run.engine.rank)
    run.model.where = "nowhere"
    run.engine.reset()
    run.compare(step)


# ------------------------------------------------------------------ half-read tensors


def _partial_reads(stage: int) -> None:
    run = _Run(stage)
    weight = run.model.embed.weight
    for read in (
        lambda: weight.norm().item(),
        lambda: float(weight.sum()),
        lambda: bool(weight.isnan().any()),
        lambda: int(weight.sum()),
        lambda: weight.sum().tolist(),
    ):
        with raises_everywhere(RuntimeError, "full_tensor()", "partly reduced"):
            read()
    assert weight.norm().full_tensor().item() == pytest.approx(
        run.reference.embed.weight.norm().item(), rel=1e-6
    )
    assert torch.equal(whole(weight), run.reference.embed.weight)


# ------------------------------------------------------------------ ranks that disagree (51 b)


class _BranchUnits(TinyLM):
    """The blocks, each a unit, are chosen by a rule that may differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.use: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: (b, s) -> logits (b, s, VOCAB)."""
        x = self.embed(tokens)
        for index in self.use:
            x = self.blocks[index](x)
        return self.head(self.norm(x)) * self.scale


def _disagree(
    stage: int,
    uses: tuple[tuple[int, ...], ...],
    micro_of_branch: int,
    dtype: str | None,
    replicas: int = 1,
) -> tuple[str, float]:
    """Return this rank's error and the seconds until it came."""
    torch.manual_seed(7)
    model = _BranchUnits()
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype=dtype, replicate_size=replicas))
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    sharded_window(engine, model, _loss, 0)
    optimizer.step()
    optimizer.zero_grad()
    reference = _BranchUnits()
    reference.load_state_dict(engine.full_state_dict(model, rank0_only=False))

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        model.use = uses[rank] if micro == micro_of_branch else (0, 1, 2)
        return _loss(model, step, micro, rank)

    start = time.monotonic()
    try:
        sharded_window(engine, model, loss, 1, accumulate=3)
    except ScheduleError as error:
        for again in (lambda: model(tokens(0, 0, 0)), optimizer.step, engine.reset):
            try:  # nothing hangs, and nothing trains on
                again()
            except ScheduleError as second:
                assert str(second) == str(error) or "last=False" in str(second)
        return str(error), time.monotonic() - start
    # Units gathered ahead may give every rank the same order after all: then all is right.
    reference_window(reference, loss, 1, accumulate=3)
    assert_close(gradients(model), gradients(reference), GRADIENTS if dtype is None else 2e-2)
    return "", time.monotonic() - start


# ------------------------------------------------------------------ tests


def _all(stage: int) -> None:
    _evaluations(stage)
    _released(stage)
    _evaluation_inside_a_window(stage)
    _inference_mode(stage)
    _forward_only(stage)
    _unused_after_forward_only(stage)
    _zeroed_between_forward_and_backward(stage)
    _exceptions(stage)
    _partial_reads(stage)
    for prefetch in (0, 1, 2):
        _skipped_units(stage, prefetch)


def _gradient_penalty(stage: int, offload: str) -> None:
    """Gradients of gradients, where weights are whole between the two backwards."""
    torch.manual_seed(5)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(64, 1))
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"stage": stage, "offload_activations": offload}
    engine = ZeroEngine(ZeroConfig(**options, units=("Sequential",)))
    engine.shard(model)

    def inputs(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return torch.randn(32, 64, generator=generator).requires_grad_()

    def score_and_slope(net: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        score = net(x).square().mean()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score, slope.square().sum()

    for rank in range(engine.world_size):
        score, slope = score_and_slope(reference, inputs(rank))
        ((score + slope) / engine.world_size).backward()
    with engine.micro_step(last=False):
        score, slope = score_and_slope(model, inputs(engine.rank))
    with engine.micro_step(last=True):
        (score + slope).backward()
    assert_close(gradients(model), gradients(reference), GRADIENTS)


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_gradients(pool: RankPool, stage: int, offload: str) -> None:
    pool.run(_gradient_penalty, 2, stage, offload)


def _gathers_ahead_by_option() -> None:
    for prefetch in (0, 1, 2):
        _gathers_ahead(prefetch)


def test_blocks_are_gathered_as_far_ahead_as_asked(pool: RankPool) -> None:
    pool.run(_gathers_ahead_by_option, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_unusual_orders(pool: RankPool, stage: int) -> None:
    """Case 21; inference mode; exceptions; evaluation in a window; skipped units."""
    pool.run(_all, 2, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("uses", "micro_of_branch", "dtype"),
    [
        (((0, 1, 2), (0, 2)), 0, None),
        (((0, 1), (0, 2)), 0, None),
        (((0, 1, 2), (1, 0, 2)), 2, None),
        (((0, 2), (0, 1, 2)), 2, "bf16"),
    ],
)
def test_ranks_that_use_other_units_are_named(
    pool: RankPool,
    stage: int,
    uses: tuple[tuple[int, ...], ...],
    micro_of_branch: int,
    dtype: str | None,
) -> None:
    """Case 51 (b): an error on every rank within 30 s that names the unit and the way out."""
    case = (stage, uses, micro_of_branch, dtype)
    results = pool.run(_disagree, 2, *case)
    assert len({text for text, _ in results}) == 1, results
    for text, seconds in results:
        if text:
            assert "same units in the same order" in text and "blocks." in text, text
            assert "leave its class out of `units`" in text
        else:
            assert stage == 1 and micro_of_branch == 0
        assert seconds < 30


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("uses", "parted"),
    [
        # One rank of the first replica; then the replicas, each of which agrees inside.
        (((0, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2)), {(0, 1)}),
        (((0, 2), (0, 2), (0, 1, 2), (0, 1, 2)), {(0, 2), (1, 3)}),
        (((0, 1, 2), (0, 1, 2), (1, 0, 2), (1, 0, 2)), {(0, 2), (1, 3)}),
    ],
)
def test_replicas_that_use_other_units_are_named(
    pool: RankPool, stage: int, uses: tuple[tuple[int, ...], ...], parted: set[tuple[int, int]]
) -> None:
    results = pool.run(_disagree, 4, stage, uses, 2, None, 2)
    for text, seconds in results:
        assert "same units in the same order" in text and "blocks." in text, results
        named = {pair for pair in parted if all(f"rank {rank} " in text for rank in pair)}
        assert named, (text, parted)
        assert seconds < 30


class _EqualBlocks(nn.Module):
    """Units of one size in an order that may differ: torch's collectives do not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.use = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 6) -> (b, 6)."""
        for index in self.use:
            x = torch.tanh(self.blocks[index](x))
        return x * self.scale


def _square(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return model(torch.randn(4, 6, generator=generator)).square().mean()


def _torchs_own_collectives(stage: int, replicas: int) -> str:
    """The path of GPUs, on CPU ranks: nothing is compared until the window's end."""
    own = functools.partial(RankSync, direct=False)
    with mock.patch("shardplug.engine.models.RankSync", own):
        model = _EqualBlocks()
        options = {"units": ("Linear",), "prefetch": 0, "replicate_size": replicas}
        run = _Run(stage, model, **options)
    with Traffic() as traffic:
        run.compare(0, _square, accumulate=2)
    assert traffic.bytes["_allgather_base_"] and not traffic.bytes["gather"]
    for step in (1, 2):
        run.compare(step, _square)
    model.use = (1, 0, 2) if run.engine.rank == 0 else (0, 1, 2)
    try:
        with run.engine.micro_step():
            _square(model, 3, 0, run.engine.rank).backward()
    except ScheduleError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("stage", "replicas"), [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_ranks_that_part_under_torchs_collectives_are_told(
    pool: RankPool, stage: int, replicas: int
) -> None:
    for text in pool.run(_torchs_own_collectives, 2 * replicas, stage, replicas):
        assert "the ranks' orders differ" in text and "leave its class out" in text
