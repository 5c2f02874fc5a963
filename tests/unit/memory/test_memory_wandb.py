"""What a W&B run holds in the end, read out of its own file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardplug.memory import (
    KINDS,
    PHASES,
    PLAN_KINDS,
    Finding,
    MemoryTimeline,
    Moved,
    Point,
    RunPlan,
    WandbSink,
)
from shardplug.plan.run.run_plan import predicted_phases
from shardplug.tracking import wandb_sink
from tests.unit.memory.fakes import make_rows
from tests.unit.memory.wandb_file import read_history, read_records

wandb = pytest.importorskip("wandb")

GIB = 2**30


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="memory", dir=tmp_path)
    yield run
    run.finish()


def _assert_all_rows(folder: Path, steps: list[int], num_ranks: int = 2) -> list[dict[str, Any]]:
    """Every kind of every rank at every step is in the file, with the right value."""
    history = read_history(folder)
    found = {row["memory/step"]: row for row in history if "memory/step" in row}
    assert sorted(found) == steps
    num_compared = 0
    for step in steps:
        for row in make_rows(step, num_ranks):
            for kind, value in {**row.by_kind, "total": row.total_bytes}.items():
                name = f"memory_rank{row.rank}/{row.phase}/{kind}_gib"
                assert found[step][name] == pytest.approx(value / GIB), (step, name)
                num_compared += 1
    assert num_compared == len(steps) * num_ranks * len(PHASES) * (len(KINDS) + 1) > 0
    return history


def test_every_kind_rank_and_step_is_logged(run: Any, tmp_path: Path) -> None:
    sink = WandbSink(run, host_passes_step=False)
    for step in (1, 2, 3):
        sink.write(make_rows(step))
    sink.close()
    run.finish()
    history = _assert_all_rows(tmp_path, [1, 2, 3])
    top = make_rows(3)[-1]
    assert history[-1]["memory/peak_gib"] == pytest.approx(top.peak_bytes / GIB)
    assert history[-1]["memory_rank1/peak_gib"] == pytest.approx(top.peak_bytes / GIB)
    assert history[-1]["memory/after_step/gathered_gib"] == pytest.approx(top.gathered_bytes / GIB)


def test_x_axis_is_our_own_beside_a_host_with_a_pattern(run: Any, tmp_path: Path) -> None:
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)  # as Lightning
    sink = WandbSink(run, host_passes_step=False)
    for step in (1, 2):
        run.log({"loss": 1.0, "trainer/global_step": step})
        sink.write(make_rows(step))
    run.finish()
    history = _assert_all_rows(tmp_path, [1, 2])
    assert not any("memory/step" in row and "trainer/global_step" in row for row in history)
    axes = {
        record.metric.name: record.metric.step_metric
        for record in read_records(tmp_path)
        if record.WhichOneof("record_type") == "metric" and record.metric.name.startswith("memory")
    }
    assert axes.pop("memory/step") == ""
    assert len(axes) == 22 * 3 and set(axes.values()) == {"memory/step"}


def test_predicted_stands_beside_measured_and_alerts_are_sent(run: Any, tmp_path: Path) -> None:
    held = {**dict.fromkeys(PLAN_KINDS, 0), "gradients": 5 * GIB, "activations": 2 * GIB}
    phases = dict.fromkeys(("after_forward", "after_backward", "after_step"), held)
    timeline = MemoryTimeline((Point("backward", "block", 0, held),), phases, Moved(0, 0, 0))
    sink = WandbSink(run, host_passes_step=False)
    sink.expect(RunPlan(walks=(timeline,)))
    sink.write([replace(row, tokens_per_second=100.0, mfu=0.5) for row in make_rows(1)])
    sink.alert(Finding("books", "Memory exceeds its plan", "gradients of rank 0"))
    sink.close()
    run.finish()
    (row,) = [row for row in read_history(tmp_path) if "memory/step" in row]
    assert row["memory/after_step/gradients_gib_predicted"] == 5.0
    assert row["memory/after_step/other_gib_predicted"] == 2.0
    assert row["memory_rank1/after_forward/total_gib_predicted"] == 7.0
    assert row["memory/peak_gib_predicted"] == 7.0
    assert (row["throughput/tokens_per_second"], row["throughput/mfu"]) == (100.0, 0.5)
    measured = {name.removesuffix("_predicted") for name in row if name.endswith("_predicted")}
    assert measured < set(row), "each predicted metric follows a measured one"
    records = read_records(tmp_path)
    alerts = [r.alert for r in records if r.WhichOneof("record_type") == "alert"]
    assert [(a.title, a.text) for a in alerts] == [
        ("Memory exceeds its plan", "gradients of rank 0")
    ]
    keys = [
        u.key for r in records if r.WhichOneof("record_type") == "config" for u in r.config.update
    ]
    assert "shardplug_plan" in keys


def test_the_plan_of_a_row_is_worked_out_once_and_anew_for_a_better_plan(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[MemoryTimeline] = []

    def phases_of(timeline: MemoryTimeline) -> dict[str, dict[str, int]]:
        asked.append(timeline)
        return predicted_phases(timeline)

    monkeypatch.setattr(wandb_sink, "predicted_phases", phases_of)
    sink = WandbSink(run, host_passes_step=False)
    for gib in (1, 2):
        held = {**dict.fromkeys(PLAN_KINDS, 0), "gradients": gib * GIB}
        phases = dict.fromkeys(("after_forward", "after_backward", "after_step"), held)
        sink.expect(
            RunPlan(walks=(MemoryTimeline((Point("step", "", 0, held),), phases, Moved(0, 0, 0)),))
        )
        for step in range(3):
            sink.write(make_rows(3 * gib + step))
    sink.close()
    run.finish()
    assert len(asked) == 2 * 2 * len(PHASES)  # plans, ranks and phases, whatever the steps
    rows = [row for row in read_history(tmp_path) if "memory/step" in row]
    assert [r["memory/after_step/gradients_gib_predicted"] for r in rows] == [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("first", [0, 1])
def test_host_that_passes_its_step_loses_nothing(run: Any, tmp_path: Path, first: int) -> None:
    sink = WandbSink(run)
    for step in range(5):
        sink.write(make_rows(step + 1))
        run.log({"loss": float(step)}, step=first + step)
    sink.close()
    run.finish()
    history = _assert_all_rows(tmp_path, [1, 2, 3, 4, 5])
    assert [row["loss"] for row in history if "loss" in row] == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("host_passes_step", [True, False])
def test_no_row_is_lost_when_the_run_is_ahead_or_goes_back(
    run: Any, tmp_path: Path, host_passes_step: bool
) -> None:
    sink = WandbSink(run, host_passes_step=host_passes_step)
    run.log({"loss": 1.0}, step=1000)  # ahead of ours
    sink.write(make_rows(1))
    run.log({"loss": 2.0}, step=12)  # behind after a resume: W&B drops the host's own row
    sink.write(make_rows(2))
    run.log({"loss": 3.0}, step=1001)
    sink.write(make_rows(3))
    sink.close()
    run.finish()
    _assert_all_rows(tmp_path, [1, 2, 3])


def test_host_that_logs_seldom_gets_the_rest_at_the_end(run: Any, tmp_path: Path) -> None:
    sink = WandbSink(run)
    for step in range(1, 11):
        sink.write(make_rows(step))
        if step % 5 == 0:
            run.log({"loss": float(step)}, step=step)
    sink.close()
    sink.close()
    run.finish()
    history = _assert_all_rows(tmp_path, list(range(1, 11)))
    assert [row["loss"] for row in history if "loss" in row] == [5.0, 10.0]


def test_disabled_run_is_no_error(tmp_path: Path) -> None:
    run = wandb.init(mode="disabled", dir=tmp_path)
    for host_passes_step in (True, False):
        sink = WandbSink(run, host_passes_step=host_passes_step)
        for step in (1, 2):
            sink.write(make_rows(step))
        sink.close()
    run.finish()
