"""Penalties, a hook and wandb.watch through Lightning, Fabric and Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.lightning.modules import (
    Plain,
    assert_close,
    assert_moved,
    build,
    in_order,
    make_optimizer,
    rank,
    reference,
    trainer,
    whole,
    whole_batches,
)


def penalty(module: nn.Module) -> torch.Tensor:
    return 0.1 * sum(p.pow(2).sum() for p in module.parameters())


class Penalised(Plain):
    """Decays its weights through the loss, and masks a gradient; forward and penalty together."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[int] = []
        self.net.head.weight.register_hook(self.mask)

    def mask(self, grad: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        return grad * torch.tensor([[1.0], [0.0], [2.0]])

    def on_fit_start(self) -> None:
        for block in self.net.blocks:
            block.up.bias.register_hook(lambda grad: grad * 0.5)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        with self.trainer.strategy.gathered(self, grad=True):
            return loss + penalty(self) + self.loss(batch)


def alone(accumulate: int) -> Plain:
    module = reference(Penalised, optimizer="sgd")
    module.on_fit_start()
    optimizer = make_optimizer("sgd", module.parameters(), 1e-2)
    for index, batch in enumerate(whole_batches()):
        ((2 * module.loss(batch) + penalty(module)) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return module


def in_lightning(folder: str) -> None:
    for strategy, accumulate in (("zero1", 2), ("zero3", 2)):
        module = build(Penalised, optimizer="sgd")
        trainer(strategy, accumulate_grad_batches=accumulate).fit(module, in_order())
        start = reference(Penalised)
        assert_close(whole(module), whole(alone(accumulate)), 2e-5)
        assert_moved(module, start)
        assert len(module.calls) == 6 // accumulate


def watched(folder: str) -> None:
    import wandb

    module = build(Plain)
    if rank() == 0:
        logs = wandb.init(project="test", dir=folder, mode="offline")
        written: dict[str, Any] = {}
        log = logs._log  # what wandb's hooks call
        logs._log = lambda data, *args, **kwargs: written.update(data) or log(data, *args, **kwargs)
        wandb.watch(module, log="gradients", log_freq=1)
    trainer("zero3", limit_train_batches=2).fit(module, in_order())
    if rank() == 0:
        wandb.unwatch(module)
        logs.finish()
        names = {f"gradients/{name}" for name, p in module.named_parameters()}
        assert names <= set(written), names - set(written)


def by_hand(kind: str) -> None:
    module = build(Plain, optimizer="sgd")
    optimizer = make_optimizer("sgd", module.net.parameters(), 1e-2)
    if kind == "fabric":
        run = fabric("zero2")
        model, optimizer = run.setup(module.net, optimizer)
        gathered: Any = lambda: run.strategy.gathered(model, grad=True)  # noqa: E731
    else:
        run = accelerator(zero="zero3")
        model, optimizer = run.prepare(module.net, optimizer)
        gathered = lambda: run.gathered(model, grad=True)  # noqa: E731
    single = reference(Plain).net
    theirs = make_optimizer("sgd", single.parameters(), 1e-2)
    batches = list(in_order())[:3]
    for batch, together in zip(batches, whole_batches(), strict=False):
        loss = (model(batch[0]) - batch[1]).square().mean()
        with gathered():
            loss = loss + penalty(model)
        run.backward(loss)
        expected = (single(together[0]) - together[1]).square().mean()
        (expected + penalty(single)).backward()
        for one in (optimizer, theirs):
            one.step()
            one.zero_grad()
    found = {k.removeprefix("_forward_module."): v for k, v in whole(module.net).items()}
    assert_close(found, whole(single), 2e-5)


def test_losses_and_hooks_of_parameters_in_lightning(pool: Any, tmp_path: Path) -> None:
    pool.run(in_lightning, 2, str(tmp_path))


def test_losses_of_parameters_in_fabric_and_accelerate(pool: Any) -> None:
    pool.run(by_hand, 2, "fabric")
    pool.run(by_hand, 2, "accelerate")


def test_wandb_watches_gradients(pool: Any, tmp_path: Path) -> None:
    pool.run(watched, 2, str(tmp_path))
