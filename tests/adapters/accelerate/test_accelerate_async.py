"""Accelerate: saves in the background, limits, whole folders beside damaged ones, new names."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn

from shardplug.checkpoint import is_checkpoint, resume_point
from shardplug.errors import CheckpointError, ConfigError
from shardplug.integrations.accelerate.launch_options import LaunchOptions
from tests.adapters.accelerate.common import WORLD, accelerator
from tests.support.held_saves import held_saves
from tests.support.pool import RankPool


class Net(nn.Module):
    def __init__(self, name: str = "head") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inp = nn.Linear(5, 7)
        self.add_module(name, nn.Linear(7, 3))
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(self.name)(self.inp(x))


def build(root: str, net: nn.Module | None = None, **options: Any) -> Any:
    project = ProjectConfiguration(
        project_dir=root, automatic_checkpoint_naming=True, total_limit=options.pop("limit", None)
    )
    acc = accelerator(zero="zero3", project_config=project, **options)
    net = net or Net()
    net, optimizer = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    return acc, net, optimizer


def step(acc: Any, net: nn.Module, optimizer: Any) -> None:
    acc.backward(net(torch.full((2, 5), acc.process_index + 1.0)).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def content(acc: Any, net: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters and of what Adam keeps of them."""
    found = {}
    for name, parameter in net.named_parameters():
        found[name] = parameter.full_tensor().detach().clone()
        for key, value in acc._optimizers[0].optimizer.state[parameter].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = whole.clone()
    assert len(found) == 4 * 4
    return found


def names(root: str) -> list[str]:
    return sorted(os.listdir(Path(root, "checkpoints")))


def save_beside_training(root: str) -> None:
    acc, net, optimizer = build(root, limit=1, async_save=True)
    with held_saves(fail_on_save=3, failing=acc.process_index == 1) as gate:
        for number in range(2):
            step(acc, net, optimizer)
            folder = acc.save_state()
            assert acc.engine.memory()["snapshot"] > 0
            step(acc, net, optimizer)  # while it is written
            assert not is_checkpoint(folder)
            assert number == 0 or names(root)[-1] == "checkpoint_0", "kept until the next is there"
            acc.wait_for_everyone()
            gate.release()
        acc.wait_for_save()
        acc.wait_for_everyone()
        assert names(root) == ["checkpoint_1"] and acc.engine.memory()["snapshot"] == 0
        acc.save_state()
        gate.release()
        with pytest.raises(CheckpointError, match=r"rank 1: .*No space left"):
            for _ in range(100):
                step(acc, net, optimizer)
                time.sleep(0.05)  # the other rank's file may be slow to reach the disk
    acc.wait_for_everyone()
    assert names(root) == ["checkpoint_1"], "nothing was removed for it"
    with held_saves() as gate:
        saved = acc.completed_steps
        assert saved >= 4, "the failure may be known before the first step after it is counted"
        before = content(acc, net)
        acc.save_state()
        step(acc, net, optimizer)
        step(acc, net, optimizer)
        assert all(not torch.equal(v, before[name]) for name, v in content(acc, net).items())
        gate.release()  # it has written nothing yet
        acc.load_state()  # waits for it
        assert acc.completed_steps == saved
        assert all(torch.equal(v, before[name]) for name, v in content(acc, net).items())
        acc.save_state()
        gate.release()
        acc.end_training()
    assert not acc.is_main_process or names(root) == ["checkpoint_4"]


def test_saves_beside_training(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_beside_training, WORLD, str(tmp_path))


def test_the_option_may_stand_in_either_string() -> None:
    launched = {"FSDP_SHARDING_STRATEGY": "shardplug:zero2, async_save=true"}
    assert LaunchOptions.read(None, launched).config.stage == 2
    assert LaunchOptions.read("zero3,async_save=false", {}).config.stage == 3
    assert LaunchOptions.read("async_save=true,stage=1", {}).config.stage == 1
    assert LaunchOptions.read(None, launched, None).async_save
    assert (
        LaunchOptions.read("zero2", {}, True)
        and LaunchOptions.read(None, launched, True).async_save
    )
    assert not LaunchOptions.read("zero2", {}, None).async_save
    assert not LaunchOptions.read("zero2,async_save=false", {}, None).async_save
    with pytest.raises(ConfigError, match="Expected one async_save"):
        LaunchOptions.read(None, launched, False)
    with pytest.raises(ConfigError, match="async_save=true or async_save=false"):
        LaunchOptions.read("zero2,async_save=yes", {}, None)


