"""State outside the device in the memory curve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardplug.memory import TIER_KINDS, JsonlSink, MemoryTracker, WandbSink, draw_png, read_jsonl
from tests.unit.memory.fakes import FakeEngine, ListSink, make_rows

TIERS = {
    "activations_cpu": 0,
    "master_shards_cpu": 0,
    "master_shards_nvme": 3000,
    "compute_copies_nvme": 1500,
    "gradients_cpu": 0,
    "gradients_nvme": 2000,
    "optimizer_state_cpu": 500,
    "optimizer_state_nvme": 7000,
    "staging": 64,
}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_tracker_records_tiers_and_counts_those_in_memory() -> None:
    engine, sink = FakeEngine(), ListSink()
    engine.states |= TIERS
    tracker = MemoryTracker(engine, [sink])
    engine.step()
    tracker.close()
    for row in sink.steps[0]:
        assert row.by_tier == TIERS and tuple(row.by_tier) == TIER_KINDS
        assert row.tiers_measured_bytes == 564  # on a CPU rank all but the files
        assert row.total_bytes == sum(row.by_kind.values()) + 564
        assert tracker.total_bytes >= row.total_bytes


def test_rows_survive_the_file(tmp_path: Path) -> None:
    plain = make_rows(1)
    tiered = [
        replace(row, **{f"{kind}_bytes": n for kind, n in TIERS.items()}, tiers_measured_bytes=564)
        for row in make_rows(2)
    ]
    sink = JsonlSink(tmp_path / "rows.jsonl")
    sink.write(plain)
    sink.write(tiered)
    sink.close()
    assert read_jsonl(tmp_path / "rows.jsonl") == [*plain, *tiered]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert "staging" not in lines[0] and "staging" in lines[-1]
    draw_png([*plain, *tiered], tmp_path / "rows.png")
    assert (tmp_path / "rows.png").stat().st_size > 10_000


def test_wandb_gets_tiers_only_where_there_are_some() -> None:
    class Run:
        step = 0
        logged: dict[str, Any] = {}

        def define_metric(self, *_: Any, **__: Any) -> None: ...

        def log(self, data: dict[str, Any], **_: Any) -> None:
            self.logged = data

    run = Run()
    sink = WandbSink(run, host_passes_step=False)
    sink.write(make_rows(1))
    assert not any("nvme" in name for name in run.logged)
    sink.write([replace(row, optimizer_state_nvme_bytes=2**30) for row in make_rows(2)])
    assert run.logged["memory/after_step/optimizer_state_nvme_gib"] == 1.0
