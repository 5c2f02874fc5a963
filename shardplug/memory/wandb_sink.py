"""Memory rows as Weights & Biases metrics with an x-axis of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from shardplug.memory.row import MemoryRow

__all__ = ["WandbRun", "WandbSink"]

_GIB = 2**30
_STEP = "memory/step"


class WandbRun(Protocol):
    """The part of a `wandb.Run` that the sink uses."""

    @property
    def step(self) -> int:
        """W&B step of the next row."""

    def define_metric(self, name: str, /, *, step_metric: str | None = None) -> Any:
        """Choose a metric's x-axis."""

    def log(
        self, data: dict[str, Any], /, step: int | None = None, commit: bool | None = None
    ) -> None:
        """Log one row."""


class WandbSink:
    """Logs every kind of memory of every rank into one W&B run.

    Panels come in one section for the job and one for each rank. `memory/<phase>/<kind>_gib` is
    the largest value of any rank, `memory/peak_gib` the largest peak, and
    `memory_rank<r>/<phase>/<kind>_gib`, `.../total_gib` and `memory_rank<r>/peak_gib` are each
    rank's own, all in GiB (2^30 bytes).

    The x-axis is `memory/step`, the number of optimizer steps done, so the curves do not depend
    on the run's own step counter, which may run ahead or stay behind after a resume. Each metric
    is bound to it by its full name: a pattern such as "memory/*" loses against the pattern "*"
    that Lightning's logger defines.

    W&B throws away a row whose step is below the run's counter, and each row logged without a
    step moves that counter on. A host that passes its own step to `run.log`, as Accelerate does,
    would lose its losses to our rows. Therefore by default our values join the host's rows: they
    are put into the row that is open, and wait while that row already has some. What still waits
    at the end is written by `close`, so memory is best logged as often as the host logs.
    """

    def __init__(self, run: WandbRun, *, host_passes_step: bool = True) -> None:
        """Prepare the sink; nothing is logged yet.

        Args:
            run: A `wandb.Run`, needed on rank 0 only.
            host_passes_step: Whether others call `run.log(..., step=...)` on this run. With False
                (Lightning's logger passes none) each step is a W&B row of its own, at once.
        """
        self._run = run
        self._host_passes_step = host_passes_step
        self._known: set[str] = set()
        self._waiting: deque[dict[str, float]] = deque()
        self._open_step: int | None = None  # W&B step of the open row that has values of ours

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Log the rows of one step."""
        if not rows:
            return
        values = _as_metrics(rows)
        for name in values:
            if name not in self._known:
                self._known.add(name)
                if name == _STEP:
                    self._run.define_metric(name)
                else:
                    self._run.define_metric(name, step_metric=_STEP)
        if not self._host_passes_step:
            self._run.log(values)
            return
        self._waiting.append(values)
        step = self._run.step
        if step != self._open_step:
            self._run.log(self._waiting.popleft(), commit=False)
            self._open_step = step

    def close(self) -> None:
        """Log what waited for rows of the host; the run itself stays open."""
        if self._waiting and self._run.step == self._open_step:
            self._run.log({}, commit=True)  # finish the row that has our last values
        while self._waiting:
            self._run.log(self._waiting.popleft(), commit=True)


def _as_metrics(rows: Sequence[MemoryRow]) -> dict[str, float]:
    values: dict[str, float] = {_STEP: rows[0].step}
    largest: dict[str, float] = {}
    for row in rows:
        tiers = row.by_tier if any(row.by_tier.values()) else {}
        own = {
            f"{row.phase}/{kind}_gib": n / _GIB
            for kind, n in {**row.by_kind, **tiers, "total": row.total_bytes}.items()
        }
        # Peaks grow towards the end of a step: the last phase has the step's.
        own["peak_gib"] = row.peak_bytes / _GIB
        for name, value in own.items():
            values[f"memory_rank{row.rank}/{name}"] = value
            largest[name] = max(value, largest.get(name, 0.0))
    return {**values, **{f"memory/{name}": value for name, value in largest.items()}}
