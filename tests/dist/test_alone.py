"""What rank 0 does alone ends with an error that says so, as soon as the others go on or go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ScheduleError
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool

ROOT = Path(__file__).resolve().parents[2]


def _forward_alone() -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(TinyLM())
    batch = tokens(0, 0, engine.rank)
    lm_loss(model(batch), batch).backward()
    engine.after_backward()
    with raises_everywhere(ScheduleError, "rank 0 gathers", "belongs on every rank"):
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(batch)
        lm_loss(model(batch), batch).backward()
        engine.after_backward()


def test_a_forward_on_rank_0_while_the_others_train(pool: RankPool) -> None:
    pool.run(_forward_alone, 2)


SAVE = """
import sys
import torch.distributed as dist
from shardplug import ZeroConfig, ZeroEngine
from tests.support.models import TinyLM
dist.init_process_group("gloo")
engine = ZeroEngine(ZeroConfig(stage=3))
engine.shard(TinyLM())
if dist.get_rank() == 0:
    engine.save(sys.argv[1])
"""


@pytest.mark.timeout(150)
def test_a_save_on_rank_0_when_the_others_have_ended(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(SAVE)
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*launch, str(script), str(tmp_path / "checkpoint")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "Saving failed. Another rank is gone" in done.stderr, done.stderr[-3000:]
    assert "Make this call on every rank: rank 0 alone waits for the others" in done.stderr
