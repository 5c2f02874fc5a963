"""The life of the optimizer state: saved early, unused parts, freezing, new groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from tests.dist.checkpoint_runs import (
    Run,
    assert_equal,
    assert_weights_close,
    make_run,
    snapshot,
    train,
)
from tests.support.models import lm_loss, tokens
from tests.support.pool import RankPool

BATCH = 12


class Parts(nn.Module):
    """Parts that are used, unused, frozen and added one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(5, 7)
        self.c = nn.Linear(5, 7)
        self.out = nn.Linear(7, 3)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, *, use_b: bool) -> torch.Tensor:
        """x: (n, 5) -> (n, 3)."""
        hidden = self.a(x) + self.c(x)
        if use_b:
            hidden = hidden + self.b(x)
        return self.out(torch.tanh(hidden)) * self.gain


class Life:
    """The run of case H3, in phases that can be started anywhere."""

    def __init__(self, stage: int, seed: int, *, frozen: str = "c") -> None:
        torch.manual_seed(seed + dist.get_rank())
        model = Parts()
        for part in frozen.split():
            getattr(model, part).requires_grad_(False)
        self.engine = ZeroEngine(ZeroConfig(stage=stage))
        self.model = self.engine.shard(model)
        groups = [
            {"params": [*model.a.parameters(), *model.b.parameters()], "initial_lr": 1e-2},
            {"params": [*model.out.parameters(), model.gain], "initial_lr": 2e-2, "lr": 2e-2},
            {"params": [], "initial_lr": 5e-2, "weight_decay": 0.3},
        ]
        self.optimizer = self.engine.prepare_optimizer(
            torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9))
        )
        self.step = 0

    def train(self, steps: int, *, use_b: bool, lr_factor: float = 0.9) -> None:
        rank, size = dist.get_rank(), BATCH // dist.get_world_size()
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(BATCH, 5, generator=generator)[rank * size : (rank + 1) * size]
            with self.engine.micro_step():
                self.model(x, use_b=use_b).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_factor**self.step

    def freeze_a(self) -> None:
        self.model.a.requires_grad_(False)

    def unfreeze_all(self) -> None:
        self.model.a.requires_grad_(True)
        self.model.c.requires_grad_(True)
        self.optimizer.add_param_group(
            {"params": list(self.model.c.parameters()), "lr": 3e-2, "initial_lr": 3e-2}
        )

    def save(self, path: str) -> None:
        self.engine.save(path, optimizers=[self.optimizer], extra={"step": self.step})

    def load(self, path: str) -> None:
        self.step = self.engine.load(path, optimizers=[self.optimizer])["step"]

    def steps_done(self, part: str) -> list[float]:
        """Adam's counters of a part's parameters."""
        return [
            float(self.optimizer.state[p]["step"])
            for p in getattr(self.model, part).parameters()
            if "step" in self.optimizer.state.get(p, {})
        ]

    def run(self, start: int, root: str | None, *, find_lr: bool = False) -> dict[int, Any]:
        """Run the phases from `start`; save before each if `root` is given."""
        at: dict[int, Any] = {}
        for phase in range(start, 5):
            if phase == 4:
                self.unfreeze_all() if start < 4 else None
            at[phase] = snapshot(self.model, self.optimizer)
            if root is not None:
                self.save(f"{root}/{phase}")
            if phase == 0:
                if find_lr:
                    self.train(10, use_b=True, lr_factor=1.3)
                    self.load(f"{root}/0")
                    assert self.optimizer.state == {}
                self.train(3, use_b=False)
                assert self.steps_done("a") == self.steps_done("out") == [3.0, 3.0]
                assert self.steps_done("b") == []
            elif phase == 1:
                self.train(2, use_b=True)
                assert self.steps_done("a") == [5.0, 5.0] and self.steps_done("b") == [2.0, 2.0]
            elif phase == 2:
                self.freeze_a()
                self.train(2, use_b=True)
                assert self.steps_done("a") == [5.0, 5.0] and self.steps_done("b") == [4.0, 4.0]
            elif phase == 3:
                self.model.a.requires_grad_(False)
                self.train(1, use_b=False)
            else:
                self.train(3, use_b=True)
                assert self.steps_done("a") == [8.0, 8.0] and self.steps_done("c") == [3.0, 3.0]
        at[5] = snapshot(self.model, self.optimizer)
        return at


