"""The tracker on a stand-in engine, in a process group of one rank."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardplug.errors import ConfigError
from shardplug.memory import MemoryTracker
from shardplug.process import meter
from shardplug.process.memory_row import MemoryRow
from tests.unit.memory.fakes import FakeEngine, ListSink

MIB = 2**20


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _states(row: MemoryRow) -> tuple[int, ...]:
    return tuple(row.by_kind.values())[:4]


def test_rows_hold_the_books_of_each_phase() -> None:
    engine, sink = FakeEngine(), ListSink()
    tracker = MemoryTracker(engine, [sink])
    engine.step()
    engine.step()
    assert [row.step for rows in sink.steps for row in rows] == [1, 1, 1, 2, 2, 2]
    first, second = sink.steps
    assert [row.phase for row in first] == ["after_forward", "after_backward", "after_step"]
    assert [_states(row) for row in first] == [(10, 40, 0, 0), (10, 0, 20, 0), (10, 0, 20, 80)]
    assert [_states(row) for row in second] == [(10, 40, 0, 80), (10, 0, 20, 80), (10, 0, 20, 80)]
    assert tracker.last_rows == second
    assert tracker.total_bytes == max(row.total_bytes for row in second)
    assert tracker.peak_bytes == max(row.peak_bytes for row in second)
    for row in (*first, *second):
        assert row.rank == 0 and row.other_bytes >= 0
        assert row.peak_bytes >= row.total_bytes == sum(row.by_kind.values())


def test_other_and_peak_follow_real_memory() -> None:
    gc.collect()  # what earlier tests left is not to go meanwhile
    ctypes.CDLL(None).malloc_trim(0)
    engine, sink = FakeEngine(), ListSink()
    MemoryTracker(engine, [sink])
    kept = torch.ones(256 * MIB, dtype=torch.uint8)
    passing = torch.ones(512 * MIB, dtype=torch.uint8)
    del passing
    engine.step()
    del kept
    engine.step()
    engine.step()
    forward = sink.steps[0][0]
    # Resident memory is rough, and other threads change it too; blocks this large are mapped and
    # given back one by one.
    assert forward.other_bytes > 224 * MIB
    assert forward.peak_bytes - forward.total_bytes > 448 * MIB
    assert forward.held_bytes > 256 * MIB
    last = sink.steps[2][0]
    assert last.other_bytes < forward.other_bytes - 192 * MIB
    assert last.peak_bytes < forward.peak_bytes - 400 * MIB  # each step has a peak of its own


def test_books_above_what_is_resident_leave_no_negative_other() -> None:
    engine, sink = FakeEngine(), ListSink()
    MemoryTracker(engine, [sink])
    engine.emit("after_forward", gathered=2**40)  # never touched, so never resident
    engine.emit("after_step")
    assert [row.other_bytes for row in sink.steps[0]] == [0, 0]
    assert sink.steps[0][0].total_bytes == 2**40 + 10 == sink.steps[0][0].peak_bytes


def test_several_micro_batches_show_the_largest_books() -> None:
    engine, sink = FakeEngine(), ListSink()
    MemoryTracker(engine, [sink])
    for gradients in (7, 30, 20):
        engine.emit("after_forward", gathered=40)
        engine.emit("after_backward", gathered=0, gradients=gradients)
    engine.emit("after_step")
    assert [_states(row) for row in sink.steps[0]] == [
        (10, 40, 30, 0),
        (10, 0, 30, 0),
        (10, 0, 20, 0),
    ]


def test_evaluation_is_not_part_of_a_step() -> None:
    engine, sink = FakeEngine(), ListSink()
    MemoryTracker(engine, [sink])
    engine.step()
    with torch.no_grad():
        engine.emit("after_forward", gathered=10**6)
    engine.step()
    assert sink.steps[1][0].gathered_bytes == 40


def test_every_n_steps_logs_the_first_and_multiples() -> None:
    engine, sink = FakeEngine(), ListSink()
    tracker = MemoryTracker(engine, [sink], every_n_steps=4, first_step=5)
    for _ in range(8):
        engine.step()
    assert [rows[0].step for rows in sink.steps] == [6, 8, 12]
    assert tracker.step == 13


def test_close_stops_and_may_be_called_twice() -> None:
    engine, sink = FakeEngine(), ListSink()
    tracker = MemoryTracker(engine, [sink])
    engine.step()
    tracker.close()
    tracker.close()
    engine.step()
    assert (len(sink.steps), sink.closed, engine.listeners) == (1, 1, [])


def test_only_rank_0_writes_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather", lambda out, own: [each.copy_(own) for each in out])
    engine, sink = FakeEngine(rank=1, world_size=2), ListSink()
    tracker = MemoryTracker(engine, [sink])
    engine.step()
    tracker.close()
    assert (sink.steps, sink.closed, tracker.last_rows) == ([], 0, ())
    assert tracker.peak_bytes >= tracker.total_bytes > 0


class _BrokenSink(ListSink):
    def write(self, rows: tuple[MemoryRow, ...]) -> None:
        raise OSError("no space left")


def test_a_failing_sink_is_named_and_dropped() -> None:
    engine, broken, sink = FakeEngine(), _BrokenSink(), ListSink()
    tracker = MemoryTracker(engine, [broken, sink])
    with pytest.warns(UserWarning, match="_BrokenSink failed .* OSError: no space left"):
        engine.step()
    engine.step()
    tracker.close()
    assert (len(sink.steps), sink.closed, broken.closed) == (2, 1, 0)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="Expected every_n_steps >= 1, got 0"):
        MemoryTracker(FakeEngine(), every_n_steps=0)
    with pytest.raises(ConfigError, match="Expected first_step >= 0, got -1"):
        MemoryTracker(FakeEngine(), first_step=-1)
    engine = FakeEngine()
    engine.states["disk"] = 1
    with pytest.raises(ConfigError, match="accounts of master_shards, .* got disk, gathered"):
        MemoryTracker(engine)
    assert engine.listeners == []


def test_without_proc_the_books_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(meter, "_PROC", tmp_path)
    engine, sink = FakeEngine(), ListSink()
    with pytest.warns(UserWarning, match="memory curves show model states only"):
        MemoryTracker(engine, [sink])
    engine.step()
    assert [row.other_bytes for row in sink.steps[0]] == [0, 0, 0]
    assert [row.peak_bytes for row in sink.steps[0]] == [50, 50, 110]


def test_peak_that_cannot_be_reset_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("statm", "status"):
        (tmp_path / name).write_text((Path("/proc/self") / name).read_text())
    (tmp_path / "clear_refs").mkdir()  # cannot be written
    monkeypatch.setattr(meter, "_PROC", tmp_path)
    engine, sink = FakeEngine(), ListSink()
    with pytest.warns(UserWarning, match="are those since the process started"):
        MemoryTracker(engine, [sink])
    engine.step()  # warns once
    assert len(sink.steps[0]) == 3
