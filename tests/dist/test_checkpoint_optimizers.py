"""Optimizer state of other forms: whole, positional, unsharded, statistics, tensor options."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import (
    Reader,
    load_model,
    load_optimizer,
    state_of_model,
    state_of_optimizer,
    write,
)
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import (
    GLOBAL_BATCH,
    Run,
    assert_equal,
    assert_weights_close,
    batch_of,
    make_model,
    make_optimizer,
    make_run,
    snapshot,
    train,
)
from tests.support.models import lm_loss
from tests.support.pool import RankPool

KINDS = ("odd", "sgd", "momentum", "amsgrad")


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """The reference: one process, no sharding, the whole global batch."""
    for step in steps:
        batch = batch_of(step, 0, 1)
        assert len(batch) == GLOBAL_BATCH
        lm_loss(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_kinds(root: str) -> None:
    for kind in KINDS:
        run = make_run(kind, 2)
        train(run, range(3))
        run.engine.save(f"{root}/{kind}", optimizers=[run.optimizer], extra={"kind": kind})
        saved = snapshot(run.model, run.optimizer)
        train(run, range(3, 6))
        torch.save((saved, snapshot(run.model, run.optimizer)), f"{root}/{kind}.expected")


def _load_unsharded_save(root: str) -> None:
    """What one process without a group wrote, and torch's own state dicts, into shards."""
    for kind in KINDS:
        saved, final, whole, positional = torch.load(f"{root}/{kind}.plain")
        for form in ("folder", "state dicts"):
            run = make_run(kind, 3, seed=60)
            if form == "folder":
                run.engine.load(f"{root}/{kind}-plain", optimizers=[run.optimizer])
            else:
                untouched = copy.deepcopy(positional)
                load_model(run.model, whole)
                load_optimizer(run.engine, run.optimizer, positional)
                assert _plain(positional) == _plain(untouched)
            found = snapshot(run.model, run.optimizer)
            for key in [k for k in saved if k.startswith("options")]:
                assert saved.pop(key) == found.pop(key)
            saved = {k: v for k, v in saved.items()}
            assert_equal(saved, {k: v for k, v in found.items() if not k.startswith("options")})
            train(run, range(3, 6))
            assert_weights_close(final, snapshot(run.model, run.optimizer), 1e-6, (kind, form))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_unsharded_and_sharded_load_each_other(pool: RankPool, tmp_path: Path) -> None:
    assert not dist.is_initialized()
    pool.run(_save_kinds, 2, str(tmp_path))
    for kind in KINDS:
        model = make_model(kind, seed=70)
        optimizer = make_optimizer(kind, model)
        expected, final = torch.load(tmp_path / f"{kind}.expected")
        reader = Reader(tmp_path / kind)
        assert reader.meta == {"extra": {"kind": kind}}
        assert reader.load(model, [optimizer]) == [([], [])]
        assert not reader.restore_rng()  # two ranks saved, one loads
        assert_equal(expected, snapshot(model, optimizer), kind)

        # The same in the steps that adapters take.
        again = make_model(kind, seed=71)
        load_model(again, reader.model_state(0, again))
        other = make_optimizer(kind, again)
        load_optimizer(again, other, reader.optimizer_state(0, again, other))
        assert_equal(expected, snapshot(again, other), kind)

        write(
            tmp_path / f"{kind}-plain",
            models=[state_of_model(model)],
            optimizers=[state_of_optimizer(model, optimizer)],
            meta={"extra": {}},
        )
        whole = copy.deepcopy(model.state_dict())
        positional = copy.deepcopy(optimizer.state_dict())
        saved = snapshot(model, optimizer)
        train_plain(model, optimizer, range(3, 6))
        assert_weights_close(final, snapshot(model, optimizer), 1e-6, kind)
        torch.save(
            (saved, snapshot(model, optimizer), whole, positional), tmp_path / f"{kind}.plain"
        )
    pool.run(_load_unsharded_save, 3, str(tmp_path))


