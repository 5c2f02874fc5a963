"""Limits of this process's memory on its host, and how near they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ControlGroup",
    "Headroom",
    "headroom",
    "host_available",
    "process_limits",
    "process_used",
]

_PROC = Path("/proc/self")
_MOUNT = Path("/sys/fs/cgroup")
_LIMITS = {
    "address": "the limit of the address space (ulimit -v)",
    "data": "the limit of the process's data (ulimit -d)",
}
_UNLIMITED = 2**60  # version 1 writes a number near 2^63 where there is no limit


@dataclass(frozen=True, slots=True)
class Headroom:
    """What may still be allocated on the host."""

    free: int
    """Bytes."""

    limit: int
    """Bytes of the limit that ends first."""

    source: str
    """What that limit is, in words."""


class ControlGroup:
    """The memory limit of the control group (version 2 or 1) that this process is in.

    Args:
        folder: The group's folder; None finds it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = _find() if folder is None else folder
        self._second = self._folder is not None and (self._folder / "memory.current").exists()
        self._kills_before = self._events().get("oom_kill", 0)
        self._high_before = self._events().get("high", 0)

    @property
    def limit(self) -> int | None:
        """Bytes at which the system kills or slows the group down; None without a limit."""
        names = ("memory.max", "memory.high") if self._second else ("memory.limit_in_bytes",)
        found = [n for n in map(self._number, names) if n is not None and n < _UNLIMITED]
        return min(found, default=None)

    @property
    def used(self) -> int | None:
        """Bytes the group uses that the system cannot simply drop, such as cached files."""
        name = "memory.current" if self._second else "memory.usage_in_bytes"
        whole = self._number(name)
        if whole is None:
            return None
        key = "inactive_file" if self._second else "total_inactive_file"
        return max(0, whole - self._table("memory.stat").get(key, 0))

    @property
    def kills(self) -> int:
        """Processes of the group that were killed for memory since this object was made."""
        return self._events().get("oom_kill", 0) - self._kills_before

    def near(self, share: float = 0.95) -> str:
        """Say that the limit is near, or nothing; cheap enough for every phase of a step."""
        limit = self.limit
        if limit is None:
            return ""
        name = "memory.current" if self._second else "memory.usage_in_bytes"
        whole = self._number(name)
        if whole is None or whole < 0.8 * limit:
            return ""
        used, high = self.used or 0, self._events().get("high", 0)
        if used < share * limit and (high == self._high_before or used < 0.8 * limit):
            return ""
        return (
            f"the control group {self._folder} uses {used / 2**30:.3g} of the "
            f"{limit / 2**30:.3g} GiB it may: at the limit the system kills a process, which "
            "raises no error"
        )

    def _events(self) -> dict[str, int]:
        return self._table("memory.events" if self._second else "memory.oom_control")

    def _number(self, name: str) -> int | None:
        text = self._read(name).strip()
        return int(text) if text.isdigit() else None  # "max" is no limit

    def _table(self, name: str) -> dict[str, int]:
        rows = [line.split() for line in self._read(name).splitlines()]
        return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}

    def _read(self, name: str) -> str:
        if self._folder is None:
            return ""
        try:
            return (self._folder / name).read_text()
        except OSError:
            return ""


def _find() -> Path | None:
    """Return the folder of the innermost group that has a limit, or of the process's own."""
    try:
        lines = (_PROC / "cgroup").read_text().splitlines()
    except OSError:
        return None
    candidates: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        mount = _MOUNT / "memory" if controllers else _MOUNT
        place = mount / path.strip("/")
        # In a container the path may be the host's, and the mount the group itself.
        candidates += [p for p in (place, *place.parents) if p == mount or mount in p.parents]
    with_files = [
        folder
        for folder in candidates
        if (folder / "memory.current").exists() or (folder / "memory.usage_in_bytes").exists()
    ]
    limited = [folder for folder in with_files if ControlGroup(folder).limit is not None]
    return next(iter([*limited, *with_files]), None)


def process_used() -> dict[str, int]:
    """Return what this process has mapped, in bytes: "address" (all) and "data" (its own)."""
    try:
        rows = [line.split() for line in (_PROC / "status").read_text().splitlines()]
    except OSError:
        return {}
    sizes = {row[0]: int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}
    names = {"address": "VmSize:", "data": "VmData:"}
    return {key: sizes[name] for key, name in names.items() if name in sizes}


def process_limits() -> dict[str, int]:
    """Return the limits of this process, in bytes, by the same keys, where there are any."""
    try:
        import resource
    except ImportError:  # not on Windows
        return {}
    found = {
        "address": resource.getrlimit(resource.RLIMIT_AS)[0],
        "data": resource.getrlimit(resource.RLIMIT_DATA)[0],
    }
    return {key: size for key, size in found.items() if size != resource.RLIM_INFINITY}


def host_available() -> int | None:
    """Return the bytes that programs may still use of the host's memory, as the system says."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def headroom(group: ControlGroup, processes: int = 1) -> Headroom | None:
    """Return what may still be allocated before the nearest limit of the host.

    Args:
        group: The control group.
        processes: Processes of this job on the host, which share it.
    """
    found: list[Headroom] = []
    used_here = process_used()
    for key, size in process_limits().items():
        if key in used_here:
            found.append(Headroom(size - used_here[key], size, _LIMITS[key]))
    limit, used = group.limit, group.used
    if limit is not None and used is not None:
        found.append(Headroom((limit - used) // processes, limit, "the control group's limit"))
    available = host_available()
    if available is not None:
        total = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        found.append(Headroom(available // processes, total, "the host's memory"))
    return min(found, key=lambda room: room.free, default=None)
