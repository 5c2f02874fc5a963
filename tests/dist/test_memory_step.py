"""What an optimizer's step needs beyond its state, and when that state shows in the curve."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core.precision import Precision
from shardplug.memory import CountedAllocations, JsonlSink, MemoryTracker, read_jsonl
from shardplug.plan.sizes.layout import place
from shardplug.tiers.host import HostTier
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

STEPS = 3
BLOCK = 2**15


def _model() -> nn.Module:
    torch.manual_seed(0)
    return TinyLM(width=96, hidden=192)


def _largest_unit(shards: int) -> int:
    """Bytes of a rank's part of the largest unit."""
    layout = place(_model(), "auto", Precision(None, None)).layout
    assert len(layout.units) == 4
    return max(
        sum(4 * layout.parameters[index].padded(shards) for index in unit.parameters)
        for unit in layout.units
    )


def _step(tier: str, folder: str) -> list[tuple[int, int]]:
    """Train; return for each step what its peak and what its end have beyond its beginning."""
    engine = ZeroEngine(ZeroConfig(stage=3, offload_optimizer=tier))  # type: ignore[arg-type]
    if tier == "cpu":
        engine._offload.optimizer_tier = HostTier(
            block_bytes=BLOCK
        )  # a tenth of all, so that there are many
    model = engine.shard(_model())
    tracker = MemoryTracker(engine, [JsonlSink(Path(folder, "memory.jsonl"))])
    # With a tier the update goes block by block, whatever is asked for; `foreach` alone would
    # make copies of all parameters at once.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=tier != "none")
    optimizer = engine.prepare_optimizer(optimizer)
    found = []
    for step in range(STEPS):
        with engine.micro_step():
            batch = tokens(step, 0, engine.rank)
            lm_loss(model(batch), batch).backward()
        before = sum(engine.memory().values())
        with CountedAllocations() as counted, counted.stretch("step"):
            optimizer.step()
        found.append((counted.peak("step"), sum(engine.memory().values()) - before))
        optimizer.zero_grad()
    tracker.close()
    return found


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_a_step_needs_no_more_than_its_largest_part(
    pool: RankPool, tmp_path: Path, tier: str
) -> None:
    """Case 19: at most 1.1 times what is stepped together, and state is made in the first step."""
    bound = 1.1 * (_largest_unit(2) if tier == "none" else BLOCK)
    for rank in pool.run(_step, 2, tier, str(tmp_path)):
        assert len(rank) == STEPS
        (first, made), *later = rank
        assert made > 0, "the state, in memory of the tier where there is one"
        # The state of two blocks, made before it goes there, comes on top in the first step.
        assert 0 < first - (made if tier == "none" else 4 * BLOCK) <= bound
        for peak, grown in later:
            assert 0 < peak <= bound and grown == 0
    rows = [row for row in read_jsonl(tmp_path / "memory.jsonl") if row.rank == 0]
    state = {
        (row.step, row.phase): row.optimizer_state_bytes + row.optimizer_state_cpu_bytes
        for row in rows
    }
    assert len(state) == 3 * STEPS
    last = state[1, "after_step"]
    assert last > 0 and set(list(state.values())[2:]) == {last}, "all of it in the first step"
    assert state[1, "after_forward"] == state[1, "after_backward"] == 0
