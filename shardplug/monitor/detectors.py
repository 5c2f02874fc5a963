"""What is unusual in a run's own course. Each detector sees every look and names what it finds.

All ranks see the same rows, so all find the same, without asking each other. Medians are used
throughout: single slow steps (a save, an evaluation) and single odd losses move them little.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

from shardplug.monitor.monitor_config import MonitorConfig
from shardplug.monitor.row import StepRow

__all__ = ["Detector", "detectors_of"]

_MAD_TO_DEVIATION = 1.4826  # median absolute deviation of a normal distribution: 1 / 1.4826 sigma
_LEAST_SPIKE = 0.1  # share of the median, so that a nearly constant loss has no spikes
_GIB = 2**30
_LEAST_GROWTH = (
    64 * 2**20
)  # what the system counts for a process moves by some MiB in a healthy run
_STILL_FALLS = 0.02  # share by which the recent loss may lie above its least, and fall all the same


class Detector(Protocol):
    """Looks at one row after the other."""

    def look(self, row: StepRow) -> str | None:
        """Say what is wrong, or None."""


def detectors_of(config: MonitorConfig) -> dict[str, Detector]:
    """Make the configured detectors, by name."""
    made: dict[str, Detector | None] = {
        "nonfinite": _NonFinite(),
        "loss_spike": _made(_LossSpike, config, config.loss_spike),
        "grad_norm_drift": _made(_GradNormDrift, config, config.grad_norm_drift),
        "throughput_drift": _made(_ThroughputDrift, config, config.throughput_drift),
        "memory_drift": _made(_MemoryDrift, config, config.memory_growth),
        "lagging_rank": _made(_LaggingRank, config, config.lag),
    }
    return {name: detector for name, detector in made.items() if detector is not None}


def _made(
    kind: Callable[[MonitorConfig, float], Detector], config: MonitorConfig, limit: float | None
) -> Detector | None:
    return None if limit is None else kind(config, limit)


class _NonFinite:
    """Said at the first look that it is found in, then at the tenth, the hundredth, and so on."""

    def __init__(self) -> None:
        self._looks = 0
        self._next = 1

    def look(self, row: StepRow) -> str | None:
        if not row.nonfinite:
            return None
        self._looks += 1
        if self._looks < self._next:
            return None
        self._next *= 10
        where = ", ".join(f"{name} of rank {rank}" for rank, name in row.nonfinite[:8])
        more = "" if len(row.nonfinite) <= 8 else f" and {len(row.nonfinite) - 8} more"
        count = f", in {self._looks} looks so far" if self._looks > 1 else ""
        return f"not finite: {where}{more}{count}"


class _LossSpike:
    def __init__(self, config: MonitorConfig, deviations: float) -> None:
        self._deviations = deviations
        self._warmup = max(config.warmup, config.recent)
        self._losses: deque[float] = deque(maxlen=config.window)
        self._silent = 0
        self._seen = 0

    def look(self, row: StepRow) -> str | None:
        loss = row.loss
        if loss is None or not math.isfinite(loss):
            return None
        self._seen += 1
        self._silent -= 1
        found = None
        if self._seen > self._warmup:
            usual = median(self._losses)
            deviation = _MAD_TO_DEVIATION * median(abs(value - usual) for value in self._losses)
            rise = loss - usual
            if rise > max(self._deviations * deviation, _LEAST_SPIKE * abs(usual)):
                found = f"loss {loss:.4g} where {usual:.4g} +- {deviation:.2g} is usual"
        self._losses.append(loss)  # spikes too: a new level becomes the usual one
        if found is None or self._silent > 0:
            return None
        self._silent = len(self._losses) // 5
        return found


class _Drift:
    """The median of what is recent against the median of the first window."""

    def __init__(self, config: MonitorConfig) -> None:
        self._warmup = config.warmup
        self._window = config.window
        self._first: list[float] = []
        self._recent: deque[float] = deque(maxlen=config.recent)
        self._base: float | None = None

    def medians(self, value: float | None) -> tuple[float, float] | None:
        """Return the first window's and the recent median, once there are both."""
        if value is None or not math.isfinite(value):
            return None
        if self._warmup > 0:
            self._warmup -= 1
            return None
        if self._base is None:
            self._first.append(value)
            if len(self._first) == self._window:
                self._base = median(self._first)
                self._first.clear()
            return None
        self._recent.append(value)
        if len(self._recent) < (self._recent.maxlen or 0):
            return None
        return self._base, median(self._recent)

    def rebase(self, value: float) -> None:
        """Take what was found as the new base, so that it is said once."""
        self._base = value
        self._recent.clear()


