"""Training through the Trainer equals one process on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.adapters.lightning.modules import (
    Net,
    Plain,
    assert_at_rest,
    assert_close,
    assert_moved,
    build,
    in_order,
    make_optimizer,
    pl,
    reference,
    trainer,
    whole,
    whole_batches,
)

STAGES = ("zero1", "zero2", "zero3")


def train_whole(
    module: Plain,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    algorithm: str = "norm",
    epochs: int = 2,
    limit: int | None = None,
) -> list[float]:
    """A plain loop with Lightning's windows: the last one of an epoch may be short."""
    optimizer: Any = module.configure_optimizers()
    batches = whole_batches()[:limit]
    norms = []
    for _ in range(epochs):
        for index, batch in enumerate(batches):
            (module.loss(batch) / accumulate).backward()
            if (index + 1) % accumulate and index + 1 < len(batches):
                continue
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), float("inf"))))
            if clip and algorithm == "norm":
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            elif clip:
                nn.utils.clip_grad_value_(module.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return norms


class Watching(Plain):
    """Records the global gradient norm of each step, and clips by hand if asked to."""

    def __init__(self, by_hand: float | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.by_hand = by_hand
        self.norms: list[float] = []
        self.clipped: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.trainer.strategy.engine.grad_norm())

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.by_hand is not None:
            self.clip_gradients(
                optimizer, gradient_clip_val=self.by_hand, gradient_clip_algorithm="norm"
            )
        else:
            super().configure_gradient_clipping(optimizer, *args, **kwargs)
        self.clipped.append(self.trainer.strategy.engine.grad_norm())


def fit_and_compare(strategy: str, options: dict[str, Any]) -> list[float]:
    accumulate = options.get("accumulate", 1)
    clip, algorithm = options.get("clip"), options.get("algorithm", "norm")
    optimizer, by_hand = options.get("optimizer", "adamw"), options.get("by_hand")
    limit = options.get("limit")
    module = build(Watching, optimizer=optimizer, by_hand=by_hand)
    trainer(
        strategy,
        max_epochs=2,
        num_sanity_val_steps=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        gradient_clip_algorithm=algorithm,
        limit_train_batches=limit,
    ).fit(module, in_order(), in_order(size=16))
    expected = reference(optimizer=optimizer)
    norms = train_whole(
        expected, accumulate=accumulate, clip=by_hand or clip, algorithm=algorithm, limit=limit
    )
    assert_moved(module, reference(optimizer=optimizer))
    assert_close(whole(module), expected.state_dict())
    assert_at_rest(module)
    assert len(module.norms) == len(norms) > 2
    for ours, theirs in zip(module.norms, norms, strict=True):
        assert abs(ours - theirs) <= 1e-5 * theirs
    if (by_hand or clip) and algorithm == "norm":
        assert min(norms) > (by_hand or clip), "the clip must bite"
        assert all(abs(n - (by_hand or clip)) <= 1e-6 for n in module.clipped)
    return module.norms


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate": 4, "optimizer": "sgd"},  # six batches: the second window is short
        {"accumulate": 3, "limit": 4, "clip": 0.05},  # limit_train_batches ends a window
        {"accumulate": 2, "clip": 0.01, "algorithm": "value"},
        {"by_hand": 0.05},
    ],
    ids=["plain", "accumulate", "clip-norm-limit", "clip-value", "own-clipping"],
)
def test_fit_equals_one_process(pool: Any, strategy: str, options: dict[str, Any]) -> None:
    norms = pool.run(fit_and_compare, 2, strategy, options)
    assert norms[0] == norms[1]


def fit_alone(strategy: str) -> None:
    module, expected = build(), reference()
    trainer(strategy, max_epochs=2).fit(module, in_order())
    train_whole(expected)
    assert_close(whole(module), expected.state_dict())


def test_one_rank_is_the_same_code(pool: Any) -> None:
    pool.run(fit_alone, 1, "zero3")


