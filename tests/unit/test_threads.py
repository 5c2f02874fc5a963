"""Case 83: ranks that have one core of many, or all the same ones, say so."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardplug.core.ranks.threads import Cores, complaint, local_place, warn_of_cores

ROOT = Path(__file__).resolve().parents[2]
SLURM = {"SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "8(x2)"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("cores", "text"),
    [
        ((64, 1, 1, 8), "1 of 64 cores, with 8 ranks.*--cpus-per-task=8.*OMP_NUM_THREADS=8"),
        ((64, 8, 1, 8), "1 thread on this rank, which may have 8 cores.*OMP_NUM_THREADS=8"),
        ((64, 64, 1, 8), "which may have 8 cores"),
        ((64, 64, 1, 1), "which may have 64 cores"),
        ((64, 64, 64, 8), "Each of 8 ranks .* 64 threads, on the same 64 cores.*OMP_NUM_THREADS=8"),
        ((64, 64, 8, 8), None),
        ((64, 8, 8, 8), None),
        ((64, 16, 16, 4), None),
        ((64, 64, 64, 1), None),
        ((2, 2, 1, 2), None),  # nothing to gain
        ((2, 1, 1, 2), None),
        ((2, 2, 2, 2), "OMP_NUM_THREADS=1"),
        ((1, 1, 1, 4), None),
    ],
)
def test_complaints(cores: tuple[int, int, int, int], text: str | None) -> None:
    found = complaint(Cores(*cores))
    if text is None:
        assert found is None
    else:
        assert found is not None
        with pytest.raises(AssertionError, match=text):
            raise AssertionError(found)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),  # somebody's own start
        (TORCHRUN, (0, 8)),
        (SLURM, (0, 8)),
        (SLURM | {"SLURM_TASKS_PER_NODE": "4,8(x3)", "SLURM_LOCALID": "3"}, (3, 8)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2"}, (0, 2)),
        (SLURM | {"LOCAL_RANK": "0"}, None),  # Lightning's own start in a shell
        (SLURM | TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, (0, 4)),
    ],
)
def test_the_launcher_says_who_shares_the_machine(
    environment: dict[str, str], place: tuple[int, int] | None
) -> None:
    assert local_place(environment) == place


def test_one_rank_of_a_machine_warns() -> None:
    with (
        mock.patch.object(os, "cpu_count", return_value=64),
        mock.patch.object(os, "sched_getaffinity", return_value={5}, create=True),
        mock.patch.object(torch, "get_num_threads", return_value=1),
    ):
        with pytest.warns(UserWarning, match="1 of 64 cores, with 8 ranks"):
            warn_of_cores(SLURM)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_cores(SLURM | {"SLURM_LOCALID": "1"})
            warn_of_cores({})


TRAIN = """
import os
os.cpu_count = lambda: 64
os.sched_getaffinity = lambda _: {0}
import torch
import torch.distributed as dist
from shardplug import ZeroConfig, ZeroEngine
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
engine = ZeroEngine(ZeroConfig(offload_optimizer="cpu"))
"""


def test_the_engine_warns_with_state_in_cpu_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRAIN],
        env={**os.environ, **SLURM, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "UserWarning: This rank may run on 1 of 64 cores" in done.stderr
