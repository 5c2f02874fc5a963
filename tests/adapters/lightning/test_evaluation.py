"""Validate, test and predict before, inside and after fit; every entry point of a module."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.adapters.lightning.modules import (
    Data,
    Net,
    Plain,
    assert_at_rest,
    assert_close,
    build,
    in_order,
    make_optimizer,
    pl,
    reference,
    trainer,
    whole,
    whole_batches,
    world_size,
)


class EveryDoor(pl.LightningModule):
    """Children called by the steps, a scalar, a bare parameter, feature methods, generation."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Net()
        self.tokens = nn.Embedding(5, 11)
        self.head = nn.Linear(11, 5)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))
        self.bare = nn.Parameter(torch.randn(4, 11))
        self.generated: list[list[int]] = []

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.backbone.features(x) @ self.bare.t() @ self.bare

    def generate(self, x: torch.Tensor, length: int = 4) -> list[int]:
        state, out = self.encode(x).mean(0), []
        for _ in range(length):
            token = int((self.head(state) * self.logit_scale).argmax())
            out.append(token)
            state = state + self.tokens.weight[token]
        return out

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, index = batch
        logits = self.head(self.encode(x)) * self.logit_scale
        loss = nn.functional.cross_entropy(logits, index % 5)
        return (
            loss + (self.backbone(x) - y).square().mean() + self.tokens(index % 5).square().mean()
        )

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        cached = self.encode(batch[0]).detach()
        self.log("cached", self.head(cached).square().mean(), sync_dist=True)
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.generated.append(self.generate(batch[0]))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.backbone(batch[0])

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters(), 1e-2)


def mean_loss(module: Any, size: int) -> float:
    with torch.no_grad():
        return float(torch.stack([module.loss(b) for b in whole_batches(size=size)]).mean())


@contextmanager
def as_if_on_cuda(active: bool) -> Iterator[None]:
    """Lightning leaves inference mode off for gloo only: let it believe in another backend."""
    import lightning.pytorch.loops.utilities as utilities

    real = utilities.dist
    if active:
        utilities.dist = SimpleNamespace(get_backend=lambda: "nccl")
    try:
        yield
    finally:
        utilities.dist = real


def every_door(strategy: str, inference: bool) -> None:
    with as_if_on_cuda(inference):
        go_through_every_door(strategy)


def go_through_every_door(strategy: str) -> None:
    module, expected = build(EveryDoor), reference(EveryDoor)
    run = trainer(strategy, max_epochs=2, num_sanity_val_steps=2)
    before = run.validate(module, in_order(size=16), verbose=False)[0]["val_loss"]
    assert abs(before - mean_loss(expected, 16)) <= 1e-5 * before
    assert_at_rest(module)
    run.predict(module, in_order(size=16))
    assert_at_rest(module)
    run.fit(module, in_order(), in_order(size=16))
    optimizer: Any = expected.configure_optimizers()
    for _ in range(2):
        for batch in whole_batches():
            expected.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict())
    assert_at_rest(module)
    assert abs(float(run.callback_metrics["val_loss"]) - mean_loss(expected, 16)) <= 1e-5
    tested = run.test(module, in_order(size=16), verbose=False)[0]["test_loss"]
    assert abs(tested - mean_loss(expected, 16)) <= 1e-5 * tested
    rank = dist.get_rank()
    predicted = torch.cat(run.predict(module, in_order(size=16)))
    data = Data(16)
    mine = list(range(rank, 16, world_size()))
    with torch.no_grad():
        assert torch.allclose(predicted, expected.backbone(data.x[mine]), atol=1e-5)
    module.generated.clear()
    run.validate(module, in_order(size=16), verbose=False)
    tokens = [expected.generate(data.x[mine][i : i + 4]) for i in range(0, len(mine), 4)]
    assert module.generated == tokens and len(tokens) == 16 // 4 // world_size()
    assert_at_rest(module)
    with torch.inference_mode():  # whoever calls the strategy, however
        assert run.strategy.predict_step(next(iter(in_order(size=16))), 0).shape == (4, 3)
    assert_at_rest(module)
    run.fit_loop.max_epochs = 3
    run.fit(module, in_order())  # training still works after all that
    assert_at_rest(module)


