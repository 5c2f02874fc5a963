"""A run that was killed goes on as if it had not been: losses, samples and masks to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.exact_runs import ACCUMULATE, BATCHES, EPOCHS, RANKS, SAVE_EVERY, kills

ROOT = Path(__file__).parents[2]
TOTAL = EPOCHS * BATCHES

pytestmark = pytest.mark.timeout(700)  # the runs are made in a fixture


MORE = [pytest.param(seed, marks=[pytest.mark.matrix, pytest.mark.slow]) for seed in range(1, 5)]


@pytest.fixture(scope="module", params=[5, *MORE])
def seed(request: pytest.FixtureRequest) -> int:
    """What the moments of the kills are drawn from."""
    return int(request.param)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    """All the runs, made in one process that forks the ranks."""
    home = tmp_path_factory.mktemp("exact")
    hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    with (home / "output").open("w") as output:
        code = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "tests.dist.exact_runs", str(home), str(seed)],
            cwd=ROOT,
            env=env | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=600,
        ).returncode
    assert code == 0, (home / "output").read_text()[-6000:]
    return home


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("framework", ["plain", "accelerate", "lightning"])
def test_a_killed_run_goes_on_to_the_bit(home: Path, seed: int, framework: str) -> None:
    """Dropout, a shuffling loader with workers, warm-up, an average, windows (case 44)."""
    root, window = home / framework, ACCUMULATE[framework]
    for rank in range(RANKS):
        straight = lines(root / f"straight-{rank}.jsonl")
        assert [line["micro"] for line in straight] == list(range(TOTAL))
        attempts = [lines(root / f"{attempt}-{rank}.jsonl") for attempt in range(3)]
        for attempt, kill_at in zip(attempts, [*kills(framework, seed), TOTAL - 1], strict=True):
            first = attempt[0]["micro"]
            assert attempt[-1]["micro"] == kill_at
            assert attempt == straight[first : kill_at + 1]
        for before, after in pairwise(attempts):
            died, resumed = before[-1]["micro"], after[0]["micro"]
            assert (died % BATCHES + 1) % window, "the kill was to be in the middle of a window"
            assert 0 < resumed <= died, "something was to be lost, but not everything"
            steps = resumed // BATCHES * -(-BATCHES // window) + resumed % BATCHES // window
            assert steps % SAVE_EVERY[framework] == 0  # it goes on right behind a save
            assert died - resumed < (SAVE_EVERY[framework] + 1) * window  # behind the last one
        ends = [torch.load(root / f"{attempt}-{rank}.pt") for attempt in ("straight", 2)]
        assert ends[0]["rate"] == ends[1]["rate"] != [1e-2]
        assert len(ends[0]["tensors"]) >= 14
        for name, tensor in ends[0]["tensors"].items():
            assert torch.equal(tensor, ends[1]["tensors"][name]), name


@pytest.mark.parametrize("framework", ["plain", "accelerate", "lightning"])
def test_every_sample_is_seen_once_and_masks_differ_between_ranks(
    home: Path, framework: str
) -> None:
    ranks = [lines(home / framework / f"straight-{rank}.jsonl") for rank in range(RANKS)]
    orders = []
    for epoch in range(EPOCHS):
        part = slice(epoch * BATCHES, (epoch + 1) * BATCHES)
        orders.append([i for lines_ in ranks for line in lines_[part] for i in line["ids"]])
        assert sorted(orders[-1]) == list(range(RANKS * BATCHES * 2))
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
    masks = [[line["mask"] for line in lines_] for lines_ in ranks]
    assert all(len(mask) == 2 * 11 for mask in masks[0])
    dropped = sum(map(sum, masks[0])) / (TOTAL * 2 * 11)
    assert 0.05 < dropped < 0.2
    assert sum(a != b for a, b in zip(*masks, strict=True)) > TOTAL * 0.8