class _GradNormDrift(_Drift):
    def __init__(self, config: MonitorConfig, times: float) -> None:
        super().__init__(config)
        self._times = times
        self._loss = _Drift(config)
        self._least = math.inf

    def look(self, row: StepRow) -> str | None:
        both = self.medians(row.grad_norm)
        # Gradients of a network that learns may grow for a while: a drift that much larger is one
        # though the loss still falls.
        times = self._times**2 if self._falls(row.loss) else self._times
        if both is None or both[1] <= times * both[0]:
            return None
        self.rebase(both[1])
        return f"gradient norm {both[1]:.4g}, where it was {both[0]:.4g}"

    def _falls(self, value: float | None) -> bool:
        both = self._loss.medians(value)
        if both is None:
            return False
        first, recent = both
        self._least = min(self._least, recent)
        return recent < first and recent <= self._least + _STILL_FALLS * abs(first)


class _ThroughputDrift(_Drift):
    def __init__(self, config: MonitorConfig, share: float) -> None:
        super().__init__(config)
        self._share = share

    def look(self, row: StepRow) -> str | None:
        rate, unit = row.tokens_per_second, "tokens/s"
        if rate is None:
            rate, unit = (1 / row.seconds if row.seconds > 0 else None), "steps/s"
        both = self.medians(rate)
        if both is None or both[1] >= (1 - self._share) * both[0]:
            return None
        self.rebase(both[1])
        return f"{both[1]:.4g} {unit}, where it was {both[0]:.4g}"


class _MemoryDrift:
    """Memory whose least value rises from fifth to fifth of a window."""

    def __init__(self, config: MonitorConfig, share: float) -> None:
        self._warmup = config.warmup
        self._size = config.recent
        self._share = share
        self._block: list[tuple[int, ...]] = []
        self._least: deque[tuple[int, ...]] = deque(maxlen=5)

    def look(self, row: StepRow) -> str | None:
        if not row.memory_bytes:
            return None
        if self._warmup > 0:
            self._warmup -= 1
            return None
        self._block.append(row.memory_bytes)
        if len(self._block) < self._size:
            return None
        self._least.append(tuple(min(column) for column in zip(*self._block, strict=True)))
        self._block.clear()
        if len(self._least) < 5:
            return None
        for rank, least in enumerate(zip(*self._least, strict=True)):
            rises = all(before < after for before, after in zip(least, least[1:], strict=False))
            rise = least[-1] - least[0]
            # The second half rises nearly as much as the first: what settles down is no leak.
            goes_on = least[4] - least[2] >= 0.75 * (least[2] - least[0])
            if rises and goes_on and rise > max(self._share * least[0], _LEAST_GROWTH):
                self._least.clear()
                return (
                    f"memory of rank {rank} grew from {least[0] / _GIB:.3f} to "
                    f"{least[-1] / _GIB:.3f} GiB over {4 * self._size} looks, and goes on"
                )
        return None


class _LaggingRank:
    """A rank that works longer than the others, who wait for it."""

    def __init__(self, config: MonitorConfig, times: float) -> None:
        self._warmup = config.warmup
        self._times = times
        self._recent: deque[StepRow] = deque(maxlen=config.recent)

    def look(self, row: StepRow) -> str | None:
        if len(row.busy_seconds) < 2:
            return None
        if self._warmup > 0:
            self._warmup -= 1
            return None
        self._recent.append(row)
        if len(self._recent) < (self._recent.maxlen or 0):
            return None
        busy = [median(c) for c in zip(*(r.busy_seconds for r in self._recent), strict=True)]
        seconds = median(r.seconds for r in self._recent)
        slowest = max(range(len(busy)), key=busy.__getitem__)
        others = median(value for rank, value in enumerate(busy) if rank != slowest)
        extra = busy[slowest] - others
        if busy[slowest] <= self._times * others or extra <= 0.1 * seconds:
            return None
        self._recent.clear()
        return (
            f"rank {slowest} works {busy[slowest]:.3g} s in a step of {seconds:.3g} s, the others "
            f"{others:.3g} s, and wait for it"
        )
