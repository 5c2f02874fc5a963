"""Training with Fabric equals one process; set-up in every order, saving, both import names."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.adapters.lightning.modules import (
    Net,
    Plain,
    assert_at_rest,
    assert_close,
    assert_moved,
    build,
    in_order,
    make_optimizer,
    quiet,
    rank,
    reference,
    trainer,
    whole,
    whole_batches,
    world_size,
)

STAGES = ("zero1", "zero2", "zero3")


def fabric(strategy: Any = "zero3", package: str = "lightning.fabric", **options: Any) -> Any:
    quiet()
    environments = importlib.import_module(f"{package}.plugins.environments")
    made = importlib.import_module(package).Fabric(
        accelerator="cpu",
        devices=world_size(),
        strategy=strategy,
        plugins=[environments.TorchElasticEnvironment()],
        **options,
    )
    made.launch()
    return made


def loss_of(module: nn.Module, batch: Any) -> torch.Tensor:
    return (module(batch[0]) - batch[1]).square().mean()


def train(
    run: Any, model: Any, optimizer: Any, *, accumulate: int = 1, clip: Any = None, epochs: int = 2
) -> list[float]:
    norms = []
    loader = run.setup_dataloaders(in_order(), use_distributed_sampler=False)
    for _ in range(epochs):
        for index, batch in enumerate(loader):
            last = (index + 1) % accumulate == 0 or index + 1 == len(loader)
            with run.no_backward_sync(model, enabled=not last):
                run.backward(loss_of(model, batch) / accumulate)
            if not last:
                continue
            if clip:
                norm = run.clip_gradients(model, optimizer, **clip)
                norms.append(0.0 if norm is None else float(norm))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def train_whole(
    module: nn.Module, optimizer: Any, *, accumulate: int = 1, clip: Any = None, epochs: int = 2
) -> list[float]:
    norms = []
    batches = whole_batches()
    for _ in range(epochs):
        for index, batch in enumerate(batches):
            (loss_of(module, batch) / accumulate).backward()
            if (index + 1) % accumulate and index + 1 < len(batches):
                continue
            if clip and "max_norm" in clip:
                norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), **clip)))
            elif clip:
                nn.utils.clip_grad_value_(module.parameters(), clip["clip_val"])
                norms.append(0.0)
            optimizer.step()
            optimizer.zero_grad()
    return norms


class Scaled(Net):
    """With a 0-dim parameter, and methods besides forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.features(x) * self.scale


def fit(strategy: str, order: str, options: dict[str, Any]) -> list[float]:
    run = fabric(strategy)
    model, expected = build(Scaled), reference(Scaled)
    if order == "together":
        model, optimizer = run.setup(model, make_optimizer("adamw", model.parameters(), 1e-2))
    elif order == "before":
        early = make_optimizer("adamw", model.parameters(), 1e-2)
        model = run.setup_module(model)
        optimizer = run.setup_optimizers(early)
    else:
        model = run.setup_module(model)
        optimizer = run.setup_optimizers(make_optimizer("adamw", model.parameters(), 1e-2))
    norms = train(run, model, optimizer, **options)
    right = train_whole(expected, make_optimizer("adamw", expected.parameters(), 1e-2), **options)
    assert_moved(model.module, reference(Scaled))
    assert_close(whole(model.module), expected.state_dict())
    assert len(norms) == len(right)
    assert all(abs(a - b) <= 1e-5 * b for a, b in zip(norms, right, strict=True))
    return norms


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.parametrize(
    ("order", "options"),
    [
        ("together", {"accumulate": 4}),
        ("before", {"clip": {"max_norm": 0.05}}),
        ("after", {"clip": {"clip_val": 0.01}, "accumulate": 2}),
        ("together", {"clip": {"max_norm": 0.05, "norm_type": float("inf")}}),
    ],
)
def test_fabric_equals_one_process(
    pool: Any, strategy: str, order: str, options: dict[str, Any]
) -> None:
    left, right = pool.run(fit, 2, strategy, order, options)
    assert left == right


def methods() -> None:
    run = fabric()
    model = run.setup(build(Scaled))
    expected = reference(Scaled)
    x = whole_batches()[0][0]
    with torch.no_grad():
        assert torch.allclose(model(x), expected(x), atol=1e-6)
        with pytest.raises(
            RuntimeError, match="mixed torch.Tensor and DTensor|mark_forward_method"
        ):
            model.encode(x)
    model.mark_forward_method("encode")
    with torch.no_grad():
        assert torch.allclose(model.encode(x), expected.encode(x), atol=1e-6)
    assert_at_rest(model.module)
    lightning_module, plain = build(Plain), reference(Plain)
    lightning_module, optimizer = run.setup(
        lightning_module, lightning_module.configure_optimizers()
    )
    plain_optimizer: Any = plain.configure_optimizers()
    for mine, all_of_it in zip(in_order(), whole_batches(), strict=True):
        run.backward(lightning_module.training_step(mine, 0))
        optimizer.step()
        optimizer.zero_grad()
        plain.loss(all_of_it).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    assert_close(whole(lightning_module.module), plain.state_dict())


