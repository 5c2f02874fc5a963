"""Fabric: saves in the background, new names, whole checkpoints beside damaged ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug.checkpoint import Reader, is_checkpoint, resume_point
from shardplug.errors import CheckpointError
from tests.adapters.fabric.test_fabric import Scaled, fabric, loss_of
from tests.adapters.lightning.modules import (
    assert_close,
    build,
    in_order,
    make_optimizer,
    rank,
    whole,
)
from tests.support.held_saves import held_saves


def set_up(**options: Any) -> tuple[Any, Any, Any]:
    from shardplug.fabric import ZeroStrategy

    run = fabric(ZeroStrategy(stage=3, **options))
    model = build(Scaled)
    model, optimizer = run.setup(model, make_optimizer("adamw", model.parameters(), 1e-2))
    return run, model, optimizer


def step(run: Any, model: Any, optimizer: Any) -> None:
    run.backward(loss_of(model, next(iter(in_order()))))
    optimizer.step()
    optimizer.zero_grad()


def save_beside_training(folder: str) -> None:
    run, model, optimizer = set_up(async_save=True)
    step(run, model, optimizer)
    first, second = f"{folder}/first", f"{folder}/second"
    with held_saves(fail_on_save=3, failing=rank() == 1) as gate:
        run.save(first, {"model": model, "optimizer": optimizer, "step": 1})
        at_save = whole(model.module)
        step(run, model, optimizer)
        assert not os.path.exists(first)
        gate.release()
        run.save(second, {"model": model, "optimizer": optimizer, "step": 2})
        assert is_checkpoint(first), "the second waits for the first"
        at_second = whole(model.module)
        run.strategy.remove_checkpoint(first)
        step(run, model, optimizer)
        run.barrier()
        assert is_checkpoint(first) and not os.path.exists(second)
        gate.release()
        state = {"model": model, "step": 0}
        run.load(second, state)  # waits, too
        assert state["step"] == 2
        assert_close(whole(model.module), at_second, 0.0)
        run.barrier()
        assert os.listdir(folder) == ["second"]
        run.save(f"{folder}/third", {"model": model})
        run.strategy.remove_checkpoint(second)
        gate.release()
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            run.strategy.wait_for_save()
    run.barrier()
    assert os.listdir(folder) == ["second"], "what failed leaves the one before it"
    run.load(second, {"model": model})
    change = (at_save["head.weight"] - whole(model.module)["head.weight"]).abs().max()
    assert float(change) > 0
    run.strategy.wait_for_save()


def test_saves_beside_training(pool: Any, tmp_path: Path) -> None:
    pool.run(save_beside_training, 2, str(tmp_path))


class Renamed(nn.Module):
    """`Scaled` with its blocks under another name."""

    def __init__(self) -> None:
        super().__init__()
        before = Scaled()
        self.inp, self.layers, self.head = before.inp, before.blocks, before.head
        self.scale = before.scale


def new_names(folder: str) -> None:
    from shardplug.fabric import ZeroStrategy

    run, model, optimizer = set_up()
    step(run, model, optimizer)
    old = f"{folder}/old"
    run.save(old, {"model": model, "optimizer": optimizer})
    weights = whole(model.module)
    if rank() == 0:
        torch.save({"model": weights}, f"{folder}/file.pt")
    run.barrier()
    again = fabric(ZeroStrategy(stage=2, load_rename={"blocks": "layers"}))
    other = build(Renamed)
    other, second = again.setup(other, make_optimizer("adamw", other.parameters(), 1e-2))
    again.load(old, {"model": other, "optimizer": second})
    expected = {name.replace("blocks", "layers"): value for name, value in weights.items()}
    assert_close(whole(other.module), expected, 0.0)
    before = {n: optimizer.optimizer.state[p] for n, p in model.module.named_parameters()}
    for name, parameter in other.module.named_parameters():
        found = second.optimizer.state[parameter]["exp_avg"]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        saved = before[name.replace("layers", "blocks")]["exp_avg"]
        saved = saved.full_tensor() if hasattr(saved, "full_tensor") else saved
        assert torch.equal(found, saved), name
    # What has the new names already is taken as it is: the option may stay for the next start.
    again.save(f"{folder}/new", {"model": other, "optimizer": second})
    assert "layers.0.up.weight" in Reader(f"{folder}/new").manifest["models"][0]
    for path in ("new", "file.pt"):
        third = again.setup(build(Renamed))
        again.load(f"{folder}/{path}", {"model": third})
        assert_close(whole(third.module), expected, 0.0)
    wrong = fabric(ZeroStrategy(stage=2, load_rename={"block": "stack"}))
    fourth = wrong.setup(build(Renamed))
    for path in ("old", "file.pt"):
        with pytest.raises(CheckpointError, match="has no block"):
            wrong.load(f"{folder}/{path}", {"model": fourth})


def test_new_names(pool: Any, tmp_path: Path) -> None:
    pool.run(new_names, 2, str(tmp_path))


def damaged(folder: str) -> None:
    run, model, optimizer = set_up()
    state = {"model": model, "optimizer": optimizer}
    for name in ("a", "b"):
        run.save(f"{folder}/{name}", {**state, "step": ord(name)})
    if rank() == 0:
        path = next(Path(folder, "b").glob("*.distcp"))
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    run.barrier()
    with pytest.raises(CheckpointError, match=r"b is damaged.*whole.* is .*a \(step 97\)"):
        run.load(f"{folder}/b", state)
    point = resume_point(folder, verify=True, warn=False)
    assert point is not None and point.path.name == "a" and len(point.passed_over) == 1
    run.load(point.path, state)


def test_a_damaged_checkpoint_names_the_whole_one(pool: Any, tmp_path: Path) -> None:
    pool.run(damaged, 2, str(tmp_path))