def _live(root: str) -> None:
    never_saved = Life(2, seed=1).run(0, None)
    saved = Life(2, seed=1).run(0, root, find_lr=True)
    assert never_saved.keys() == saved.keys() == set(range(6))
    for phase, expected in never_saved.items():
        assert_equal(expected, saved[phase], phase)
    assert not any(key.startswith("state") for key in saved[0])
    assert len(saved[4]) > len(saved[2]) > len(saved[1]) > len(saved[0])
    torch.save(saved, f"{root}/expected-{dist.get_rank()}")
    for phase in range(5):  # the same layout: to the bit
        assert_equal(saved[5], _resume(root, phase, 2)[5], phase)


def _resume(root: str, phase: int, stage: int) -> dict[int, Any]:
    # What was frozen when it was saved is frozen from the beginning here, and unfrozen later.
    life = Life(stage, seed=50, frozen="a c" if phase == 3 else "c")
    if phase == 4:  # a group that was added during training is added before loading
        life.unfreeze_all()
    life.load(f"{root}/{phase}")
    return life.run(phase, None)


def _live_on(root: str, stage: int) -> None:
    saved = torch.load(f"{root}/expected-0")
    for phase in range(5):
        resumed = _resume(root, phase, stage)
        for later, found in resumed.items():
            if later == phase:
                assert_equal(saved[later], found, phase)
            else:
                assert_weights_close(saved[later], found, 1e-6, (phase, later))
                assert [k for k in saved[later] if k.startswith("state")] == [
                    k for k in found if k.startswith("state")
                ]


def test_life_of_the_optimizer_state(pool: RankPool, tmp_path: Path) -> None:
    """Case H3, with 28 and 29 inside."""
    pool.run(_live, 2, str(tmp_path))
    for world_size, stage in ((1, 3), (3, 1), (4, 3)):
        pool.run(_live_on, world_size, str(tmp_path), stage)


def _fewer_groups(root: str) -> None:
    life = Life(3, seed=9)
    before = snapshot(life.model, life.optimizer)
    with pytest.raises(Exception, match="at most 3 parameter groups") as error:
        life.load(f"{root}/4")
    assert type(error.value).__name__ == "CheckpointError"
    assert_equal(before, snapshot(life.model, life.optimizer))


def test_fewer_groups_than_saved_are_refused_before_anything_changes(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(_live, 2, str(tmp_path))
    pool.run(_fewer_groups, 2, str(tmp_path))


def _saving_changes_nothing(root: str) -> None:
    """Case 29, and a save in the middle of a window."""
    for stage in (1, 2, 3):
        ends = []
        for saves in (False, True):
            run = make_run("dropout", stage)
            if saves:
                run.engine.save(f"{root}/{stage}-0", optimizers=[run.optimizer])
                assert run.optimizer.state == {}
            _train_in_windows(run, f"{root}/{stage}-mid" if saves else None)
            ends.append(snapshot(run.model, run.optimizer))
            steps = {float(value) for key, value in ends[-1].items() if key.endswith(" step")}
            assert steps == {3.0}
        assert_equal(*ends)
        again = make_run("dropout", stage, seed=40)
        again.engine.load(f"{root}/{stage}-0", optimizers=[again.optimizer])
        assert again.optimizer.state == {}
        _train_in_windows(again, None)
        assert_equal(ends[0], snapshot(again.model, again.optimizer))


def _train_in_windows(run: Run, path: str | None) -> None:
    for step in range(3):
        for micro in range(3):
            with run.engine.micro_step(last=micro == 2):
                batch = tokens(step, micro, dist.get_rank())
                (lm_loss(run.model(batch), batch) / 3).backward()
            if path is not None and step == 1 and micro == 1:
                run.engine.save(path, optimizers=[run.optimizer])
        run.optimizer.step()
        run.optimizer.zero_grad()


def test_saving_changes_nothing(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_saving_changes_nothing, 2, str(tmp_path))


def _loads_twice(root: str) -> None:
    """Loading rolls a run back, whatever it did since; state made since goes."""
    run = make_run("groups", 3)
    run.engine.save(f"{root}/start", optimizers=[run.optimizer])
    train(run, range(2))
    middle = snapshot(run.model, run.optimizer)
    run.engine.save(f"{root}/middle", optimizers=[run.optimizer])
    train(run, range(2, 4))
    end = snapshot(run.model, run.optimizer)
    run.engine.load(f"{root}/middle", optimizers=[run.optimizer])
    assert_equal(middle, snapshot(run.model, run.optimizer))
    train(run, range(2, 4))
    assert_equal(end, snapshot(run.model, run.optimizer))
    run.engine.load(f"{root}/start", optimizers=[run.optimizer])
    assert run.optimizer.state == {}
    train(run, range(4))
    assert_equal(end, snapshot(run.model, run.optimizer))


def test_loading_rolls_a_run_back(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_loads_twice, 2, str(tmp_path))
