"""Holds a run against its plan: predicted beside measured, warnings, and one picture of both."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardplug.errors import ConfigError
from shardplug.memory.choices import GIB
from shardplug.memory.curve import PLAN_KINDS, Walk
from shardplug.memory.picture import save_figure
from shardplug.memory.row import BOOK_KINDS, PHASES, MemoryRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PlanSink", "draw_comparison", "predicted_books"]

_GROWING_STEPS = 20
_GROWTH = 0.01
_MOST_STEPS = 400


class PlanSink:
    """A sink of `MemoryTracker` that knows what was planned.

    Into its folder it writes `plan.json` with the first rows, and `plan.png` at the end: model
    states by kind in each phase, predicted and measured, and the peaks of the steps against the
    predicted one.

    It warns, once each, when model states or the peak exceed the plan by a share, naming the kind
    and the phase, and when memory grows from step to step. The peak is compared on a GPU only:
    what a process holds on a CPU is known roughly.
    """

    def __init__(
        self,
        plan: Walk,
        folder: str | os.PathLike[str],
        *,
        alert_share: float = 0.1,
        compare_peak: bool = True,
        picture: bool = True,
    ) -> None:
        """Prepare the sink; files appear with the first row and with `close`.

        Args:
            plan: The curve of the choice that runs (`Choice.walk`).
            folder: Folder of the files.
            alert_share: Warn when measured exceeds predicted by this share.
            compare_peak: Whether peaks are known well enough to warn about; False on a CPU.
            picture: Whether to draw, which needs matplotlib.

        Raises:
            ConfigError: For a negative share.
        """
        if alert_share < 0:
            raise ConfigError(f"Expected alert_share >= 0, got {alert_share!r}.")
        self.folder = Path(folder)
        self._plan = plan
        self._books = predicted_books(plan)
        self._share = alert_share
        self._compare_peak = compare_peak
        self._picture = picture
        self._rows: list[MemoryRow] = []
        self._warned: set[str] = set()
        self._after_step: list[tuple[int, MemoryRow]] = []

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Compare the rows of one step with the plan."""
        if not rows:
            return
        if not self._rows:
            self._write_plan()
        self._rows = _thinned([*self._rows, *rows])
        for row in rows:
            self._compare(row)
        self._look_for_growth(rows)

    def close(self) -> None:
        """Draw, if there was any row."""
        if self._rows and self._picture:
            draw_comparison(self._rows, self._plan, self.folder / "plan.png")

    def _write_plan(self) -> None:
        peak = self._plan.peak
        content = {
            "peak": {"phase": peak.phase, "unit": peak.unit, "bytes": peak.total},
            "peak_bytes": {kind: peak.held[kind] for kind in PLAN_KINDS},
            "phase_bytes": self._books,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps(content, indent=1))

    def _compare(self, row: MemoryRow) -> None:
        for kind, planned in self._books[row.phase].items():
            measured = row.by_kind[kind]
            if measured > (1 + self._share) * planned and measured - planned > 2**20:
                self._warn(
                    "books",
                    f"{kind} of rank {row.rank} {row.phase.replace('_', ' ')} of step {row.step} "
                    f"is {measured / GIB:.3g} GiB, {planned / GIB:.3g} GiB were planned.",
                )
        peak = self._plan.peak
        if self._compare_peak and row.peak_bytes > (1 + self._share) * peak.total:
            self._warn(
                "peak",
                f"The peak of rank {row.rank} up to {row.phase.replace('_', ' ')} of step "
                f"{row.step} is {row.peak_bytes / GIB:.3g} GiB, {peak.total / GIB:.3g} GiB were "
                f"planned ({peak.phase} {peak.unit}).",
            )

    def _look_for_growth(self, rows: Sequence[MemoryRow]) -> None:
        """A total that rises with every step, by more than a share over all, is a leak."""
        last = [row for row in rows if row.phase == "after_step"]
        if not last:
            return
        row = max(last, key=lambda each: each.total_bytes)
        if self._after_step and row.total_bytes <= self._after_step[-1][0]:
            self._after_step = []
        self._after_step.append((row.total_bytes, row))
        first = self._after_step[0]
        if len(self._after_step) <= _GROWING_STEPS or row.total_bytes < (1 + _GROWTH) * first[0]:
            return
        grown = {kind: row.by_kind[kind] - first[1].by_kind[kind] for kind in row.by_kind}
        kind = max(grown, key=grown.__getitem__)
        self._warn(
            "growth",
            f"Memory of rank {row.rank} has grown with each of the last "
            f"{len(self._after_step) - 1} logged steps, by "
            f"{(row.total_bytes - first[0]) / GIB:.3g} GiB, most of it {kind}: something keeps "
            "tensors alive, often a list of losses that were not detached.",
        )

    def _warn(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            warnings.warn(f"Memory exceeds its plan: {message}", stacklevel=4)


def predicted_books(plan: Walk) -> dict[str, dict[str, int]]:
    """Return the model states planned for each phase that a tracker knows, by kind.

    Of several micro-batches a tracker shows the one with the largest sum, and so does this.
    """
    alike = {
        "after_forward": ("after_forward", "after_forward_later"),
        "after_backward": ("after_backward_between", "after_backward"),
        "after_step": ("after_step",),
    }
    found: dict[str, dict[str, int]] = {}
    for phase, names in alike.items():
        books = [
            {kind: plan.phases[name][kind] for kind in BOOK_KINDS}
            for name in names
            if name in plan.phases
        ]
        found[phase] = max(books, key=lambda held: sum(held.values()))
    return found


def _thinned(rows: list[MemoryRow]) -> list[MemoryRow]:
    """Of a long run keep every other step."""
    steps = sorted({row.step for row in rows})
    if len(steps) <= _MOST_STEPS:
        return rows
    kept = set(steps[::2])
    return [row for row in rows if row.step in kept]


def draw_comparison(rows: Sequence[MemoryRow], plan: Walk, path: str | os.PathLike[str]) -> None:
    """Draw predicted beside measured: model states in each phase, and the peaks of the steps.

    Args:
        rows: Measured rows, for example of `read_jsonl`; the rank with the highest peak is shown.
        plan: The curve that was planned.
        path: PNG to write.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not rows:
        raise ConfigError(f"Expected memory rows to draw into {path}, got none.")
    worst = max(rows, key=lambda row: row.peak_bytes).rank
    shown = [row for row in rows if row.rank == worst]
    figure = Figure(figsize=(12, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    scale, unit = (2**30, "GiB") if plan.peak.total >= 2**30 else (2**20, "MiB")
    _draw_states(left, shown, plan, scale)
    left.set_ylabel(f"model states of rank {worst}, {unit}")
    steps = sorted({row.step for row in shown})
    peaks = [max(r.peak_bytes for r in shown if r.step == step) / scale for step in steps]
    rests = [max(r.total_bytes for r in shown if r.step == step) / scale for step in steps]
    right.plot(steps, peaks, color="black", marker=".", label="peak, measured")
    right.plot(steps, rests, color="0.5", marker=".", label="ends of phases, measured")
    right.axhline(plan.peak.total / scale, color="#D55E00", linestyle="--", label="peak, predicted")
    right.set_title("everything (on a CPU measured roughly)", fontsize="medium")
    right.set_ylim(0, 1.15 * max(*peaks, plan.peak.total / scale))
    right.set_xlabel("optimizer step")
    right.set_ylabel(f"everything, {unit}")
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = left.get_legend_handles_labels()
    more = right.get_legend_handles_labels()
    figure.legend(
        handles + more[0], labels + more[1], loc="outside lower center", ncols=4, frameon=False
    )
    save_figure(figure, Path(path))


def _draw_states(axes: Axes, shown: Sequence[MemoryRow], plan: Walk, scale: int) -> None:
    """Two bars a phase: measured, at its largest, and hatched what was planned."""
    from shardplug.memory.plan_picture import COLORS, LABELS

    planned = predicted_books(plan)
    phases = [phase for phase in PHASES if any(row.phase == phase for row in shown)]
    measured = {
        phase: max((r for r in shown if r.phase == phase), key=lambda r: r.books_bytes).by_kind
        for phase in phases
    }
    order = [kind for kind in COLORS if kind in BOOK_KINDS]
    for offset, source, hatch in ((-0.2, planned, "//"), (0.2, measured, None)):
        low = [0.0] * len(phases)
        for kind in order:
            heights = [source[phase][kind] / scale for phase in phases]
            axes.bar(
                [place + offset for place in range(len(phases))],
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
                f"{total:#.3g}",
                (place + offset, total),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
            )
    axes.set_xticks(range(len(phases)), [phase.replace("_", "\n") for phase in phases])
    axes.set_title("left predicted (hatched), right measured", fontsize="medium")
