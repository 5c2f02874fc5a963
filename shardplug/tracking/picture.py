"""A memory curve as a picture: bytes by kind over the phases of each step."""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardplug.errors import ConfigError
from shardplug.plan.run.run_plan import RunPlan, predicted_phases
from shardplug.plan.timeline import RESIDENT_KINDS, MemoryTimeline
from shardplug.process.memory_row import MODEL_STATE_KINDS, PHASES, TIER_KINDS, MemoryRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PngSink", "draw_png"]

# From what rests at the bottom to what comes and goes at the top. The colors are Okabe and Ito's
# palette, told apart with colour blindness too.
COLORS = {
    "master_shards": "#0072B2",
    "master_shards_cpu": "#6699CC",
    "master_shards_nvme": "#332288",
    "compute_copies_nvme": "#AA4499",
    "optimizer_state": "#009E73",
    "optimizer_state_cpu": "#F0E442",
    "optimizer_state_nvme": "#999933",
    "staging": "#882255",
    "gradients": "#E69F00",
    "gradients_cpu": "#DDCC77",
    "gradients_nvme": "#CC6677",
    "gathered": "#56B4E9",
    "activations_cpu": "#DDDDDD",
    "snapshot": "#CC79A7",
    "other": "#BBBBBB",
}
LABELS = {
    "master_shards": "master shards",
    "gathered": "gathered parameters",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "snapshot": "snapshot of a save",
    "other": "activations and other",
    "master_shards_cpu": "master shards, CPU memory",
    "master_shards_nvme": "master shards, files",
    "compute_copies_nvme": "copies to compute with, files",
    "gradients_cpu": "gradients, CPU memory",
    "gradients_nvme": "gradients, files",
    "optimizer_state_cpu": "optimizer state, CPU memory",
    "optimizer_state_nvme": "optimizer state, files",
    "staging": "staging buffers",
    "activations_cpu": "activations, CPU memory",
}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_MAX_STEPS = 120  # as many as can be told apart in the picture's width
_MAX_PHASED_STEPS = 24  # beyond, three phases a step would be stripes
_MAX_PEAK_LINES = 8


