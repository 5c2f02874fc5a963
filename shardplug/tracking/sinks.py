"""Where memory rows go: the protocol of a sink, and the sink for a file of JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from shardplug.errors import ConfigError
from shardplug.plan.run.run_plan import RunPlan, predicted_phases
from shardplug.process.memory_row import COSTS, KINDS, TIER_KINDS, MemoryRow

__all__ = ["JsonlSink", "Sink", "read_jsonl"]

_NUMBERS = (*(f"{kind}_bytes" for kind in KINDS), "peak_bytes", "held_bytes")
_TIER_NUMBERS = (*(f"{kind}_bytes" for kind in TIER_KINDS), "tiers_measured_bytes")


class Sink(Protocol):
    """Receives the rows of a memory curve, on rank 0 only.

    A sink is built on every rank, so it must not open files or connections before its first
    `write`. It may have two more methods: `expect(plan)` is called with a `RunPlan` before the
    rows that it is about, and again when more is known; `alert(finding)` with what is to be said.
    """

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Take the rows of one step: every phase of every rank."""

    def close(self) -> None:
        """Finish what was begun; no more rows come."""


class JsonlSink:
    """Writes one JSON object per row, flushed after each step, so a crash loses none.

    An object has the keys step, phase, rank, one `<kind>_bytes` per kind of memory, total_bytes,
    peak_bytes and held_bytes; where state lives outside the
    device also those of the tiers. With a plan there are the same keys with `predicted_` in front,
    of this rank and phase; and the last phase of a step has what the step cost, as far as it is
    known: step_seconds, tokens_per_second, samples_per_second, flops_per_second, mfu.
    """

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        """Prepare the sink; the file and its folders are made with the first row.

        Args:
            path: File to write.
            append: Continue an existing file, as for a resumed run, instead of replacing it.
        """
        self.path = Path(path)
        self.append = append
        """Whether the first write continues an existing file."""
        self._file: IO[str] | None = None
        self._plan: RunPlan | None = None
        self._predicted: dict[tuple[int, str], dict[str, int]] = {}

    def expect(self, plan: RunPlan) -> None:
        """Write what was predicted beside what is measured, from the next row on."""
        self._plan, self._predicted = plan, {}

    def write(self, rows: Sequence[MemoryRow]) -> None:
        """Append the rows of one step."""
        if self._file is None:
            self._file = self._open()
        self._file.writelines(
            json.dumps({**_as_json(row), **self._of_plan(row)}) + "\n" for row in rows
        )
        self._file.flush()

    def _of_plan(self, row: MemoryRow) -> dict[str, int]:
        if self._plan is None:
            return {}
        key = (row.rank, row.phase)
        if key not in self._predicted:
            timeline = self._plan.walk_of(row.rank)
            held = predicted_phases(timeline)[row.phase]
            self._predicted[key] = {
                **{f"predicted_{kind}_bytes": size for kind, size in held.items()},
                "predicted_total_bytes": sum(held.values()),
                "predicted_peak_bytes": timeline.peak.total,
            }
        return self._predicted[key]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
            self.append = True  # a late row must not replace the file

    def _open(self) -> IO[str]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.append and self.path.exists():
            # A crash in the middle of a write leaves half a line, which would spoil the next one.
            text = self.path.read_bytes()
            whole = text.rfind(b"\n") + 1
            if whole < len(text):
                os.truncate(self.path, whole)
        return self.path.open("a" if self.append else "w", encoding="utf-8")


def read_jsonl(path: str | os.PathLike[str]) -> list[MemoryRow]:
    """Read the rows back that a `JsonlSink` wrote.

    A file that was continued by a resumed run can hold a step twice; the last one counts.

    Args:
        path: File to read.

    Returns:
        Rows by step, in the order of the file within a step.

    Raises:
        ConfigError: If a line is not a row of a memory curve.
        FileNotFoundError: If there is no such file.
    """
    rows: dict[tuple[int, str, int], MemoryRow] = {}
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = _from_json(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"Expected a memory row in line {number} of {path}, got {line.strip()!r}; "
                    "remove the line, or give a file that JsonlSink wrote."
                ) from error
            rows[row.step, row.phase, row.rank] = row
    return sorted(rows.values(), key=lambda row: row.step)


def _as_json(row: MemoryRow) -> dict[str, int | float | str]:
    numbers = {name: getattr(row, name) for name in _NUMBERS}
    numbers |= {name: getattr(row, name) for name in _TIER_NUMBERS if any(row.by_tier.values())}
    return {
        "step": row.step,
        "phase": row.phase,
        "rank": row.rank,
        **numbers,
        "total_bytes": row.total_bytes,
        **row.by_cost,
    }


def _from_json(value: dict[str, int | float | str]) -> MemoryRow:
    value = {"snapshot_bytes": 0, **value}  # files of earlier versions do not have it
    numbers = {name: int(value[name]) for name in _NUMBERS}
    numbers |= {name: int(value.get(name, 0)) for name in _TIER_NUMBERS}
    costs: dict[str, Any] = {name: float(value.get(name, 0.0)) for name in COSTS}
    return MemoryRow(
        step=int(value["step"]),
        phase=str(value["phase"]),
        rank=int(value["rank"]),
        **numbers,
        **costs,
    )
