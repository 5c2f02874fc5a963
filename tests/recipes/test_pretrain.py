"""Pretraining: the printed launch line, HSDP, going on after a kill, and the SLURM script."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from shardplug.checkpoint import inspect
from tests.recipes.test_recipes import ROOT, environment
from tests.support.pool import RankPool

RECIPE = ROOT / "recipes" / "pretrain_llama.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def printed(recipe: Path) -> list[str]:
    """The launch line of a recipe's docstring, on the interpreter that runs the tests."""
    line = re.findall(r"^ {4}torchrun .*$", recipe.read_text(), re.M)[0]
    return [sys.executable, "-m", "torch.distributed.run", *shlex.split(line, comments=True)[1:]]


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return {row["step"]: row["loss"] for row in rows}


def in_resident_ranks(ranks_of_a_node: int, options: dict[str, Any]) -> tuple[list[str], str]:
    """Run the recipe where a process group is up; return the warnings, and its error."""
    sys.path.insert(0, str(ROOT / "recipes"))
    recipe = importlib.import_module("pretrain_llama")
    with (
        mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks_of_a_node)}),
        mock.patch.object(recipe, "start"),
        mock.patch.object(dist, "destroy_process_group"),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        try:
            recipe.main(recipe.Options(**options))
        except recipe.RecipeError as error:
            return [], str(error)
    return [str(warning.message) for warning in caught], ""


def test_pretraining_as_printed_and_over_nodes_and_after_a_kill(
    tmp_path: Path, pool: RankPool
) -> None:
    out = tmp_path / "launched"
    done = subprocess.run(
        [*printed(RECIPE), "--out", str(out)],
        # torch 2.11 else takes one port for every torchrun of a machine.
        env=environment() | {"PET_STANDALONE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ZeRO stage 3: 1 replicas over 2 ranks each, 2 micro-batches a step" in done.stdout
    expected = losses(out)
    assert len(expected) == 20 and expected[20] < expected[1] - 0.5
    newest = out / "checkpoints" / "step-0000020"
    assert (inspect(newest).step, inspect(newest).world_size) == (20, 2)
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-0000010", newest.name]
    assert (out / "memory.jsonl").stat().st_size > 0

    # HSDP: two nodes of one rank each, as the environment says.
    hybrid = {"out": str(tmp_path / "hybrid"), "steps": 20, "save_every": 20}
    pool.run(in_resident_ranks, 2, 1, hybrid)
    assert losses(tmp_path / "hybrid") == pytest.approx(expected, rel=1e-5)

    # Killed while it saved the last step, and started again on one rank.
    (newest / "manifest.json").unlink()
    ((told, error),) = pool.run(in_resident_ranks, 1, 1, {"out": str(out)})
    assert not error and any("step-0000020" in text for text in told)
    assert losses(out) == pytest.approx(expected, rel=1e-5)

    # What would give other rows is refused, on every rank.
    for _, error in pool.run(in_resident_ranks, 2, 2, {"out": str(out), "seq_length": 32}):
        assert "Expected the options of the run" in error
    for _, error in pool.run(in_resident_ranks, 2, 2, {"global_batch": 6}):
        assert "Expected --global_batch to be a multiple of 2 ranks" in error
    assert losses(out) == pytest.approx(expected, rel=1e-5)


def test_every_row_comes_once_an_epoch() -> None:
    import numpy as np
    import pretrain_llama as recipe

    tokens = np.arange(64 * 24 + 1, dtype=np.uint32)
    options = recipe.Options(global_batch=8, seed=3)

    def begins_of(step: int, ranks: int) -> set[int]:
        windows = [recipe.window(tokens, options, step, rank, ranks) for rank in range(ranks)]
        return {int(row[0]) for window in windows for rows in window for row in rows}

    begins = {ranks: [begins_of(step, ranks) for step in range(3)] for ranks in (1, 2, 4)}
    assert begins[1] == begins[2] == begins[4]
    assert set().union(*begins[1]) == {64 * row for row in range(24)}


def job_of_two_nodes(script: Path, stand_ins: Path, *arguments: str) -> list[str]:
    """Run a SLURM script with stand-ins for SLURM's commands; return the words that srun got."""
    bodies = {
        # More than a pipe holds: who closes it after one line ends this with SIGPIPE.
        "scontrol": 'printf "node%05d\\n" {7..30007}',
        "srun": 'printf "%s\\n" "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" "$OMP_NUM_THREADS" '
        '"$SRUN_CPUS_PER_TASK" "$@"',
    }
    for name, body in bodies.items():
        path = stand_ins / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    job = {
        "SLURM_JOB_NODELIST": "node[00007-30007]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "41",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
    }
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-e", str(script), *arguments],
        env={**job, "PATH": f"{stand_ins}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_slurm_script_on_the_page_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    page = (ROOT / "docs/guides/several-nodes.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (script,) = (block for block in blocks if "srun torchrun" in block)
    (tmp_path / "job").write_text(script)
    _, threads, cpus, torchrun, *arguments = job_of_two_nodes(tmp_path / "job", tmp_path)
    assert (torchrun, threads, cpus) == ("torchrun", "8", "64")
    launch = get_args_parser().parse_args(arguments)
    assert (launch.nnodes, launch.nproc_per_node, launch.training_script) == ("2", "8", "train.py")
    assert launch.rdzv_endpoint == "node00007:29500" and launch.rdzv_id == "41"


def test_the_slurm_script_starts_torchrun_on_every_node(tmp_path: Path) -> None:
    """What srun is given is a launch line that parses."""
    script = ROOT / "recipes/slurm/pretrain_llama.sbatch"
    own_store, threads, cpus, *words = job_of_two_nodes(script, tmp_path, "--steps", "7")
    assert (own_store, threads) == ("1", "8")  # without the first torch 2.13 fails to restart
    assert cpus == "64"  # srun takes them from the script's first lines no more
    kill, torchrun, *arguments = words
    assert (kill, torchrun) == ("--kill-on-bad-exit=1", "torchrun")
    launch = get_args_parser().parse_args(arguments)
    assert (launch.nnodes, launch.nproc_per_node) == ("2", "8")
    assert launch.rdzv_endpoint == "node00007:29500" and launch.rdzv_id == "41"
    assert (ROOT / launch.training_script).samefile(RECIPE)

    import pretrain_llama as recipe
    from jsonargparse import auto_cli

    options = auto_cli(
        recipe.Options, as_positional=False, args=_from(ROOT, launch.training_script_args)
    )
    assert (options.steps, options.precision, options.seq_length) == (7, "bf16", 8192)
    # The run's batch divides by its 4 nodes of 8 GPUs, and by 2.
    assert options.global_batch % (32 * options.micro_batch) == 0
    assert (ROOT / options.model / "config.json").is_file()


def _from(root: Path, arguments: list[str]) -> list[str]:
    return [str(root / a) if a.endswith(".yaml") else a for a in arguments]
