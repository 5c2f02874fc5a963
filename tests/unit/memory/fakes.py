"""A stand-in for the engine: books that a test sets, phases that a test triggers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from shardplug.memory import MemoryRow


class FakeEngine:
    """Has what a tracker needs of a ZeroEngine, for one rank on the CPU."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.device = torch.device("cpu")
        self.models: list[torch.nn.Module] = []
        self.rank = rank
        self.world_size = world_size
        self.config = SimpleNamespace(stage=3)
        self.states = {"master_shards": 10, "gathered": 0, "gradients": 0, "optimizer_state": 0}
        self.states["snapshot"] = 0
        self.listeners: list[Callable[[str], None]] = []

    def memory(self) -> dict[str, int]:
        return dict(self.states)

    def add_phase_listener(self, fn: Callable[[str], None]) -> None:
        self.listeners.append(fn)

    def remove_phase_listener(self, fn: Callable[[str], None]) -> None:
        self.listeners.remove(fn)

    def emit(self, phase: str, **states: int) -> None:
        self.states.update(states)
        for listener in list(self.listeners):
            listener(phase)

    def step(self) -> None:
        """One optimizer step of one micro-batch, with books that differ in each phase."""
        self.emit("after_forward", gathered=40, gradients=0)
        self.emit("after_backward", gathered=0, gradients=20)
        self.emit("after_step", optimizer_state=80)


class ListSink:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[MemoryRow, ...]] = []
        self.closed = 0

    def write(self, rows: tuple[MemoryRow, ...]) -> None:
        self.steps.append(rows)

    def close(self) -> None:
        self.closed += 1


def make_rows(step: int, num_ranks: int = 2, unit_bytes: int = 2**20) -> list[MemoryRow]:
    """Rows of one step in which every number is another one."""
    rows = []
    for rank in range(num_ranks):
        for index, phase in enumerate(("after_forward", "after_backward", "after_step")):
            base = unit_bytes * (step * 100 + rank * 10 + index + 1)
            rows.append(
                MemoryRow(
                    step=step,
                    phase=phase,
                    rank=rank,
                    master_shards_bytes=base,
                    gathered_bytes=base + 1,
                    gradients_bytes=base + 2,
                    optimizer_state_bytes=base + 3,
                    snapshot_bytes=0,
                    other_bytes=base + 4,
                    peak_bytes=6 * base,
                    held_bytes=7 * base,
                )
            )
    return rows
