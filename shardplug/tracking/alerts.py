"""What is worth an alert: memory above its plan, memory that grows, a rank that holds more."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from shardplug.errors import ConfigError
from shardplug.plan.choices import GIB
from shardplug.plan.run.run_plan import RunPlan, predicted_model_states
from shardplug.process.memory_row import MemoryRow

__all__ = ["Finding", "Watch"]

_GROWING_STEPS = 20
_GROWTH = 0.01
_UNEVEN = 0.2
_LEAST = 2**20
_LEAST_GROWTH_ROUGH = 64 * 2**20  # resident memory grows by some MiB in a healthy run
_LEAST_ROUGH = 16 * 2**20  # of what a CPU's readings say beside the accounting


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to say, once."""

    about: str
    """"states", "peak", "growth" or "uneven"."""
    title: str
    message: str


@dataclass(slots=True)
class _Rising:
    """Steps of one rank, each of which held more than the one before."""

    first: MemoryRow
    last: int
    steps: int = 0


class Watch:
    """Looks at the rows of each logged step and says, once each, what is not as it should be.

    Args:
        alert_share: Share by which measured may exceed predicted.
        exact: Whether "other" and peaks are known well, as on a GPU: else the peak is not held
            against its plan.

    Raises:
        ConfigError: For a negative share.
    """

    def __init__(self, alert_share: float = 0.1, *, exact: bool = True) -> None:
        if alert_share < 0:
            raise ConfigError(f"Expected alert_share >= 0, got {alert_share!r}.")
        self._share = alert_share
        self._exact = exact
        self._said: set[str] = set()
        self._rising: dict[int, _Rising] = {}
        self._plan: RunPlan | None = None
        self._states: dict[int, dict[str, dict[str, int]]] = {}  # by id of the plan's curve

    def expect(self, plan: RunPlan) -> None:
        """Hold the rows to come against a plan."""
        self._plan = plan
        self._states = {id(timeline): predicted_model_states(timeline) for timeline in plan.walks}

    def look(self, rows: Sequence[MemoryRow]) -> list[Finding]:
        """Return what is new in the rows of one step."""
        found = [*self._uneven(rows), *self._growing(rows)]
        for row in rows:
            found += self._above(row)
        new: dict[str, Finding] = {}
        for finding in found:
            if finding.about not in self._said:
                new.setdefault(finding.about, finding)
        self._said |= set(new)
        return list(new.values())

    def _above(self, row: MemoryRow) -> list[Finding]:
        """Model states, and the peak where it is known, above what was planned."""
        if self._plan is None:
            return []
        found = []
        timeline = self._plan.walk_of(row.rank)
        peak, states = timeline.peak, self._states[id(timeline)]
        for kind, planned in states[row.phase].items():
            measured = row.by_kind[kind]
            if measured > (1 + self._share) * planned and measured - planned > _LEAST:
                text = (
                    f"{kind} of rank {row.rank} {_at(row)} is {measured / GIB:.3g} GiB, "
                    f"{planned / GIB:.3g} GiB were planned."
                )
                found.append(Finding("states", "Memory exceeds its plan", text))
        if self._exact and row.peak_bytes > (1 + self._share) * peak.total:
            text = (
                f"The peak of rank {row.rank} up to {_at(row)} is {row.peak_bytes / GIB:.3g} GiB, "
                f"{peak.total / GIB:.3g} GiB were planned ({peak.phase} {peak.unit})."
            )
            found.append(Finding("peak", "Memory exceeds its plan", text))
        return found

    def _growing(self, rows: Sequence[MemoryRow]) -> list[Finding]:
        """A total that rises with every step, by more than a share over all, is a leak."""
        found = []
        for row in rows:
            if row.phase != "after_step":
                continue
            run = self._rising.get(row.rank)
            if run is None or row.total_bytes <= run.last:
                self._rising[row.rank] = _Rising(row, row.total_bytes)
                continue
            run.steps, run.last = run.steps + 1, row.total_bytes
            grown = row.total_bytes - run.first.total_bytes
            kind = _most({k: row.by_kind[k] - run.first.by_kind[k] for k in row.by_kind})
            rough = kind == "other" and not self._exact
            least = max(_GROWTH * run.first.total_bytes, _LEAST_GROWTH_ROUGH if rough else 0)
            if run.steps < _GROWING_STEPS or grown < least:
                continue
            text = (
                f"Memory of rank {row.rank} has grown with each of the last {run.steps} logged "
                f"steps, by {grown / GIB:.3g} GiB, most of it {kind}: something keeps tensors "
                "alive, often a list of losses that were not detached."
            )
            found.append(Finding("growth", "Memory grows from step to step", text))
        return found

    def _uneven(self, rows: Sequence[MemoryRow]) -> list[Finding]:
        """One rank that holds more than the others, by a share of what they hold."""
        found = []
        for phase in {row.phase: None for row in rows}:
            those = [row for row in rows if row.phase == phase]
            if len(those) < 2:
                continue
            most = max(those, key=lambda row: row.total_bytes)
            others = [row for row in those if row is not most]
            typical = statistics.median_low(row.total_bytes for row in others)
            more = most.total_bytes - typical
            kind = _most(
                {
                    k: most.by_kind[k] - statistics.median_low(r.by_kind[k] for r in others)
                    for k in most.by_kind
                }
            )
            rough = kind == "other" and not self._exact
            if more <= _UNEVEN * typical or more < (_LEAST_ROUGH if rough else _LEAST):
                continue
            text = (
                f"Rank {most.rank} holds {more / GIB:.3g} GiB more than the others {_at(most)} "
                f"({most.total_bytes / GIB:.3g} against {typical / GIB:.3g} GiB), most of it "
                f"{kind}."
            )
            found.append(Finding("uneven", "One rank holds more than the others", text))
        return found


def _most(sizes: dict[str, int]) -> str:
    return max(sizes, key=sizes.__getitem__)


def _at(row: MemoryRow) -> str:
    return f"{row.phase.replace('_', ' ')} of step {row.step}"