class Gan(pl.LightningModule):
    """Two optimizers by hand, toggled; each network is called twice a step."""

    def __init__(self, toggle: bool = True, accumulate: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = (
            Net(),
            nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1)),
        )
        self.toggle, self.accumulate = toggle, accumulate

    def generator_loss(self, x: torch.Tensor) -> torch.Tensor:
        return -self.critic(self.generator(x)).mean()

    def critic_loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.critic(self.generator(x)).mean() + (self.critic(y) - 1).square().mean()

    def training_step(self, batch: Any, index: int) -> None:
        x, y, _ = batch
        last = (index + 1) % self.accumulate == 0
        schedulers: Any = self.lr_schedulers()
        for optimizer, scheduler, loss in zip(
            self.optimizers(),
            schedulers,
            (lambda: self.generator_loss(x), lambda: self.critic_loss(x, y)),
            strict=True,
        ):
            if self.toggle:
                self.toggle_optimizer(optimizer)
            self.manual_backward(loss() / self.accumulate)
            if last:
                self.clip_gradients(optimizer, 0.2, "norm")
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            if self.toggle:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        optimizers = [
            make_optimizer("adamw", self.generator.parameters(), 1e-2),
            make_optimizer("sgd", self.critic.parameters(), 1e-2),
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


def train_gan_whole(module: Gan) -> None:
    optimizers, schedulers = module.configure_optimizers()
    owned = [list(module.generator.parameters()), list(module.critic.parameters())]
    for index, (x, y, _) in enumerate(whole_batches()):
        last = (index + 1) % module.accumulate == 0
        for which in range(2):
            loss = module.generator_loss(x) if which == 0 else module.critic_loss(x, y)
            others = [] if module.toggle else owned[1 - which]
            gradients = torch.autograd.grad(
                loss / module.accumulate, owned[which] + others, allow_unused=True
            )
            for p, g in zip(owned[which] + others, gradients, strict=True):
                if g is not None:
                    p.grad = g if p.grad is None else p.grad + g
            if last:
                nn.utils.clip_grad_norm_(owned[which], 0.2)
                optimizers[which].step()
                optimizers[which].zero_grad()
                schedulers[which].step()


def fit_gan(strategy: str, toggle: bool, accumulate: int) -> None:
    module = build(Gan, toggle=toggle, accumulate=accumulate)
    expected = reference(Gan, toggle=toggle, accumulate=accumulate)
    trainer(strategy).fit(module, in_order())
    train_gan_whole(expected)
    assert_moved(module, reference(Gan))
    assert_close(whole(module), expected.state_dict())
    for optimizer, part in zip(module.optimizers(), (module.generator, module.critic), strict=True):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in part.parameters()}
        assert len(optimizer.state) == len(held)


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize(("toggle", "accumulate"), [(True, 1), (False, 1), (True, 3)])
def test_manual_optimization_with_two_optimizers(
    pool: Any, strategy: str, toggle: bool, accumulate: int
) -> None:
    pool.run(fit_gan, 2, strategy, toggle, accumulate)


class Premature(Plain):
    """Builds its optimizer before the Trainer has touched it."""

    def __init__(self) -> None:
        super().__init__()
        self.early = make_optimizer(
            "adamw",
            [
                {"params": self.net.parameters()},
                {"params": [self.scale, self.shift], "lr": 3e-3, "weight_decay": 0.0},
            ],
            1e-2,
        )

    def configure_optimizers(self) -> Any:
        return self.early


class Stranger(Premature):
    def setup(self, stage: str) -> None:
        self.early = make_optimizer("adamw", Net().parameters(), 1e-2)


def fit_premature() -> None:
    module, expected = build(Premature), reference(Premature)
    trainer(max_epochs=2).fit(module, in_order())
    train_whole(expected)
    assert_moved(module, reference(Premature))
    assert_close(whole(module), expected.state_dict())
    with pytest.raises(ValueError, match="not one of them: it would train nothing"):
        trainer().fit(build(Stranger), in_order())


def test_optimizer_built_before_sharding_trains_or_raises(pool: Any) -> None:
    pool.run(fit_premature, 2)


class Failing(Plain):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = super().training_step(batch, index)
        if len(self.losses) == 3:
            raise KeyError("on purpose")
        return loss


class FailingInside(Plain):
    """Raises inside a unit's forward, with a gathered copy alive."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.net.blocks[1].up.register_forward_hook(self.raise_once)

    def raise_once(self, *unused: Any) -> None:
        self.calls += 1
        if self.calls == 3:
            raise KeyError("on purpose")


def fit_after_exception(kind: Any, strategy: str) -> None:
    module, expected = build(kind), reference()
    with pytest.raises(KeyError, match="on purpose"):
        trainer(strategy, accumulate_grad_batches=2).fit(module, in_order())
    # One step of two micro-batches was taken; the window under way is lost.
    batches = whole_batches()
    optimizer: Any = expected.configure_optimizers()
    for batch in batches[:2]:
        (expected.loss(batch) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert_close(whole(module), expected.state_dict())
    assert_at_rest(module)
    trainer(strategy, max_epochs=2).fit(module, in_order())
    train_whole(expected)
    assert_close(whole(module), expected.state_dict())


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize("kind", [Failing, FailingInside])
def test_another_fit_after_an_exception(pool: Any, kind: Any, strategy: str) -> None:
    pool.run(fit_after_exception, 2, kind, strategy)


def fit_twice(same_trainer: bool) -> None:
    module, expected = build(), reference()
    first = trainer("zero2", max_epochs=1)
    first.fit(module, in_order())
    if same_trainer:
        first.fit_loop.max_epochs = 2
        first.fit_loop.epoch_progress.reset()
        first.fit_loop.max_epochs = 1
        first.fit(module, in_order())
    else:
        trainer("zero2", max_epochs=1).fit(module, in_order())
    train_whole(expected, epochs=1)
    train_whole(expected, epochs=1)  # a second fit begins with new optimizers
    assert_close(whole(module), expected.state_dict())
    with pytest.raises(ValueError, match="options it was sharded with"):
        trainer("zero3").fit(module, in_order())


@pytest.mark.parametrize("same_trainer", [False, True])
def test_second_fit_with_the_same_objects(pool: Any, same_trainer: bool) -> None:
    pool.run(fit_twice, 2, same_trainer)
