"""A run held against its plan: what is said when it exceeds it, and when it grows."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch

from shardplug.errors import ConfigError
from shardplug.memory import (
    MODEL_STATE_KINDS,
    MemoryRow,
    MemoryTimeline,
    PlanSink,
    draw_comparison,
    plan,
)
from shardplug.plan.run.first_step_planner import plan_line
from shardplug.plan.run.run_plan import OUTPUTS_HELD, RunPlan, _Outputs, predicted_model_states
from tests.support.models import TinyLM


@pytest.fixture(scope="module")
def timeline() -> MemoryTimeline:
    found = plan(
        TinyLM(width=256, hidden=2048),
        devices=2,
        device_memory_gib=4,
        batch=torch.empty(2, 9, dtype=torch.int64, device="meta"),
        stage=3,
        activation_checkpointing=False,
        offload=False,
    )
    return found.choices[0].timeline


def _rows(timeline: MemoryTimeline, step: int, **changes: int) -> list[MemoryRow]:
    """Rows as planned, but for the changes."""
    rows = []
    numbers = {field.name: 0 for field in dataclasses.fields(MemoryRow)}
    for phase, states in predicted_model_states(timeline).items():
        planned = {f"{kind}_bytes": states[kind] for kind in MODEL_STATE_KINDS}
        values = {**numbers, **planned, "peak_bytes": timeline.peak.total, **changes}
        rows.append(MemoryRow(**{**values, "step": step, "phase": phase, "rank": 0}))
    return rows


def _said(sink: PlanSink, steps: list[list[MemoryRow]]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in steps:
            sink.write(rows)
    return [str(warning.message) for warning in caught]


def test_a_run_as_planned_says_nothing(timeline: MemoryTimeline, tmp_path: Path) -> None:
    sink = PlanSink(timeline, tmp_path)
    assert _said(sink, [_rows(timeline, step) for step in range(1, 40)]) == []
    assert (tmp_path / "plan.json").is_file()


def test_a_kind_above_its_plan_is_named_once(timeline: MemoryTimeline, tmp_path: Path) -> None:
    sink = PlanSink(timeline, tmp_path, picture=False)
    steps = [_rows(timeline, step, gradients_bytes=2**30) for step in (1, 2)]
    (message,) = _said(sink, steps)
    assert "gradients of rank 0 after forward of step 1 is 1 GiB" in message


def test_a_peak_above_its_plan_is_named(timeline: MemoryTimeline, tmp_path: Path) -> None:
    steps = [_rows(timeline, 1, peak_bytes=2 * timeline.peak.total)]
    (message,) = _said(PlanSink(timeline, tmp_path, picture=False), steps)
    assert "The peak of rank 0" in message and timeline.peak.phase in message
    assert _said(PlanSink(timeline, tmp_path, compare_peak=False, picture=False), steps) == []


def test_steady_growth_is_a_leak(timeline: MemoryTimeline, tmp_path: Path) -> None:
    sink = PlanSink(timeline, tmp_path, picture=False)
    steps = [_rows(timeline, step, other_bytes=step * 2**20) for step in range(1, 40)]
    (message,) = _said(sink, steps)
    assert "has grown with each of the last 20 logged steps" in message
    assert "most of it other" in message


def test_resident_memory_may_grow_by_some_mib(timeline: MemoryTimeline, tmp_path: Path) -> None:
    """On CPU ranks "other" is what the system counts for the process."""
    for mib, said in ((1, 0), (2, 1)):  # 59 and 118 MiB in all
        sink = PlanSink(timeline, tmp_path, compare_peak=False, picture=False)
        steps = [_rows(timeline, step, other_bytes=step * mib * 2**20) for step in range(1, 60)]
        assert len([text for text in _said(sink, steps) if "has grown" in text]) == said


def test_memory_that_goes_up_and_down_is_no_leak(timeline: MemoryTimeline, tmp_path: Path) -> None:
    steps = [_rows(timeline, step, other_bytes=step % 5 * 2**20) for step in range(1, 60)]
    assert _said(PlanSink(timeline, tmp_path, picture=False), steps) == []


def test_the_picture_has_both(timeline: MemoryTimeline, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sink = PlanSink(timeline, tmp_path)
    sink.write(_rows(timeline, 1))
    sink.close()
    assert (tmp_path / "plan.png").stat().st_size > 20_000
    with pytest.raises(ConfigError, match="got none"):
        draw_comparison([], timeline, tmp_path / "none.png")


def test_a_negative_share_is_refused(timeline: MemoryTimeline, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="alert_share >= 0"):
        PlanSink(timeline, tmp_path, alert_share=-1)


def test_the_line_of_a_plan_says_what_the_loop_is_taken_to_hold(timeline: MemoryTimeline) -> None:
    outputs = _Outputs()
    held = torch.ones(3, requires_grad=True)
    outputs.loss(lambda: {"loss": held.sum(), "logits": held * 2}, ((), {}))  # type: ignore[arg-type]
    assert outputs.notes == [OUTPUTS_HELD] and len(outputs.kept) == 1
    assert plan_line(RunPlan(walks=(timeline,), notes=tuple(outputs.notes))).endswith(OUTPUTS_HELD)
    assert OUTPUTS_HELD not in plan_line(RunPlan(walks=(timeline,), notes=("another",)))
