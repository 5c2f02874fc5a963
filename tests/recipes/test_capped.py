"""A model trained from files under a limit of the system, against the same in memory."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Processes

RECIPE = Path(__file__).parents[2] / "recipes" / "train_capped.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def start(processes: Processes, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return processes.start(
        [sys.executable, str(RECIPE), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=folder,  # a report of the failure is written there
    )


def test_losses_are_those_of_a_run_in_memory(tmp_path: Path) -> None:
    found = {}
    asked = {
        "memory": ("--in-memory",),
        "files": ("--nvme-path", str(tmp_path), "--memory-gib", "2"),
    }
    with Processes() as processes:
        started = {}  # one process each, side by side
        for name, arguments in asked.items():
            report = ("--report", str(tmp_path / f"{name}.json"))
            started[name] = start(processes, tmp_path, *arguments, "--steps", "3", *report)
        for name, process in started.items():
            _, errors = process.communicate(timeout=250)
            assert process.returncode == 0, errors
            found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    losses = {name: [row["loss"] for row in report["steps"]] for name, report in found.items()}
    assert len(losses["files"]) == 3 and losses["files"] == losses["memory"]
    # At rest no parameter is in memory; the swap folder is gone.
    held = found["files"]["held"]
    assert held["master_shards_nvme"] >= 4 * found["files"]["parameters"]
    assert "master_shards" not in held and "gradients" not in held
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".json"]


def test_the_limit_is_one(tmp_path: Path) -> None:
    with Processes() as processes:
        limited = ("--size", "100m", "--memory-gib", "1.1")
        small = start(processes, tmp_path, "--in-memory", *limited)
        nowhere = start(processes, tmp_path, "--steps", "1")
        _, errors = small.communicate(timeout=250)
        assert small.returncode != 0
        assert (tmp_path / "out_of_memory.txt").stat().st_size > 500
        assert re.search(r"MemoryError|can't allocate memory|bad_alloc|Cannot allocate", errors)
        _, errors = nowhere.communicate(timeout=250)
        assert nowhere.returncode == 2 and "Expected --nvme-path or --in-memory" in errors