class PngSink:
    """Draws the curve into a PNG when the run ends.

    A long run is thinned as it goes: neighbouring steps are merged into one, which keeps the
    larger total of each phase and the larger peak.
    """

    def __init__(self, path: str | os.PathLike[str], *, title: str = "") -> None:
        """Prepare the sink; the file is written by `close`.

        Args:
            path: File to write.
            title: What ran, for example "ZeRO stage 3 on 2 ranks".

        Raises:
            ConfigError: If matplotlib is not installed.
        """
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "Drawing memory curves needs matplotlib, which is not installed; run "
                'pip install "shardplug[memory]", or leave the picture out.'
            )
        self.path = Path(path)
        self.title = title
        self._steps: list[list[MemoryRow]] = []
        self._open: list[MemoryRow] = []  # steps that are not yet merged into a full group
        self._group = 1
        self._in_open = 0
        self._plan: RunPlan | None = None

    def expect(self, plan: RunPlan) -> None:
        """Draw what was predicted too."""
        self._plan = plan

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Keep the rows of one step."""
        self._open = _merge(self._open, rows)
        self._in_open += 1
        if self._in_open < self._group:
            return
        self._steps.append(self._open)
        self._open, self._in_open = [], 0
        if len(self._steps) >= 2 * _MAX_STEPS:
            pairs = zip(self._steps[::2], self._steps[1::2], strict=True)
            self._steps = [_merge(one, two) for one, two in pairs]
            self._group *= 2

    def close(self) -> None:
        """Draw, if there was any row."""
        rows = [row for step in (*self._steps, self._open) for row in step]
        if rows:
            draw_png(rows, self.path, title=self.title, plan=self._plan)


def draw_png(
    rows: Sequence[MemoryRow],
    path: str | os.PathLike[str],
    *,
    title: str = "",
    plan: RunPlan | None = None,
) -> None:
    """Draw rows, for example from `shardplug.memory.read_jsonl`, into a PNG.

    Shown is the rank with the highest peak. On the left are its model states, each phase where
    they were largest; on the right everything over all steps, with the peak of each rank; of more
    than 24 steps only the highest phase. The two have scales of their own. The file appears whole
    or not at all.

    Args:
        rows: Rows of any number of steps and ranks.
        path: File to write; folders are made.
        title: What ran.
        plan: What was predicted, drawn as dashed lines.

    Raises:
        ConfigError: If there is no row.
    """
    if not rows:
        raise ConfigError(f"Expected memory rows to draw into {path}, got none.")
    # The figure is made without pyplot, which would change the process's plotting back end.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    worst = max(rows, key=lambda row: row.peak_bytes).rank
    num_ranks = len({row.rank for row in rows})
    shown = [row for row in rows if row.rank == worst]
    top = max(row.peak_bytes for row in rows)
    unit, scale = _unit(top)

    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 2.2))
    kinds = [kind for kind in COLORS if any(_stacked(row, kind) for row in shown)]
    _draw_phases(left, shown)
    _draw_steps(right, shown, kinds, scale)
    _draw_elsewhere(right, shown, kinds, scale)
    _draw_peaks(right, rows, worst, scale)
    if plan is not None:
        _draw_predicted(left, right, shown, plan.walk_of(worst), scale)
        top = max(top, plan.walk_of(worst).peak.total)
    right.set_ylabel(f"memory of one rank, {unit}")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    elsewhere = max(max(row.by_tier.values()) for row in shown)
    right.set_ylim(0, 1.08 * max(top, elsewhere) / scale)
    whose = f"rank {worst} of {num_ranks}, the one with the highest peak" if num_ranks > 1 else ""
    figure.suptitle(" - ".join(part for part in (title or "Memory", whose) if part))
    handles, labels = right.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)

    save_figure(figure, Path(path))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG that appears whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(aside, format="png")
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _draw_phases(axes: Axes, shown: list[MemoryRow]) -> None:
    """Bars of the model states in each phase, at the step where they were largest."""
    bars: dict[str, MemoryRow] = {}
    for row in shown:
        if row.phase not in bars or _state_bytes(row) > _state_bytes(bars[row.phase]):
            bars[row.phase] = row
    phases = [phase for phase in PHASES if phase in bars]
    unit, scale = _unit(max(_state_bytes(row) for row in bars.values()))
    low = [0.0] * len(phases)
    for kind in COLORS:
        if kind in (*MODEL_STATE_KINDS, *_STATE_TIERS):
            heights = [{**bars[p].by_kind, **bars[p].by_tier}[kind] / scale for p in phases]
            hatch = "//" if kind in _STATE_TIERS else None  # not on the device
            axes.bar(
                range(len(phases)),
                heights,
                bottom=low,
                color=COLORS[kind],
                width=0.7,
                hatch=hatch,
                edgecolor="white" if hatch else None,
                linewidth=0,
            )
            low = [below + height for below, height in zip(low, heights, strict=True)]
    for x, total in enumerate(low):
        axes.annotate(
            f"{total:#.3g}" if total < 999.5 else f"{total:.0f}",
            (x, total),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
        )
    axes.set_ylim(0, 1.08 * max(low))  # a margin would stop at bars of no height
    axes.set_xticks(range(len(phases)), [phase.replace("_", "\n") for phase in phases])
    axes.set_ylabel(f"model states of one rank, {unit}")
    axes.set_title("model states, each phase at its highest", fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)


_NO_STATES = ("staging", "activations_cpu")
_STATE_TIERS = tuple(kind for kind in TIER_KINDS if kind not in _NO_STATES)


def _state_bytes(row: MemoryRow) -> int:
    """Bytes of the model states, wherever they are."""
    return row.states_bytes + sum(row.by_tier[kind] for kind in _STATE_TIERS)


def _stacked(row: MemoryRow, kind: str) -> int:
    """Bytes of a kind in the memory that is measured."""
    if kind not in TIER_KINDS:
        return row.by_kind[kind]
    measured = row.tiers_measured_bytes and not kind.endswith("_nvme")
    return row.by_tier[kind] if measured else 0


def _draw_predicted(
    left: Axes, right: Axes, shown: list[MemoryRow], plan: MemoryTimeline, scale: int
) -> None:
    """Dashed lines: the model states of each phase, the total through the steps, the peak."""
    planned = predicted_phases(plan)
    style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
    present = [phase for phase in PHASES if any(row.phase == phase for row in shown)]
    _, states_scale = _unit(max(_state_bytes(row) for row in shown))
    for place, phase in enumerate(present):
        held = planned[phase]
        states = sum(held[kind] for kind in RESIDENT_KINDS if kind not in _NO_STATES)
        left.hlines(states / states_scale, place - 0.45, place + 0.45, color="black", ls="--")
    edges, rows = _phase_edges(shown)
    totals = [sum(planned[row.phase].values()) / scale for row in rows]
    right.step(edges, totals, where="post", label="total, predicted", **style)  # type: ignore[arg-type]
    peak = plan.peak.total / scale
    right.axhline(peak, color="#D55E00", linestyle="--", linewidth=1.2, label="peak, predicted")


def _draw_elsewhere(axes: Axes, shown: list[MemoryRow], kinds: list[str], scale: int) -> None:
    """A line for each kind of state that is not in the memory of the areas."""
    for kind in (*_STATE_TIERS, "activations_cpu"):
        by_step = {row.step: row.by_tier[kind] / scale for row in shown}
        if kind not in kinds and any(by_step.values()):
            steps = sorted(by_step)
            axes.step(
                _bounds(steps),
                [by_step[steps[0]], *(by_step[step] for step in steps)],
                where="pre",
                color=COLORS[kind],
                linestyle="--",
                linewidth=1.6,
                label=f"{LABELS[kind]} (elsewhere)",
            )


def _unit(num_bytes: int) -> tuple[str, int]:
    """The largest unit that gives at least 1."""
    return next((unit for unit in _UNITS if num_bytes >= unit[1]), _UNITS[-1])


def _draw_steps(axes: Axes, shown: list[MemoryRow], kinds: list[str], scale: int) -> None:
    """Areas over the steps: each takes the width since the one before, a third per phase."""
    if len({row.step for row in shown}) > _MAX_PHASED_STEPS:
        axes.set_title("everything, each step at its highest phase, and peaks", fontsize="medium")
        axes.set_xlabel("optimizer step")
    else:
        axes.set_title("everything in all steps, and the peak of each rank", fontsize="medium")
        axes.set_xlabel("optimizer step; each spans forward, backward and step")
    edges, rows = _phase_edges(shown)
    low = [0.0] * len(rows)
    for kind in kinds:
        high = [below + _stacked(row, kind) / scale for below, row in zip(low, rows, strict=True)]
        axes.fill_between(
            edges, low, high, step="post", color=COLORS[kind], label=LABELS[kind], linewidth=0
        )
        low = high
    axes.step(edges, low, where="post", color="black", linewidth=0.6, label="total")
    axes.set_xlim(edges[0], edges[-1])
    axes.spines[["top", "right"]].set_visible(False)


def _phase_edges(shown: list[MemoryRow]) -> tuple[list[float], list[MemoryRow]]:
    """Where each phase begins on the axis, and its row; of many steps only the highest phase."""
    by_step: dict[int, list[MemoryRow]] = defaultdict(list)
    for row in sorted(shown, key=lambda row: (row.step, PHASES.index(row.phase))):
        by_step[row.step].append(row)
    if len(by_step) > _MAX_PHASED_STEPS:
        by_step = {
            step: [max(rows, key=lambda row: row.total_bytes)] for step, rows in by_step.items()
        }
    bounds = _bounds(by_step)
    edges: list[float] = []
    rows: list[MemoryRow] = []
    for begin, end in zip(bounds, bounds[1:], strict=False):
        phases = by_step[end]
        edges += [begin + (end - begin) * i / len(phases) for i in range(len(phases))]
        rows += phases
    edges.append(bounds[-1])
    rows.append(rows[-1])  # closes the last area: with step="post" it has no width
    return edges, rows


def _draw_peaks(axes: Axes, rows: Sequence[MemoryRow], worst: int, scale: int) -> None:
    """Each rank's peak per step, or the range over the ranks where there are many."""
    peaks: dict[int, dict[int, float]] = defaultdict(dict)
    for row in rows:
        old = peaks[row.rank].get(row.step, 0.0)
        peaks[row.rank][row.step] = max(old, row.peak_bytes / scale)
    steps = sorted({row.step for row in rows})
    lines: dict[str, list[float]]
    if len(peaks) > _MAX_PEAK_LINES:
        at = [[own[step] for own in peaks.values() if step in own] for step in steps]
        lines = {
            f"highest peak of {len(peaks)} ranks": [max(values) for values in at],
            "lowest peak": [min(values) for values in at],
        }
    else:
        order = sorted(peaks, key=lambda rank: (rank != worst, rank))
        lines = {
            f"peak, rank {rank}": [peaks[rank].get(step, float("nan")) for step in steps]
            for rank in order
        }
    styles = ("-", "--", ":", "-.")
    for i, (name, values) in enumerate(lines.items()):
        axes.step(
            _bounds(steps),
            [values[0], *values],
            where="pre",
            color="#D55E00" if i == 0 else ("0.35" if i < len(styles) else "0.55"),
            linestyle=styles[i % len(styles)],
            linewidth=1.4,
            label=name,
        )


def _bounds(steps: Iterable[int]) -> list[int]:
    """Where each step begins and ends on the axis: it ends at its own number."""
    ends = sorted(steps)
    first = ends[0] - (ends[1] - ends[0] if len(ends) > 1 else 1)
    return [max(first, 0), *ends]


def _merge(old: Sequence[MemoryRow], new: Sequence[MemoryRow]) -> list[MemoryRow]:
    """Join two steps into one under the number of the later."""
    if not old:
        return list(new)
    merged = {(row.rank, row.phase): row for row in old}
    step = new[0].step
    for row in new:
        other = merged.get((row.rank, row.phase))
        if other is not None:
            larger = max(row, other, key=lambda each: each.total_bytes)
            row = replace(larger, peak_bytes=max(row.peak_bytes, other.peak_bytes))
        merged[row.rank, row.phase] = row
    return [replace(row, step=step) for row in merged.values()]
