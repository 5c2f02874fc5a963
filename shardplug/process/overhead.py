"""What a process on CPU ranks holds besides what a plan counts, and what that leaves for training.

A limit of the host counts everything that a process has: the interpreter, libraries, the memory of
the collectives, and what the C allocator keeps of what was freed. A plan counts tensors. When
memory has run out, what is used less the model states, less the planned activations and less what
the C allocator keeps is what a changed setting will have to live with too.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass

from shardplug.process.limits import ControlGroup, headroom, process_limits, process_used
from shardplug.process.meter import private_bytes

__all__ = [
    "KEPT",
    "RETURNED",
    "THRESHOLD",
    "Used",
    "kept_by_malloc",
    "kept_share",
    "used_by_process",
    "used_now",
]

RETURNED = 0.08
"""By how much of the plan a process may hold more where freed memory goes back to the system:
docs/benchmarks/plan.md, "Memory of the process"."""

KEPT = 1.6
"""The same where the C allocator keeps it, above what there was when the model was sharded. The
most that was measured is 1.46: blocks that are recomputed, at stage 2, a plan of 58 MiB."""

THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
"""Variable with which glibc gives larger blocks back to the system as soon as they are freed."""

_PRIVATE = "private"


@dataclass(frozen=True, slots=True)
class Used:
    """What the limit that ends first counts for this process, in bytes."""

    now: int
    most: int | None
    """At which the limit is reached; None where none is known."""
    base: int
    """Of `now`, what was there besides the model when it was sharded."""
    limit: str = ""
    """The limit, in words."""
    kept: int = 0
    """Of `now`, what was freed and the C allocator keeps for later."""

    def overhead(self, states: int, beyond: int) -> int:
        """Return what is needed besides the plan; never less than at the start.

        Args:
            states: Model states that the engine holds.
            beyond: Activations, buffers and the like that are held by the plan.
        """
        return max(self.base, self.now - self.kept - states - beyond)


class _Mallinfo2(ctypes.Structure):
    """The sizes that glibc's `mallinfo2` returns, in bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def kept_by_malloc() -> int:
    """Return the bytes that were freed and glibc keeps; 0 with another C library."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)


def used_by_process() -> dict[str, int]:
    """Return what each kind of limit counts for this process now, in bytes."""
    private = private_bytes()
    return process_used() if private is None else {**process_used(), _PRIVATE: private}


def used_now(group: ControlGroup, base: Mapping[str, int], processes: int) -> Used | None:
    """Look at the limit of the host that ends first; None where the system does not say.

    Args:
        group: The control group.
        base: `used_by_process` when the model was sharded, without the model's own.
        processes: Ranks on this host.
    """
    used, limits = used_by_process(), process_limits()
    room = headroom(group, processes)
    if room is not None:
        words = f"{room.limit / 2**30:.3g} GiB, {room.source}"
        for key, limit in limits.items():
            if limit - used[key] <= room.free and key in base:
                # Exact, and counts what is not resident too.
                return Used(used[key], limit, base[key], words, kept_by_malloc())
    if _PRIVATE not in used or _PRIVATE not in base:
        return None
    now = used[_PRIVATE]
    if room is None:
        return Used(now, None, base[_PRIVATE], kept=kept_by_malloc())
    return Used(now, now + max(0, room.free), base[_PRIVATE], words, kept_by_malloc())


def kept_share() -> float:
    """Return by how much this process may hold more than a plan says, as a share of the plan."""
    return RETURNED if THRESHOLD in os.environ else KEPT