def test_methods_besides_forward(pool: Any) -> None:
    pool.run(methods, 2)


def gan(strategy: str) -> None:
    """Two modules, two optimizers; the critic is not stepped with the generator's gradients."""
    run = fabric(strategy)
    parts = [build(Net), build(nn.Linear, in_features=3, out_features=1)]
    copies = [reference(Net), reference(nn.Linear, in_features=3, out_features=1)]
    made = [make_optimizer("adamw", p.parameters(), 1e-2) for p in parts]
    (generator, first), (critic, second) = (
        run.setup(p, o) for p, o in zip(parts, made, strict=True)
    )
    others = [make_optimizer("adamw", p.parameters(), 1e-2) for p in copies]
    for mine, everything in zip(in_order(), whole_batches(), strict=True):
        for backward, nets, optimizers, (x, y, _) in (
            (run.backward, (generator, critic), (first, second), mine),
            (torch.Tensor.backward, copies, others, everything),
        ):
            backward(-nets[1](nets[0](x)).mean())
            optimizers[0].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            backward(nets[1](nets[0](x).detach()).mean() + (nets[1](y) - 1).square().mean())
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    for ours, theirs in zip(parts, copies, strict=True):
        assert_close(whole(ours), theirs.state_dict())


@pytest.mark.parametrize("strategy", STAGES)
def test_two_modules(pool: Any, strategy: str) -> None:
    pool.run(gan, 2, strategy)


