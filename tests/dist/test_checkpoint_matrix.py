"""Saved at one stage and world size, loaded at any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.dist.checkpoint_runs import (
    Layout,
    assert_equal,
    assert_weights_close,
    make_run,
    snapshot,
    train,
)
from tests.support.pool import RankPool

# What is saved: (kind of model and optimizer, layout). Every stage and world size appears.
SAVED = [
    ("plain", Layout(1, 1)),
    ("plain", Layout(2, 2)),
    ("plain", Layout(3, 3)),
    ("plain", Layout(3, 4)),
    ("tied", Layout(3, 2)),
    ("tied", Layout(1, 3)),
    ("frozen", Layout(2, 4)),
    ("frozen", Layout(3, 1)),
    ("groups", Layout(1, 2)),
    ("groups", Layout(2, 3)),
    ("groups", Layout(3, 4, 2)),
    ("sgd", Layout(2, 2)),
    ("momentum", Layout(1, 4)),
    ("amsgrad", Layout(3, 2)),
    ("dropout", Layout(1, 2)),
    ("dropout", Layout(2, 3)),
    ("dropout", Layout(3, 4)),
]


def layouts_for(kind: str, saved: Layout) -> list[Layout]:
    """The same layout, and every world size at another stage; HSDP where it fits."""
    if kind == "dropout":  # random numbers are drawn per rank, so only the same layout compares
        return [saved]
    others = [Layout((saved.stage + world_size) % 3 + 1, world_size) for world_size in (1, 2, 3, 4)]
    if kind in ("plain", "groups"):
        others.append(Layout(saved.stage % 3 + 1, 4, 2))
    return list(dict.fromkeys([saved, *others]))


def _path(root: Path, kind: str, layout: Layout) -> str:
    return str(root / f"{kind}-{'-'.join(map(str, layout))}")


def _save(jobs: list[tuple[str, Layout, str]]) -> None:
    for kind, layout, path in jobs:
        run = make_run(kind, layout.stage, layout.replicate_size)
        train(run, range(3))
        before = snapshot(run.model, run.optimizer)
        random = torch.get_rng_state()
        run.engine.save(path, optimizers=[run.optimizer], extra={"step": 3, "kind": kind})
        assert_equal(before, snapshot(run.model, run.optimizer), "saving changed the run")
        assert torch.equal(random, torch.get_rng_state()), "saving drew random numbers"
        losses = train(run, range(3, 6))
        after = snapshot(run.model, run.optimizer)
        torch.save((before, after, losses), f"{path}.expected-{dist.get_rank()}")


def _load(jobs: list[tuple[str, Layout, Layout, str]]) -> int:
    compared = 0
    for kind, origin, layout, path in jobs:
        case = (kind, origin, layout)
        rank = dist.get_rank() if layout == origin else 0
        before, after, expected_losses = torch.load(f"{path}.expected-{rank}")
        run = make_run(kind, layout.stage, layout.replicate_size, seed=77)
        extra = run.engine.load(path, optimizers=[run.optimizer])
        assert extra == {"step": 3, "kind": kind}
        assert_equal(before, snapshot(run.model, run.optimizer), case)
        losses = train(run, range(3, 6))
        final = snapshot(run.model, run.optimizer)
        assert_weights_close(after, final, 1e-6, case)
        if layout == origin:
            assert_equal(after, final, case)
            assert losses == expected_losses, case
        compared += 1
    return compared


@pytest.fixture(scope="module")
def saved(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every checkpoint of SAVED, and what the uninterrupted runs came to."""
    root = tmp_path_factory.mktemp("matrix")
    for world_size in (1, 2, 3, 4):
        jobs = [(k, o, _path(root, k, o)) for k, o in SAVED if o.world_size == world_size]
        pool.run(_save, world_size, jobs)
    return root


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_stage_and_world_size_loads_every_other(
    pool: RankPool, saved: Path, world_size: int
) -> None:
    jobs = [
        (kind, origin, layout, _path(saved, kind, origin))
        for kind, origin in SAVED
        for layout in layouts_for(kind, origin)
        if layout.world_size == world_size
    ]
    assert len(jobs) >= 9
    assert pool.run(_load, world_size, jobs) == [len(jobs)] * world_size


def _moments_are_fp32(path: str) -> None:
    run = make_run("plain", 3, param_dtype=torch.bfloat16)
    train(run, range(3))
    saved = snapshot(run.model, run.optimizer)
    for key, value in saved.items():
        if key.startswith("weight") or key.endswith(("exp_avg", "exp_avg_sq", "step")):
            assert value.dtype == torch.float32, key
    assert any(
        not torch.equal(value, value.bfloat16().float())
        for key, value in saved.items()
        if key.startswith("weight")
    ), "the master weights have no more than bf16"
    run.engine.save(path, optimizers=[run.optimizer])
    losses = train(run, range(3, 6))
    expected = snapshot(run.model, run.optimizer)
    again = make_run("plain", 3, seed=31, param_dtype=torch.bfloat16)
    again.engine.load(path, optimizers=[again.optimizer])
    assert_equal(saved, snapshot(again.model, again.optimizer))
    assert train(again, range(3, 6)) == losses
    assert_equal(expected, snapshot(again.model, again.optimizer))
    if dist.get_rank() == 0:
        from torch.distributed.checkpoint import FileSystemReader

        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        assert len(stored) > 40
        assert {entry.properties.dtype for entry in stored.values()} == {torch.float32}


def test_bf16_compute_keeps_fp32_masters_and_moments_in_the_checkpoint(
    pool: RankPool, tmp_path: Path
) -> None:
    """Case 12."""
    pool.run(_moments_are_fp32, 2, str(tmp_path / "bf16"))
