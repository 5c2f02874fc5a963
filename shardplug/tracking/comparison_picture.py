"""Predicted and measured memory in one picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardplug.errors import ConfigError
from shardplug.plan.run.run_plan import RunPlan, predicted_phases
from shardplug.plan.timeline import PLAN_KINDS, RESIDENT_KINDS, MemoryTimeline
from shardplug.process.memory_row import MODEL_STATE_KINDS, PHASES, MemoryRow
from shardplug.tracking.picture import COLORS, LABELS, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_comparison"]

_SHOWN = (*RESIDENT_KINDS, "snapshot", "other")


def draw_comparison(
    rows: Sequence[MemoryRow], plan: MemoryTimeline | RunPlan, path: str | os.PathLike[str]
) -> None:
    """Draw predicted beside measured: bytes by kind in each phase, and the peaks of the steps.

    Args:
        rows: Measured rows, for example of `read_jsonl`; the rank with the highest peak is shown,
            and the highest peak of any.
        plan: What was planned.
        path: PNG to write.

    Raises:
        ConfigError: If there is no row.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not rows:
        raise ConfigError(f"Expected memory rows to draw into {path}, got none.")
    plan = RunPlan(walks=(plan,)) if isinstance(plan, MemoryTimeline) else plan
    # The first steps make what stays: optimizer state, work space of libraries.
    settled = [row for row in rows if row.step > min(r.step for r in rows)] or list(rows)
    worst = max(settled, key=lambda row: row.peak_bytes).rank
    timeline = plan.walk_of(worst)
    scale, unit = (2**30, "GiB") if timeline.peak.total >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    _draw_bars(left, [row for row in settled if row.rank == worst], timeline, scale)
    left.set_ylabel(f"memory of rank {worst}, {unit}")
    _draw_steps(right, rows, worst, timeline, scale)
    right.set_ylabel(f"memory of one rank, {unit}")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    more = right.get_legend_handles_labels()
    figure.legend(
        handles + more[0], labels + more[1], loc="outside lower center", ncols=4, frameon=False
    )
    save_figure(figure, Path(path))


def _draw_bars(
    axes: Axes, shown: Sequence[MemoryRow], timeline: MemoryTimeline, scale: int
) -> None:
    """Two bars a phase: hatched what was planned, and the median of what was measured."""
    phases = [phase for phase in PHASES if any(row.phase == phase for row in shown)]
    planned = [predicted_phases(timeline)[phase] for phase in phases]
    measured = [_median([row for row in shown if row.phase == phase]) for phase in phases]
    for offset, bars, hatch in ((-0.2, planned, "//"), (0.2, measured, None)):
        low = [0.0] * len(bars)
        for kind in _SHOWN:
            heights = [bar.get(kind, 0) / scale for bar in bars]
            if not any(heights):
                continue
            axes.bar(
                [place + offset for place in range(len(bars))],
                heights,
                bottom=low,
                width=0.36,
                color=COLORS[kind],
                hatch=hatch,
                edgecolor="white" if hatch else "none",
                linewidth=0,
                label=None if hatch else LABELS[kind],
            )
            low = [below + height for below, height in zip(low, heights, strict=True)]
        for place, total in enumerate(low):
            axes.annotate(
                f"{total:.4g}",
                (place + offset, total),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
            )
    axes.margins(y=0.08)
    axes.set_xticks(range(len(phases)), [phase.replace("_", "\n") for phase in phases])
    axes.set_title("left predicted (hatched), right measured", fontsize="medium")


def _median(rows: Sequence[MemoryRow]) -> dict[str, int]:
    """The row in the middle, by its total."""
    row = sorted(rows, key=lambda each: each.total_bytes)[len(rows) // 2]
    beside = row.by_tier if row.tiers_measured_bytes else {}
    return {**row.by_kind, **beside}


def _draw_steps(
    axes: Axes, rows: Sequence[MemoryRow], worst: int, timeline: MemoryTimeline, scale: int
) -> None:
    """Peaks and the ends of phases over the steps, with what was planned as dashed lines."""
    from matplotlib.ticker import MaxNLocator

    steps = sorted({row.step for row in rows})
    by_step = {step: [row for row in rows if row.step == step] for step in steps}
    own = {step: [r for r in each if r.rank == worst] for step, each in by_step.items()}
    highest = [max(r.peak_bytes for r in by_step[step]) / scale for step in steps]
    peaks = [max((r.peak_bytes for r in own[step]), default=0) / scale for step in steps]
    axes.plot(steps, highest, color="0.6", linewidth=4, label="peak, highest of all ranks")
    axes.plot(steps, peaks, color="black", marker=".", label=f"peak of rank {worst}, measured")
    peak = timeline.peak.total / scale
    axes.plot(steps, [peak] * len(steps), color="#D55E00", linestyle="--", label="peak, predicted")
    top = [*highest, peak]
    totals = {
        phase: sum(held.values()) / scale for phase, held in predicted_phases(timeline).items()
    }
    for phase, style in zip(PHASES, ("v", "^", "s"), strict=True):
        measured = {
            step: r.total_bytes / scale for step in steps for r in own[step] if r.phase == phase
        }
        if not measured:
            continue
        name = phase.replace("_", " ")
        axes.plot(
            list(measured), list(measured.values()), style, markersize=4, label=f"{name}, measured"
        )
        axes.plot(
            steps, [totals[phase]] * len(steps), color=axes.lines[-1].get_color(), linestyle="--"
        )
        top += [*measured.values(), totals[phase]]
    axes.set_ylim(0, 1.08 * max(top))
    axes.set_title("dashed lines are predicted", fontsize="medium")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


assert set(_SHOWN) <= set(COLORS) and set(MODEL_STATE_KINDS) <= set(PLAN_KINDS)