class RowStatistics(torch.optim.Optimizer):
    """Keeps state that has not the parameter's shape, as factored optimizers do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if parameter.ndim == 2:
                    rows = parameter.grad.square().mean(1)  # (rows,)
                    columns = parameter.grad.square().mean(0)  # (columns,)
                    if isinstance(columns, DTensor):
                        columns = columns.redistribute(placements=[Replicate()])
                    state.setdefault("rows", torch.zeros_like(rows)).lerp_(rows, 0.5)
                    state.setdefault("columns", torch.zeros_like(columns)).lerp_(columns, 0.5)
                state["seen"] = state.get("seen", 0) + 1
                parameter.add_(parameter.grad, alpha=-group["lr"])


def _statistics(root: str, save: bool) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    torch.manual_seed(3)
    model = engine.shard(make_model("plain", 3))
    optimizer = engine.prepare_optimizer(RowStatistics(model.parameters()))
    run = Run(engine, model, optimizer)
    if save:
        train(run, range(2))
        engine.save(f"{root}/rows", optimizers=[optimizer])
        saved = snapshot(model, optimizer)
        rows = optimizer.state[model.blocks[0].up.weight]["rows"]
        assert rows.placements == (Shard(0),) and rows.shape == (37,)
        train(run, range(2, 4))
        torch.save((saved, snapshot(model, optimizer)), f"{root}/rows.expected")
        return
    saved, final = torch.load(f"{root}/rows.expected")
    engine.load(f"{root}/rows", optimizers=[optimizer])
    assert_equal(saved, snapshot(model, optimizer))
    state = optimizer.state[model.blocks[0].up.weight]
    assert state["rows"].placements == (Shard(0),) and state["seen"] == 2
    assert state["columns"].placements == (Replicate(),)
    train(run, range(2, 4))
    found = snapshot(model, optimizer)
    assert_weights_close(final, found, 1e-6)
    for key in [k for k in final if k.endswith((" rows", " columns"))]:
        assert torch.allclose(final[key], found[key], rtol=1e-4, atol=1e-9), key


def test_state_of_other_shapes_than_the_parameter(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_statistics, 2, str(tmp_path), True)
    for world_size in (1, 3, 2):
        pool.run(_statistics, world_size, str(tmp_path), False)


def _options(root: str) -> None:
    # A learning rate that is a tensor, as compiled and captured loops have it.
    def build(lr: Any) -> Run:
        engine = ZeroEngine(ZeroConfig(stage=2))
        model = engine.shard(make_model("plain", 3))
        options: dict[str, Any] = {"foreach": False} if isinstance(lr, torch.Tensor) else {}
        optimizer = torch.optim.AdamW(model.parameters(), lr, **options)
        return Run(engine, model, engine.prepare_optimizer(optimizer))

    run = build(torch.tensor(2e-3))
    run.optimizer.param_groups[0]["initial_lr"] = 5e-3
    train(run, range(2))
    run.engine.save(f"{root}/tensor", optimizers=[run.optimizer])
    train(run, range(2, 4))
    final = snapshot(run.model)

    again = build(torch.tensor(9e-1))
    lr = again.optimizer.param_groups[0]["lr"]
    again.engine.load(f"{root}/tensor", optimizers=[again.optimizer])
    assert again.optimizer.param_groups[0]["lr"] is lr  # who holds the tensor sees the new value
    assert lr.item() == torch.tensor(2e-3).item()
    assert again.optimizer.param_groups[0]["initial_lr"] == 5e-3
    train(again, range(2, 4))
    assert_equal(final, snapshot(again.model))
    number = build(1e-3)
    number.engine.load(f"{root}/tensor", optimizers=[number.optimizer])
    assert number.optimizer.param_groups[0]["lr"] == torch.tensor(2e-3).item()
    assert type(number.optimizer.param_groups[0]["lr"]) is float
    number.engine.save(f"{root}/number", optimizers=[number.optimizer])
    lr.fill_(0.0)
    again.engine.load(f"{root}/number", optimizers=[again.optimizer])
    assert again.optimizer.param_groups[0]["lr"] is lr and lr.item() == torch.tensor(2e-3).item()

    # Named parameters: the names in the groups stay those of the model at hand.
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    named = engine.prepare_optimizer(torch.optim.AdamW(model.named_parameters()))
    model(torch.ones(2, 4)).sum().backward()
    named.step()
    state = state_of_optimizer(engine, named)
    assert "param_names" not in state["param_groups"][0]
    engine.save(f"{root}/named", optimizers=[named])
    engine.load(f"{root}/named", optimizers=[named])
    assert named.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]

    # Loaded state is a copy: training the one optimizer leaves the other's alone.
    load_optimizer(engine, named, state)
    first = named.state[model[0].weight]["exp_avg"]
    assert first.full_tensor().equal(state["state"]["0.weight"]["exp_avg"].full_tensor())
    first.zero_()
    assert state["state"]["0.weight"]["exp_avg"].full_tensor().abs().sum() > 0

    # Another class of optimizer, other groups, other shapes; and nothing has changed after it.
    before = snapshot(model, named)
    sgd = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match="Expected state of SGD, got that of AdamW"):
        engine.load(f"{root}/named", optimizers=[sgd])
    adam = engine.prepare_optimizer(torch.optim.Adam(model.parameters(), 0.5))
    with pytest.warns(UserWarning, match="optimizer is AdamW; its state and options go into Adam"):
        engine.load(f"{root}/named", optimizers=[adam])
    part = engine.prepare_optimizer(torch.optim.AdamW(model[0].parameters()))
    with pytest.warns(UserWarning, match="1.bias, 1.weight, which AdamW does not train"):
        engine.load(f"{root}/named", optimizers=[part])
    assert part.state[model[0].bias]["step"] == 1.0
    swapped = [{"params": model[1].parameters()}, {"params": model[0].parameters(), "lr": 9.0}]
    straight = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 7.0}]
    groups = engine.prepare_optimizer(torch.optim.AdamW(straight))
    engine.save(f"{root}/straight", optimizers=[groups])
    other = engine.prepare_optimizer(torch.optim.AdamW(swapped))
    engine.load(f"{root}/straight", optimizers=[other])  # groups are matched by what they hold
    assert [group["lr"] for group in other.param_groups] == [7.0, 1e-3]
    single = [{"params": [model[0].weight]}, {"params": [model[0].bias, *model[1].parameters()]}]
    mixed = engine.prepare_optimizer(torch.optim.AdamW(single))
    engine.load(f"{root}/straight", optimizers=[mixed])
    crossed = [{"params": [model[1].weight]}, {"params": [model[0].weight]}]
    other = engine.prepare_optimizer(torch.optim.AdamW(crossed))
    engine.load(f"{root}/straight", optimizers=[other])
    assert [group["lr"] for group in other.param_groups] == [7.0, 1e-3]
    parts = [{"params": [model[0].weight]}, {"params": [model[0].bias]}]
    parted = engine.prepare_optimizer(torch.optim.AdamW(parts))
    with pytest.raises(CheckpointError, match="Expected parameter group 1 to hold"):
        engine.load(f"{root}/straight", optimizers=[parted])
    parts = [{"params": []}, {"params": [model[1].bias]}, {"params": [model[0].bias], "lr": 3.0}]
    added = engine.prepare_optimizer(torch.optim.AdamW(parts))
    engine.load(f"{root}/straight", optimizers=[added])  # the empty one does not take a place
    assert [group["lr"] for group in added.param_groups] == [1e-3, 7.0, 1e-3]
    wrong = {**state, "state": {"0.weight": {"exp_avg": torch.zeros(3, 3)}}}
    with pytest.raises(CheckpointError, match=r"exp_avg of 0.weight .* \(6, 4\), got \(3, 3\)"):
        load_optimizer(engine, named, wrong)
    with pytest.raises(CheckpointError, match="for the 4 parameters of AdamW, got state for 3"):
        load_optimizer(
            engine, named, {"state": {}, "param_groups": [{"params": [0, 1, 2], "lr": 1.0}]}
        )
    assert_equal(before, snapshot(model, named))


def test_options_groups_and_classes(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_options, 2, str(tmp_path))


class Global(torch.optim.SGD):
    """Keeps something outside of `state` and `param_groups`."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "temperature": 3}


def _refusals(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(nn.Linear(6, 5))
    adam = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    adam.state["global"] = {"k": 1}  # type: ignore[index]
    with pytest.raises(CheckpointError, match="AdamW .* some is kept for 'global'"):
        engine.save(f"{root}/a", optimizers=[adam])
    del adam.state["global"]  # type: ignore[arg-type]
    sgd = engine.prepare_optimizer(Global(model.parameters(), 0.1))
    with pytest.raises(CheckpointError, match="Global .* temperature, which would be lost"):
        engine.save(f"{root}/a", optimizers=[sgd])
    model(torch.ones(2, 6)).sum().backward()
    grad = model.weight.grad
    adam.state[model.weight] = {"norms": grad.sum(0)}
    if dist.get_world_size() > 1:
        with pytest.raises(CheckpointError, match="norms of weight .* only partly reduced"):
            engine.save(f"{root}/a", optimizers=[adam])
    assert not Path(f"{root}/a").exists()


def test_state_that_would_be_lost_is_refused(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_refusals, 2, str(tmp_path))
