"""Memory that a process really holds, read from the device's allocator or from the system."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

__all__ = ["Meter", "Reading", "make_meter"]

_PROC = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement, in bytes."""

    total: int
    """Model states and everything else, without the base of the process."""

    peak: int
    """Highest total since the last reset."""

    held: int
    """Raw number behind `total`: resident set size, or memory the allocator has reserved."""


class Meter(Protocol):
    """Source of measurements for one process."""

    def read(self, states_bytes: int) -> Reading:
        """Measure now; `books_bytes` is what the engine's accounting say is held."""

    def reset(self) -> None:
        """Start a new peak."""


def make_meter(device: torch.device, states_bytes: int) -> Meter:
    """Choose the meter for a device.

    Args:
        device: Device the model is on.
        books_bytes: What the engine's accounting hold now, needed to find the base of the process.
    """
    if device.type != "cpu":
        return _AllocatorMeter(device)
    try:
        return _ResidentMeter(states_bytes)
    except (OSError, ValueError, IndexError) as error:
        warnings.warn(
            f"The memory of this process cannot be read from {_PROC} ({error}), as on systems "
            "other than Linux: memory curves show model states only, and no activations.",
            stacklevel=3,
        )
        return _BooksMeter()


def private_bytes() -> int | None:
    """Return the resident memory of this process that is its own, or None where unknown."""
    try:
        import resource

        _, resident, shared = map(int, (_PROC / "statm").read_text().split()[:3])
    except (ImportError, OSError, ValueError):
        return None
    return (resident - shared) * resource.getpagesize()


class _AllocatorMeter:
    """Reads the caching allocator of a GPU; exact, and counts from zero."""

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._device = device
        self._allocated: Callable[[torch.device], int] = module.memory_allocated
        self._peak: Callable[[torch.device], int] = module.max_memory_allocated
        self._reserved: Callable[[torch.device], int] = module.memory_reserved
        self._reset: Callable[[torch.device], None] = module.reset_peak_memory_stats
        self.reset()

    def read(self, states_bytes: int) -> Reading:
        device = self._device
        return Reading(self._allocated(device), self._peak(device), self._reserved(device))

    def reset(self) -> None:
        self._reset(self._device)


class _ResidentMeter:
    """Reads the private memory of the process that is resident, above a base.

    Private leaves out mapped files, such as the code of libraries, which is read in as it is
    first used. The base is what is resident when the meter is made and is not accounted for:
    the interpreter, modules, data. The reading is rough. The C allocator may keep freed memory,
    which then counts as held; pages that were reserved but never written are not resident, so it
    can be below the accounting; and of the peak only the whole resident set is known, so it is
    taken to have fallen since by private memory alone.
    """

    def __init__(self, states_bytes: int) -> None:
        import resource  # not on Windows, where there is no /proc either

        self._page_bytes = resource.getpagesize()
        self._base_bytes = self._resident()[1] - states_bytes
        self._peak_resets = True
        self._highest()  # fails here, not in training, where the system does not say
        self.reset()

    def read(self, states_bytes: int) -> Reading:
        held, private = self._resident()
        total = private - self._base_bytes
        return Reading(total, total + max(0, self._highest() - held), held)

    def reset(self) -> None:
        if not self._peak_resets:
            return
        try:
            # 5: forget the high-water mark of the resident set. Nothing else changes.
            (_PROC / "clear_refs").write_text("5")
        except OSError as error:
            self._peak_resets = False
            warnings.warn(
                f"The peak of this process's memory cannot be reset ({error}): the peaks of the "
                "memory curve are those since the process started.",
                stacklevel=2,
            )

    def _resident(self) -> tuple[int, int]:
        """Bytes of the resident set, and of the private part of it."""
        _, resident, shared = map(int, (_PROC / "statm").read_text().split()[:3])
        return resident * self._page_bytes, (resident - shared) * self._page_bytes

    def _highest(self) -> int:
        status = (_PROC / "status").read_text()
        return int(status.split("VmHWM:", 1)[1].split(None, 1)[0]) * 1024


class _BooksMeter:
    """Knows nothing but the accounting."""

    def __init__(self) -> None:
        self._peak = 0

    def read(self, states_bytes: int) -> Reading:
        self._peak = max(self._peak, states_bytes)
        return Reading(states_bytes, self._peak, 0)

    def reset(self) -> None:
        self._peak = 0