@pytest.mark.parametrize(
    ("world", "strategy", "inference"),
    [
        (2, "zero1", False),
        (2, "zero2", True),
        (2, "zero3", True),
        (1, "zero3", True),
        (4, "zero3", False),
    ],
)
def test_every_entry_point(pool: Any, world: int, strategy: str, inference: bool) -> None:
    pool.run(every_door, world, strategy, inference)


def memory_after_loops(strategy: str) -> None:
    alive = evaluate_often(strategy)
    assert alive
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def evaluate_often(strategy: str) -> list[Any]:
    module = build()
    run = trainer(strategy, accumulate_grad_batches=4, val_check_interval=2, max_epochs=1)
    seen: list[dict[str, int]] = []

    class Look(pl.Callback):
        def on_validation_end(self, *unused: Any) -> None:
            assert_at_rest(module)
            seen.append(run.strategy.engine.memory())

    run.callbacks.append(Look())
    run.fit(module, in_order(), in_order(size=16))
    expected = reference()
    optimizer: Any = expected.configure_optimizers()
    for index, batch in enumerate(whole_batches()):
        (expected.loss(batch) / 4).backward()
        if index in (3, 5):
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict())  # evaluating in mid-window did no harm
    assert len(seen) == 3 and all(m["gathered"] == 0 for m in seen)
    rest = run.strategy.engine.memory()
    for _ in range(3):
        run.validate(module, in_order(size=16), verbose=False)
        now = run.strategy.engine.memory()
        assert now["gathered"] == 0 and now["master_shards"] == rest["master_shards"] > 0
    return [weakref.ref(p) for p in module.parameters()]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_evaluation_leaves_nothing_gathered_and_the_model_can_be_freed(
    pool: Any, strategy: str
) -> None:
    pool.run(memory_after_loops, 2, strategy)


class Preference(Plain):
    """A policy beside a frozen copy of itself, as in preference training."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            before = self.frozen(batch[0])
        return super().loss(batch) + (self.net(batch[0]) - before).square().mean()

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", [p for p in self.parameters() if p.requires_grad], 1e-2)


def preference() -> None:
    module, expected = build(Preference), reference(Preference)
    trainer("zero3").fit(module, in_order())
    optimizer: Any = expected.configure_optimizers()
    for batch in whole_batches():
        expected.loss(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict())
    start = reference(Preference).state_dict()
    frozen = {k: v for k, v in whole(module).items() if k.startswith("frozen.")}
    assert_close(frozen, {k: start[k] for k in frozen}, 0.0)


def test_a_frozen_copy_inside_the_module(pool: Any) -> None:
    pool.run(preference, 2)


class Normed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.norm(batch[0]), *batch[1:]))


def sync_batchnorm() -> None:
    module, expected = build(Normed), reference(Normed)
    trainer("zero3", sync_batchnorm=True, max_epochs=2).fit(module, in_order(), in_order(size=16))
    optimizer: Any = expected.configure_optimizers()
    for _ in range(2):
        for batch in whole_batches():
            expected.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict(), 5e-6)


def test_sync_batchnorm_equals_the_whole_batch(pool: Any) -> None:
    pool.run(sync_batchnorm, 2)


def own_samples() -> list[Any]:
    from torch.utils.data import DataLoader, SequentialSampler

    module = build()
    trainer("zero1", max_epochs=2).fit(module, DataLoader(Data(), batch_size=4, shuffle=True))
    custom = build()
    order = DataLoader(Data(), batch_size=4, sampler=SequentialSampler(Data()))
    trainer("zero1", use_distributed_sampler=False).fit(custom, order)
    return [module.samples, custom.samples]


def test_every_rank_gets_its_own_samples(pool: Any) -> None:
    (left, kept), (right, _) = pool.run(own_samples, 2)
    epochs = []
    for epoch in (slice(0, 6), slice(6, 12)):
        mine, theirs = sum(left[epoch], []), sum(right[epoch], [])
        assert sorted(mine + theirs) == list(range(48)) and not set(mine) & set(theirs)
        epochs.append(mine)
    assert epochs[0] != epochs[1], "reshuffled each epoch"
    assert sum(kept, []) == list(range(48)), "a sampler of the user's is left alone"
