"""Counts what torch's CPU allocator hands out: an exact peak, to hold predictions against."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["CountedAllocations"]


class CountedAllocations:
    """Sees every allocation of tensors on the CPU, those inside of kernels too.

    The allocator reports to torch's profiler; freed memory is counted as gone at once, whatever
    the C allocator keeps. Only allocations of the thread that entered the context, and of
    backwards it started, are seen; what was there before is not. For short runs: all events are
    kept until the end.

        with CountedAllocations() as counted:
            model = build()
            for step in range(2):
                with counted.stretch(f"step {step}"):
                    train(model)
        counted.peak("step 1")
    """

    def __init__(self) -> None:
        self._profile: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._totals: list[tuple[float, int]] = []
        self._stretches: dict[str, tuple[float, float]] = {}

    def __enter__(self) -> CountedAllocations:
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        self._totals = list(_totals(events))
        for event in events:
            if event.get("cat") == "user_annotation":
                self._stretches[event["name"]] = (event["ts"], event["ts"] + event["dur"])

    @staticmethod
    def stretch(name: str) -> torch.profiler.record_function:
        """Name a stretch of the run."""
        return record_function(name)

    def peak(self, stretch: str) -> int:
        """Return the most bytes that were allocated during a stretch."""
        begin, end = self._stretches[stretch]
        before = [total for when, total in self._totals if when < begin]
        inside = [total for when, total in self._totals if begin <= when <= end]
        return max([*before[-1:], *inside])

    def totals(self, stretch: str) -> list[int]:
        """Return the bytes allocated after each event of a stretch."""
        begin, end = self._stretches[stretch]
        return [total for when, total in self._totals if begin <= when <= end]


def _totals(events: list[dict[str, Any]]) -> Iterator[tuple[float, int]]:
    """Add allocations up; what was allocated before the count and goes within it is left out."""
    memory = [event for event in events if event.get("name") == "[memory]"]
    memory.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
    sizes: dict[int, int] = {}
    total = 0
    for event in memory:
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            # An address that is handed out again was freed, by a thread that was not watched.
            total += size - sizes.get(address, 0)
            sizes[address] = size
        else:
            total -= sizes.pop(address, 0)
        yield event["ts"], total
