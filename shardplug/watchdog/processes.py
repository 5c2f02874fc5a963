"""What a rank knows of another rank's process on the same machine."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Process", "State"]

State = Literal["lives", "stopped", "gone", "unknown"]

_STATES: dict[str, State] = {"T": "stopped", "Z": "gone", "X": "gone", "x": "gone"}


@dataclass(frozen=True, slots=True)
class Process:
    """A process, named so that no later one with its number is taken for it."""

    host: str
    """Machine and namespace of process numbers: two containers on one machine differ."""

    pid: int
    """Process number."""

    started: str
    """Start time in the system's ticks; empty where the system does not tell."""

    @classmethod
    def own(cls) -> Process:
        """Describe this process."""
        pid = os.getpid()
        try:
            namespace = os.readlink("/proc/self/ns/pid")
        except OSError:
            namespace = ""
        return cls(f"{socket.gethostname()} {namespace}".strip(), pid, _stat(pid)[1])

    @classmethod
    def read(cls, text: str) -> Process:
        """Read what `write` has written."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """Write it for another rank."""
        return json.dumps(asdict(self))

    def state(self, seen_from: Process) -> State:
        """Ask the system how the process is; "unknown" on another machine, and without /proc."""
        if self.host != seen_from.host or not self.started:
            return "unknown"
        letter, started = _stat(self.pid)
        if started != self.started:
            return "gone"
        return _STATES.get(letter, "lives")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]}"


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state letter and start time; empty strings without such a process."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]