def damaged_newest(root: str) -> None:
    acc, net, optimizer = build(root)
    for _ in range(4):
        step(acc, net, optimizer)
        acc.save_state()
    folder = Path(root, "checkpoints")
    if acc.is_main_process:
        next((folder / "checkpoint_3").glob("*.distcp")).unlink()
        # A save that was killed between its two renames.
        (folder / "checkpoint_2").rename(folder / ".checkpoint_2.old-0123abcd")
        shutil.copytree(folder / "checkpoint_1", folder / ".checkpoint_5.tmp-0123abcd")
        (folder / ".checkpoint_5.tmp-0123abcd" / "manifest.json").unlink()
    acc.wait_for_everyone()
    with pytest.raises(CheckpointError, match=r"checkpoint_3 is damaged.*checkpoint_2.*step 3"):
        acc.load_state(folder / "checkpoint_3")
    acc, net, optimizer = build(root, limit=2)
    with warnings.catch_warnings(record=True) as log:
        warnings.simplefilter("always")
        acc.load_state()
    assert acc.completed_steps == 3
    said = [str(w.message) for w in log if "Passed over" in str(w.message)]
    assert (len(said) == 1) == acc.is_main_process
    assert not said or ("checkpoint_3 is damaged" in said[0] and "did not finish" in said[0])
    assert acc.save_iteration == 6, "behind all that is there"
    step(acc, net, optimizer)
    assert acc.save_state().name == "checkpoint_6"
    # The limit counts whole ones; the one that was moved aside is back, the torn one is gone.
    assert names(root) == ["checkpoint_2", "checkpoint_3", "checkpoint_6"]
    acc, net, optimizer = build(root, limit=1)
    acc.load_state(resume_point(folder, warn=False).path)
    assert acc.completed_steps == 4 and acc.save_iteration == 7
    acc.save_state()
    assert names(root) == ["checkpoint_3", "checkpoint_7"]


def test_a_damaged_newest_folder_does_not_count(pool: RankPool, tmp_path: Path) -> None:
    pool.run(damaged_newest, WORLD, str(tmp_path))


def new_names(root: str) -> None:
    acc, net, optimizer = build(root)
    step(acc, net, optimizer)
    folder = acc.save_state()
    weights = acc.get_state_dict(net)
    acc, net, optimizer = build(root, Net("tail"))
    with pytest.raises(CheckpointError, match=r"head\.weight") as error:
        acc.load_state(folder)
    assert "tail.weight" in str(error.value), "both lists are in one message"
    with pytest.raises(CheckpointError, match="has no nothing"):
        acc.load_state(folder, rename={"nothing": "tail"})
    with pytest.raises(ConfigError, match="strict and rename, got .'renam'"):
        acc.load_state(folder, renam={"head": "tail"})
    acc.load_state(folder, rename={"head": "tail"})
    found = acc.get_state_dict(net)
    steps = {float(state["step"]) for state in optimizer.optimizer.state.values()}
    assert steps == {1.0} and len(optimizer.optimizer.state) == 4
    if acc.is_main_process:
        assert torch.equal(found["tail.weight"], weights["head.weight"])
    with pytest.warns(UserWarning, match="tail.weight") if acc.is_main_process else nothing():
        acc2, net, _ = build(root, Net("tail"))
        acc2.load_state(folder, strict=False)
    wide = Net()
    wide.head = nn.Linear(7, 4)
    acc, net, _ = build(root, wide)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"head\.weight.*\[4, 7\].*\[3, 7\]|\(3, 7\)"):
            acc.load_state(folder, strict=strict)


def nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


def test_new_names_and_names_without_partner(pool: RankPool, tmp_path: Path) -> None:
    pool.run(new_names, WORLD, str(tmp_path))
