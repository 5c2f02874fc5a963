"""The predicted curve of one optimizer step as a picture."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardplug.plan.choices import GIB, Choice
from shardplug.plan.plan import Plan
from shardplug.plan.timeline import PLAN_KINDS, Point
from shardplug.tracking.picture import save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_plan"]

# From what rests at the bottom to what comes and goes at the top, as in the measured curves.
COLORS = {
    "buffers": "#999999",
    "master_shards": "#0072B2",
    "optimizer_state": "#009E73",
    "master_shards_cpu": "#332288",
    "gradients_cpu": "#88CCEE",
    "optimizer_state_cpu": "#117733",
    "staging": "#DDCC77",
    "gradients": "#E69F00",
    "gathered": "#56B4E9",
    "communication": "#F0E442",
    "optimizer_work": "#882255",
    "activations_cpu": "#DDDDDD",
    "activations": "#BBBBBB",
    "logits_and_loss": "#CC79A7",
}
_VISIBLE = 0.002  # of the peak
LABELS = {
    "buffers": "model buffers",
    "master_shards": "master shards",
    "optimizer_state": "optimizer state",
    "master_shards_cpu": "parameters, CPU memory",
    "gradients_cpu": "gradients, CPU memory",
    "optimizer_state_cpu": "optimizer state, CPU memory",
    "staging": "staging buffers",
    "gradients": "gradients",
    "gathered": "gathered parameters",
    "communication": "communication buffers",
    "optimizer_work": "work space of the step",
    "activations_cpu": "activations, CPU memory",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
}


def draw_plan(plan: Plan, path: str | os.PathLike[str], choice: Choice | None = None) -> None:
    """Draw what a rank is predicted to hold through one optimizer step.

    Each place on the axis is one event of the schedule (a unit's forward or backward begins or
    ends), with the most that was held since the one before.

    Args:
        plan: The plan.
        path: PNG to write; folders are made.
        choice: The choice to draw; by default the plan's best, else its first.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    choice = choice or plan.best or plan.choices[0]
    points = _widened(choice.timeline.points)
    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(points))
    low = [0.0] * len(points)
    for kind in COLORS:
        if max(p.held[kind] for p in points) < _VISIBLE * choice.timeline.peak.total:
            low = [below + p.held[kind] / GIB for below, p in zip(low, points, strict=True)]
            continue
        high = [below + p.held[kind] / GIB for below, p in zip(low, points, strict=True)]
        axes.fill_between(
            places, low, high, step="pre", color=COLORS[kind], label=LABELS[kind], linewidth=0
        )
        low = high
    axes.step(places, low, where="pre", color="black", linewidth=0.6, label="total")
    _draw_limits(axes, plan, choice, max(low))
    _draw_phases(axes, points)
    peak = choice.timeline.peak
    at = points.index(peak) - 0.5  # an area reaches from the event before
    axes.annotate(
        f"peak {peak.total / GIB:.3g} GiB\n{peak.phase} {peak.unit}",
        (at, peak.total / GIB),
        xytext=(0, 6),
        textcoords="offset points",
        ha="center",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )
    axes.set_xlim(0, len(points) - 1)
    axes.set_ylabel("memory of one rank, GiB")
    axes.spines[["top", "right"]].set_visible(False)
    ranks = plan.request.world_size
    figure.suptitle(f"{plan.request.model}: {choice.name} on {ranks} ranks, predicted")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    save_figure(figure, Path(path))


def _draw_limits(axes: Axes, plan: Plan, choice: Choice, top: float) -> None:
    room = plan.request.room
    limit = room.device_gib - room.reserve_gib - choice.slack / GIB
    axes.set_ylim(0, 1.2 * top)
    if limit <= 1.2 * top:
        axes.axhline(limit, color="#D55E00", linestyle="--", linewidth=1.2, label="limit")


def _draw_phases(axes: Axes, points: list[Point]) -> None:
    """Name the phases below the axis, where each begins."""
    starts = [0]
    for index in range(2, len(points)):
        before, now = points[index - 1], points[index]
        if (before.phase, before.micro_batch) != (now.phase, now.micro_batch):
            starts.append(index - 1)
    names = [points[start + 1].phase for start in starts]
    for start in starts[1:]:
        axes.axvline(start, color="0.3", linewidth=0.5, linestyle=":")
    axes.set_xticks(starts, names, ha="left")


def _widened(points: Sequence[Point]) -> list[Point]:
    """Give the step and the rest, one event each, a width that can be seen."""
    width = max(2, len(points) // 20)
    found = [points[0]]
    for point in points:
        found += [point] * (width if point.phase in ("step", "rest") else 1)
    return found


assert set(COLORS) == set(PLAN_KINDS)
