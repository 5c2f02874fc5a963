"""The Trainer's precisions: what is kept, computed and reduced in which dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import nn

from shardplug.core._torch.tensors import local_tensor
from tests.adapters.lightning.modules import (
    Plain,
    assert_close,
    assert_moved,
    build,
    in_order,
    pl,
    reference,
    trainer,
    whole,
    whole_batches,
)
from tests.adapters.lightning.test_resume import saver


class Clipped(Plain):
    """A fused optimizer: Lightning refuses to clip for it in mixed precision, without need."""


def mixed(stage: str, folder: str) -> None:
    options = {"optimizer": "fused", "lr": 3e-3}
    module, expected = build(Clipped, **options), reference(Clipped, **options)
    path = f"{folder}/saved"
    run = trainer(
        stage,
        precision="bf16-mixed",
        max_epochs=2,
        gradient_clip_val=0.5,
        callbacks=[saver(path, 7)],
    )
    run.fit(module, in_order())
    assert run.strategy.engine.config.param_dtype == torch.bfloat16
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert {v.dtype for s in run.optimizers[0].state.values() for v in s.values()} == {
        torch.float32
    }
    optimizer: Any = expected.configure_optimizers()
    losses = []
    for _ in range(2):
        for batch in whole_batches():
            with torch.autocast("cpu", torch.bfloat16):
                loss = expected.loss(batch)
            losses.append(float(loss.detach()))
            loss.backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_moved(module, reference(Clipped, **options))
    # The same bf16 products, summed over the batch in another order.
    assert_close(whole(module), expected.state_dict(), 5e-3)
    both = torch.tensor(module.losses)
    torch.distributed.all_reduce(both)
    assert torch.allclose(both / 2, torch.tensor(losses), rtol=0.02)
    resumed = build(Clipped, **options)
    again = trainer(stage, precision="bf16-mixed", max_epochs=2, gradient_clip_val=0.5)
    again.fit(resumed, in_order(), ckpt_path=path)
    assert_close(whole(resumed), whole(module), 0.0)


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_bf16_mixed(pool: Any, tmp_path: Any, stage: str) -> None:
    pool.run(mixed, 2, stage, str(tmp_path))


def exact_targets() -> None:
    seen = []

    class Look(Plain):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seen.append((batch[0].dtype, batch[1].dtype))
            return super().training_step(batch, index)

    trainer("zero3", precision="bf16-mixed", max_steps=1).fit(build(Look), in_order())
    assert seen == [(torch.float32, torch.float32)]


def test_mixed_precision_does_not_round_the_targets(pool: Any) -> None:
    pool.run(exact_targets, 2)


def pure(stage: str) -> None:
    module = build()
    trainer(stage, precision="bf16-true", max_epochs=2, gradient_clip_val=0.5).fit(
        module, in_order()
    )
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    losses = torch.tensor([sum(module.losses[:6]), sum(module.losses[6:])])
    torch.distributed.all_reduce(losses)
    assert losses[1] < 0.9 * losses[0]
    expected = reference().to(torch.bfloat16)
    optimizer: Any = expected.configure_optimizers()
    for _ in range(2):
        for x, y, index in whole_batches():
            expected.loss((x.bfloat16(), y.bfloat16(), index)).backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict(), 0.06)  # Adam at bf16 resolution


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_bf16_true(pool: Any, stage: str) -> None:
    pool.run(pure, 2, stage)


class Overflowing(Plain):
    """An infinite gradient in one step, in one rank's rows only."""

    def on_after_backward(self) -> None:
        if len(self.losses) == 3 and torch.distributed.get_rank() == 1:
            local_tensor(self.net.head.weight.grad)[0] = float("inf")


def scaled(stage: str) -> list[float]:
    module = build(Overflowing)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    scales: list[float] = []
    weights: list[torch.Tensor] = []

    class Look(pl.Callback):
        def on_train_batch_end(self, *unused: Any) -> None:
            scales.append(plugin.scaler.get_scale())
            weights.append(whole(module)["net.head.weight"])

    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    run = trainer(
        stage,
        max_epochs=1,
        gradient_clip_val=0.5,
        callbacks=[Look()],
        plugins=[TorchElasticEnvironment(), plugin],
    )
    run.fit(module, in_order())
    assert run.precision_plugin is plugin and isinstance(plugin, MixedPrecision)
    assert type(plugin).__qualname__ == "MixedPrecision"  # the key of its state in checkpoints
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert scales == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    assert torch.equal(weights[1], weights[2]) and not torch.equal(weights[2], weights[3])
    return [float(w.sum()) for w in weights]


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
def test_16_mixed_skips_a_step_on_all_ranks(pool: Any, stage: str) -> None:
    left, right = pool.run(scaled, 2, stage)
    assert left == right


class Strange(Precision):
    precision = "int4"


def refuse_precision() -> None:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    with pytest.raises(ValueError, match="Expected a precision out of.*got Strange"):
        trainer(plugins=[TorchElasticEnvironment(), Strange()])
    from shardplug.lightning import ZeroStrategy

    with pytest.raises(ValueError, match="param_dtype to agree with precision='bf16-mixed'"):
        trainer(ZeroStrategy(param_dtype="fp16"), precision="bf16-mixed")
    # Without autocast, a low dtype of the engine's own casts the inputs too.
    module = build()
    trainer(ZeroStrategy(stage=3, param_dtype="bf16"), max_steps=2).fit(module, in_order())
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert_moved(module, reference())


def test_precisions_that_cannot_work_are_refused(pool: Any) -> None:
    pool.run(refuse_precision, 2)