class Halves(nn.Module):
    """Two parts, each with an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)


def one_module() -> None:
    run = fabric("zero3")
    model = build(Halves)
    made = [make_optimizer("sgd", part.parameters(), 0.1) for part in model.children()]
    model, *_ = run.setup(model, *made)
    # Gathered one by one: an optimizer may step while the other part is at work.
    assert all(isinstance(part, FSDPModule) for part in model.module.children())
    assert run.all_reduce(torch.tensor(rank() + 1.0), reduce_op="sum").item() == 3.0
    assert run.all_reduce(torch.tensor(rank() + 1.0)).item() == 1.5


def test_one_module_with_two_optimizers(pool: Any) -> None:
    pool.run(one_module, 2)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def make_state(run: Any) -> tuple[Any, Any, Counter]:
    model, optimizer = build(Scaled), None
    model, optimizer = run.setup(model, make_optimizer("adamw", model.parameters(), 1e-2))
    return model, optimizer, Counter()


def save_and_load(folder: str) -> None:
    run = fabric("zero3")
    model, optimizer, counter = make_state(run)
    train(run, model, optimizer, epochs=1)
    counter.count = 6
    state = {"model": model, "optimizer": optimizer, "counter": counter, "step": 6, "note": "hi"}
    run.save(f"{folder}/{rank()}-saved", state)  # rank 0's path counts
    path = f"{folder}/0-saved"
    assert os.listdir(folder) == ["0-saved"]
    train(run, model, optimizer, epochs=1)
    final = whole(model.module)

    again = fabric("zero1")
    model, optimizer, counter = make_state(again)
    state = {"model": model, "optimizer": optimizer, "counter": counter, "step": 0}
    rest = again.load(path, state)
    assert state["step"] == 6 and counter.count == 6 and rest == {"note": "hi"}
    train(again, model, optimizer, epochs=1)
    assert_close(whole(model.module), final, 1e-6)

    with pytest.raises(KeyError, match="coconut"):
        again.load(path, {"model": model, "coconut": 1})
    state = {"model": model, "coconut": 1}
    again.load(path, state, strict=False)
    assert state["coconut"] == 1
    with pytest.raises(ValueError, match=r"got no state.*fabric.load\(path"):
        again.load(path)
    with pytest.raises(RuntimeError, match="found nothing.*newest whole .* is .*0-saved"):
        again.load(f"{folder}/nothing", {"model": model})
    with pytest.raises(ValueError, match="local or mounted"):
        again.save("s3://bucket", {"model": model})

    keep = {"model": lambda name, value: "head" in name}
    again.save(f"{folder}/part", {"model": model}, filter=keep)
    other = again.setup(build(Scaled))
    with pytest.raises(RuntimeError, match="Missing in the checkpoint"):
        again.load(f"{folder}/part", {"model": other})
    again.load(f"{folder}/part", {"model": other}, strict=False)
    now = whole(other.module)
    assert_close(
        {k: v for k, v in now.items() if "head" in k},
        {k: v for k, v in whole(model.module).items() if "head" in k},
        0.0,
    )
    full = {k: v for k, v in reference(Scaled).state_dict().items()}
    if rank() == 0:
        torch.save(full, f"{folder}/raw.pt")
        torch.save({"model": full, "step": 3}, f"{folder}/plain.pt")
    again.barrier()
    again.load_raw(f"{folder}/raw.pt", other)
    assert_close(whole(other.module), full, 0.0)
    state = {"model": model, "step": 0}
    again.load(f"{folder}/plain.pt", state)
    assert state["step"] == 3
    assert_close(whole(model.module), full, 0.0)


def test_save_and_load(pool: Any, tmp_path: Path) -> None:
    pool.run(save_and_load, 2, str(tmp_path))


def across(folder: str) -> None:
    """What the Trainer saves Fabric loads, and the other way round."""
    module = build(Plain)
    run = trainer("zero2", max_epochs=1)
    run.fit(module, in_order())
    run.save_checkpoint(f"{folder}/trainer")
    saved = whole(module)
    later = fabric("zero3")
    model = build(Plain)
    model, optimizer = later.setup(model, model.configure_optimizers())
    state = {"model": model, "optimizer": optimizer, "global_step": 0}
    later.load(f"{folder}/trainer", state)
    assert state["global_step"] == 6
    assert_close(whole(model.module), saved, 0.0)
    steps = {float(s["step"]) for s in optimizer.optimizer.state.values()}
    assert steps == {6.0}
    later.save(f"{folder}/fabric", {**state, "step": 6})
    # Fabric's folder has no position in the data: an epoch begins, at the step count it has.
    back = build(Plain)
    again = trainer("zero1", max_epochs=1)
    again.fit(back, in_order(), ckpt_path=f"{folder}/fabric")
    direct = build(Plain)
    last = trainer("zero3", max_epochs=2)
    last.fit(direct, in_order(), ckpt_path=f"{folder}/trainer")
    assert again.global_step == last.global_step == 12
    assert back.samples == direct.samples and len(back.samples) == 6
    assert_close(whole(back), whole(direct), 1e-6)


def test_checkpoints_cross_between_trainer_and_fabric(pool: Any, tmp_path: Path) -> None:
    pool.run(across, 2, str(tmp_path))


def setups(folder: str) -> None:
    from shardplug.fabric import ZeroStrategy

    run = fabric(ZeroStrategy(stage=2, units=("Block",)))
    model = build(Scaled)
    with pytest.raises(ValueError, match="not one of them: it would train nothing"):
        run.setup(model, make_optimizer("adamw", Net().parameters(), 1e-2))
    frozen = build(Scaled).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        run.setup(frozen, make_optimizer("sgd", frozen.parameters(), 1e-2))
    teacher = run.setup(frozen)
    assert teacher(torch.zeros(1, 6)).shape == (1, 3)
    with run.init_module(empty_init=True):
        empty = Net()
    assert all(p.is_meta for p in empty.parameters())
    filled = run.setup(empty)
    assert all(torch.isfinite(v).all() for v in whole(filled.module).values())
    other = fabric("zero3", package="lightning_fabric")
    model = build(Net)
    model, optimizer = other.setup(model, make_optimizer("adamw", model.parameters(), 1e-2))
    other.backward(loss_of(model, next(iter(in_order()))))
    optimizer.step()
    assert_moved(model.module, reference(Net))
    scale = torch.amp.GradScaler("cpu", init_scale=256.0)
    from lightning.fabric.plugins.precision import MixedPrecision

    quiet()
    import lightning.fabric as package

    mixed = package.Fabric(
        accelerator="cpu",
        devices=world_size(),
        strategy="zero3",
        plugins=[TorchElasticEnvironment(), MixedPrecision("16-mixed", "cpu", scale)],
    )
    mixed.launch()
    model = build(Scaled)
    model, optimizer = mixed.setup(model, make_optimizer("adamw", model.parameters(), 1e-2))
    for batch in in_order():
        mixed.backward(loss_of(model, batch))
        norm = mixed.clip_gradients(model, optimizer, max_norm=0.1)
        assert 0 < float(norm) < 50
        optimizer.step()
        optimizer.zero_grad()
    assert_moved(model.module, reference(Scaled))
    mixed.backward(loss_of(model, next(iter(in_order()))) * float("nan"))
    with pytest.raises(RuntimeError, match="cannot be clipped|non-finite"):
        mixed.clip_gradients(model, optimizer, max_norm=0.1)


def test_set_up_and_refusals(pool: Any, tmp_path: Path) -> None:
    pool.run(setups, 2, str(tmp_path))
