"""Memory rows as Weights & Biases metrics with an x-axis of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from shardplug.plan.run.run_plan import RunPlan, predicted_phases
from shardplug.process.memory_row import MemoryRow
from shardplug.tracking.alerts import Finding

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

    def alert(self, title: str, text: str) -> None:
        """Send a message to whoever follows the run."""


class WandbSink:
    """Logs every kind of memory of every rank into one W&B run.

    W&B puts metrics with one prefix into one section, in the order of their names, and these are
    made for that:

    - `memory/<phase>/<kind>_gib` is the largest value of any rank, `memory/peak_gib` the largest
      peak; with a plan, the largest predicted value follows each under the same name with
      `_predicted`, so that the two panels stand side by side;
    - `memory_rank<r>/...` has the same of each rank;
    - `throughput/...` has tokens per second and MFU, as far as they are known.

    All memory is in GiB (2^30 bytes). With a plan the run's config has it under `shardplug_plan`.

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
        self._plan: RunPlan | None = None
        self._planned: dict[tuple[int, str], dict[str, float]] = {}  # by rank and phase
        self._open_step: int | None = None  # W&B step of the open row that has values of ours

    def expect(self, plan: RunPlan) -> None:
        """Log what was predicted beside what is measured, from the next row on."""
        self._plan, self._planned = plan, {}
        config = getattr(self._run, "config", None)
        if config is not None:
            config.update({"shardplug_plan": plan.as_dict()}, allow_val_change=True)

    def alert(self, finding: Finding) -> None:
        """Send what was found as an alert of the run."""
        self._run.alert(title=finding.title, text=finding.message)

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Log the rows of one step."""
        if not rows:
            return
        values = _as_metrics(rows, self._predicted)
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

    def _predicted(self, row: MemoryRow, measured: Iterable[str]) -> dict[str, float]:
        """What was planned for each metric of a row that has a plan."""
        if self._plan is None:
            return {}
        key = (row.rank, row.phase)
        if key not in self._planned:
            timeline = self._plan.walk_of(row.rank)
            held = predicted_phases(timeline)[row.phase]
            planned = {f"{row.phase}/{kind}_gib": size for kind, size in held.items()}
            planned[f"{row.phase}/total_gib"] = sum(held.values())
            planned["peak_gib"] = timeline.peak.total
            self._planned[key] = {name: size / _GIB for name, size in planned.items()}
        planned_gib = self._planned[key]
        return {f"{name}_predicted": planned_gib[name] for name in measured if name in planned_gib}

    def close(self) -> None:
        """Log what waited for rows of the host; the run itself stays open."""
        if self._waiting and self._run.step == self._open_step:
            self._run.log({}, commit=True)  # finish the row that has our last values
        while self._waiting:
            self._run.log(self._waiting.popleft(), commit=True)


def _as_metrics(
    rows: Sequence[MemoryRow],
    predicted: Callable[[MemoryRow, Iterable[str]], dict[str, float]],
) -> dict[str, float]:
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
        own |= predicted(row, list(own))
        for name, value in own.items():
            values[f"memory_rank{row.rank}/{name}"] = value
            largest[name] = max(value, largest.get(name, 0.0))
    costs: dict[str, list[float]] = {}
    for row in rows:
        for name, cost in row.by_cost.items():
            costs.setdefault(name, []).append(cost)
    return {
        **values,
        **{f"memory/{name}": value for name, value in largest.items()},
        **{f"throughput/{name}": sum(each) / len(each) for name, each in costs.items()},
    }
