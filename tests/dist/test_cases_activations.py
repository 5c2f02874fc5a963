"""Activations in CPU memory in unusual steps: other recomputation, compiled blocks, failures."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError
from tests.dist.test_activation_offload import batch_of, tiny, tiny_loss, train
from tests.support.models import TinyLM
from tests.support.parity import raises_everywhere, whole
from tests.support.pool import RankPool


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed_by(kind: str) -> Callable[[Any], None]:
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_products)
    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = contexts

    def wrap(model: Any) -> None:
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, **options)

    return wrap


def by_hand() -> None:
    for kind in ("selective", "reentrant"):
        expected, _, _ = train(tiny(), tiny_loss, ZeroConfig(stage=3), before=recomputed_by(kind))
        away = ZeroConfig(stage=3, offload_activations="cpu")
        found, _, held = train(tiny(), tiny_loss, away, before=recomputed_by(kind))
        assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
        assert set(held) == {3 * 4 * 33 * 32 * 4}  # inputs


def test_recomputation_by_the_users_own_means(pool: RankPool) -> None:
    pool.run(by_hand, 2)


class Manual(TinyLM):
    """Runs backwards within a call, as a step of manual optimization does."""

    def step(self, batch: torch.Tensor) -> None:
        for _ in range(2):
            tiny_loss(self, batch).backward()


def within() -> None:
    found = []
    for recompute, place in itertools.product((False, True), ("none", "cpu")):
        torch.manual_seed(5)
        config = ZeroConfig(
            stage=3,
            activation_checkpointing=recompute,
            offload_activations=place,  # type: ignore[arg-type]
        )
        engine = ZeroEngine(config)
        model = engine.shard(Manual(width=32, hidden=64), forward_methods=["step"])
        optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with engine.micro_step():
            model.step(batch_of(0, 0, engine.rank))
        found.append([whole(p.grad) for p in model.parameters() if p.grad is not None])
        optimizer.step()
        traffic = engine.traffic()
        assert traffic["bytes_read"] == traffic["bytes_written"]
        assert (traffic["bytes_read"] > 0) == (place == "cpu")
    for there, away in (found[:2], found[2:]):
        assert len(there) > 10
        assert all(torch.equal(one, two) for one, two in zip(there, away, strict=True))


def test_backwards_within_a_call(pool: RankPool) -> None:
    pool.run(within, 2)


def compiled_model(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def compiled() -> None:
    for recomputed in (False, True):
        config = {"stage": 3, "activation_checkpointing": recomputed}
        torch._dynamo.reset()
        expected, _, _ = train(tiny(), tiny_loss, ZeroConfig(**config), before=compiled_model)
        torch._dynamo.reset()
        away = ZeroConfig(**config, offload_activations="cpu")
        found, traffic, held = train(tiny(), tiny_loss, away, before=compiled_model)
        assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
        # A compiled block may save something else, but none of its parameters.
        assert traffic["bytes_written"] == traffic["bytes_read"] == 2 * held[0] > 0
        assert held[0] <= 6 * 3 * 4 * 33 * 32 * 4


def test_compiled_blocks(pool: RankPool) -> None:
    pool.run(compiled, 2)


class Failing(TinyLM):
    """Fails in the second block when it is told to."""

    fails = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        if self.fails:
            raise ValueError("in the middle")
        return self.head(self.norm(self.blocks[2](self.blocks[1](x))))


def failing() -> None:
    torch.manual_seed(0)
    engine = ZeroEngine(ZeroConfig(stage=3, offload_activations="cpu"))
    model = engine.shard(Failing(width=32, hidden=64))
    engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batch = batch_of(0, 0, engine.rank)
    model.fails = True
    try:
        tiny_loss(model, batch)
    except ValueError:
        engine.reset()
    assert engine.memory()["activations_cpu"] == 0
    model.fails = False
    loss = tiny_loss(model, batch)
    assert engine.memory()["activations_cpu"] > 0
    loss.backward()
    engine.after_backward()
    assert engine.memory()["activations_cpu"] == 0


def test_a_failed_forward_leaves_nothing_behind(pool: RankPool) -> None:
    pool.run(failing, 2)


def without_blocks() -> None:
    with raises_everywhere(ModelError, "repeated blocks to offload the activations of"):
        ZeroEngine(ZeroConfig(offload_activations="cpu", units=())).shard(tiny())


def test_a_model_without_blocks_is_refused(pool: RankPool) -> None:
    pool.run(without_blocks, 2)


def parameters_in_files(root: str) -> None:
    states = []
    for place in ("none", "cpu"):
        engine = ZeroEngine(
            ZeroConfig(
                stage=3,
                offload_params="nvme",
                offload_optimizer="nvme",
                nvme_path=root,
                offload_activations=place,  # type: ignore[arg-type]
            )
        )
        model = engine.shard(tiny())
        optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(2):
            with engine.micro_step():
                loss = tiny_loss(model, batch_of(step, 0, engine.rank))
                held = engine.memory().get("activations_cpu", 0)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(engine.full_state_dict(rank0_only=False))
        assert held == (0 if place == "none" else 3 * 6 * 4 * 33 * 32 * 4)
    assert states[0] and all(torch.equal(states[0][n], states[1][n]) for n in states[0])


def test_parameters_that_are_gathered_from_files_stay(pool: RankPool, tmp_path: Path) -> None:
    pool.run(parameters_in_files, 2, str(tmp_path))
