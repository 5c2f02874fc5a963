"""Sharded training equals one process on the whole batch: every stage, 1 to 4 ranks."""

from __future__ import annotations

import itertools

import pytest

from tests.support.pool import RankPool
from tests.support.reference import (
    Trace,
    assert_same_training,
    train_sharded,
    train_whole,
)

GRID = list(itertools.product((1, 2, 3), (1, 3), ("adamw", "sgd")))


def train_grid(tied: bool) -> dict[tuple[int, int, str], Trace]:
    """Run the whole grid on this rank, one engine after the other."""
    return {
        (stage, accumulate, name): train_sharded(stage, accumulate, name, tied=tied)
        for stage, accumulate, name in GRID
    }


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity_with_one_process(pool: RankPool, world_size: int, tied: bool) -> None:
    results = pool.run(train_grid, world_size, tied)
    for (stage, accumulate, name), trace in results[0].items():
        whole = train_whole(world_size, accumulate, name, tied=tied)
        case = f"stage {stage}, W {world_size}, accumulate {accumulate}, {name}"
        assert len(trace.losses) == len(whole.losses) == 10
        assert whole.losses[-1] != whole.losses[0]
        assert_same_training(trace, whole, case)
        for other in results[1:]:
            assert other[stage, accumulate, name].norms == trace.norms, case


def hsdp(stage: int) -> Trace:
    return train_sharded(stage, 3, "adamw", replicate_size=2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_hsdp_parity(pool: RankPool, stage: int) -> None:
    trace = pool.run(hsdp, 4, stage)[0]
    whole = train_whole(4, 3, "adamw")
    assert_same_training(trace, whole, f"HSDP stage {stage}")
