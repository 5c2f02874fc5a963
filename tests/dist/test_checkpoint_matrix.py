"""Saved at one stage, world size and HSDP shape, loaded at any other.

A sample of the pairs runs by default, all of them with `pytest -m matrix`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.support.pool
from tests.dist.checkpoint_runs import (
    Layout,
    assert_holds,
    make_run,
    snapshot,
    train,
)
from tests.support.pool import RankPool

Pair = tuple[Layout, Layout]

LAYOUTS = [Layout(stage, world_size) for world_size in (1, 2, 3, 4) for stage in (1, 2, 3)]
HSDP = [Layout(3, 4, 2), Layout(1, 4, 2), Layout(2, 4, 4)]
WIDE = [Layout(world_size % 3 + 1, world_size) for world_size in (5, 6, 7, 8)]

EVERY_PAIR = [(saved, loaded) for saved in LAYOUTS for loaded in LAYOUTS]
SAMPLE = [pair for index, pair in enumerate(EVERY_PAIR) if (index + index // 12) % 5 == 0]
WITH_REPLICAS: list[Pair] = [
    (Layout(3, 4, 2), Layout(3, 4, 2)),
    (Layout(3, 4, 2), Layout(2, 4)),  # 2 replicas -> 1
    (Layout(2, 4), Layout(3, 4, 2)),  # 1 -> 2
    (Layout(3, 4, 2), Layout(1, 3)),
    (Layout(1, 1), Layout(3, 4, 2)),
]
EVERY_PAIR_WITH_REPLICAS: list[Pair] = [
    pair
    for replicated in HSDP
    for other in [*LAYOUTS, *HSDP]
    for pair in [(replicated, other), (other, replicated)]
]
WIDE_PAIRS: list[Pair] = [
    pair
    for wide in WIDE
    for other in [Layout(1, 1), Layout(2, 3), Layout(3, 4), *WIDE]
    for pair in [(wide, other), (other, wide)]
]


def test_the_sample_has_every_stage_world_size_and_direction() -> None:
    assert len(EVERY_PAIR) == 144 and len(SAMPLE) == 29
    assert {loaded for _, loaded in SAMPLE} == {saved for saved, _ in SAMPLE} == set(LAYOUTS)
    assert len({(a.stage, b.stage) for a, b in SAMPLE}) == 9
    assert len({(a.world_size, b.world_size) for a, b in SAMPLE}) == 16


def _path(root: str, layout: Layout) -> str:
    return f"{root}/{'-'.join(map(str, layout))}"


def _save(root: str, layouts: list[Layout]) -> None:
    for layout in layouts:
        path = _path(root, layout)
        run = make_run("odd", layout.stage, layout.replicate_size)
        train(run, range(3))
        before = snapshot(run.model, run.optimizer)
        random = torch.get_rng_state()
        run.engine.save(path, optimizers=[run.optimizer], extra={"step": 3})
        assert_holds(before, run.model, run.optimizer, where="saving changed the run")
        assert torch.equal(random, torch.get_rng_state()), "saving drew random numbers"
        losses = train(run, range(3, 6))
        after = snapshot(run.model, run.optimizer)
        torch.save((before, after, losses), f"{path}.expected-{dist.get_rank()}")


def _load(root: str, pairs: list[Pair]) -> int:
    for saved, layout in pairs:
        path, rank = _path(root, saved), dist.get_rank() if layout == saved else 0
        before, after, losses = torch.load(f"{path}.expected-{rank}")
        run = make_run("odd", layout.stage, layout.replicate_size, seed=77)
        assert run.engine.load(path, optimizers=[run.optimizer]) == {"step": 3}
        assert_holds(before, run.model, run.optimizer, where=(saved, layout))
        found = train(run, range(3, 6))
        same = layout == saved
        assert not same or found == losses, layout
        assert_holds(
            after, run.model, run.optimizer, close=None if same else 1e-6, where=(saved, layout)
        )
    return len(pairs)


def run_pairs(pool: RankPool, root: Path, pairs: list[Pair]) -> int:
    """Save at every layout that the pairs have on the left, load at those on the right."""
    savers: dict[int, list[Layout]] = defaultdict(list)
    loaders: dict[int, list[Pair]] = defaultdict(list)
    for saved, loaded in dict.fromkeys(pairs):
        if saved not in savers[saved.world_size]:
            savers[saved.world_size].append(saved)
        loaders[loaded.world_size].append((saved, loaded))
    for world_size, layouts in savers.items():
        pool.run(_save, world_size, str(root), layouts, timeout=600.0)
    return sum(
        pool.run(_load, world_size, str(root), chosen, timeout=600.0)[0]
        for world_size, chosen in loaders.items()
    )


def test_every_stage_and_world_size_loads_every_other(pool: RankPool, tmp_path: Path) -> None:
    """Cases 25 and 27, on a sample."""
    assert run_pairs(pool, tmp_path, SAMPLE) == 29


def test_replicas_come_and_go(pool: RankPool, tmp_path: Path) -> None:
    assert run_pairs(pool, tmp_path, WITH_REPLICAS) == 5


@pytest.fixture
def wide_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    """Up to eight ranks of their own, gone after the test."""
    monkeypatch.setattr(tests.support.pool, "MAX_RANKS", 8)
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("pairs", "count"),
    [(EVERY_PAIR, 144), (EVERY_PAIR_WITH_REPLICAS, 81), (WIDE_PAIRS, 40)],
    ids=["stages and world sizes", "replicas", "5 to 8 ranks"],
)
def test_the_whole_matrix(
    wide_pool: RankPool, tmp_path: Path, pairs: list[Pair], count: int
) -> None:
    assert run_pairs(wide_pool, tmp_path, pairs) == count
