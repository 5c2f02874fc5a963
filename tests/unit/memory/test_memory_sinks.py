"""JSON lines and the picture."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardplug.errors import ConfigError
from shardplug.memory import JsonlSink, MemoryRow, PngSink, draw_png, read_jsonl
from tests.unit.memory.fakes import make_rows

LIGHT = """
import sys
import shardplug.memory
heavy = {"matplotlib", "wandb", "numpy.testing", "lightning", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""


def _png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_import_is_light() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=100)


def test_total_is_the_sum_of_the_kinds() -> None:
    row = make_rows(1)[0]
    base = row.master_shards_bytes
    assert row.total_bytes == 5 * base + 10
    assert list(row.by_kind.values()) == [base, base + 1, base + 2, base + 3, 0, base + 4]


def test_jsonl_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "memory.jsonl"
    sink = JsonlSink(path)
    assert not path.parent.exists()  # nothing is made before rank 0 writes
    sink.write(make_rows(1))
    assert len(read_jsonl(path)) == 6  # flushed
    sink.write(make_rows(2))
    sink.close()
    sink.close()
    assert read_jsonl(path) == make_rows(1) + make_rows(2)
    first = json.loads(path.read_text().splitlines()[0])
    assert first["total_bytes"] == make_rows(1)[0].total_bytes
    assert {"step", "phase", "rank", "other_bytes", "peak_bytes", "held_bytes"} < set(first)


def test_jsonl_replaces_or_continues(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    for step, append in ((1, False), (2, False), (3, True)):
        sink = JsonlSink(path, append=append)
        sink.write(make_rows(step))
        sink.close()
    assert read_jsonl(path) == make_rows(2) + make_rows(3)


def test_jsonl_after_a_crash_continues_on_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    sink = JsonlSink(path)
    sink.write(make_rows(1))
    sink.write(make_rows(2))
    sink.close()
    path.write_bytes(path.read_bytes()[:-10])  # killed in the middle of the last line
    resumed = JsonlSink(path, append=True)
    resumed.write(make_rows(2, num_ranks=1))  # step 2 again, from the checkpoint of step 1
    resumed.close()
    rows = read_jsonl(path)
    assert rows[:6] == make_rows(1)
    assert [(row.step, row.rank) for row in rows[6:]] == [(2, 0)] * 3 + [(2, 1)] * 2


def test_jsonl_names_a_broken_line(tmp_path: Path) -> None:
    path = tmp_path / "memory.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"Expected a memory row in line 1 of .*memory.jsonl"):
        read_jsonl(path)


def test_picture_is_drawn_at_close_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "memory.png"
    sink = PngSink(path, title="ZeRO stage 3 on 2 ranks")
    for step in range(1, 6):
        sink.write(make_rows(step))
    assert not path.parent.exists()
    sink.close()
    assert _png_size(path) == (1800, 750)
    assert path.stat().st_size > 20_000
    assert [p.name for p in path.parent.iterdir()] == ["memory.png"]  # nothing left aside


@pytest.mark.parametrize(("num_steps", "num_ranks"), [(1, 1), (30, 1), (3, 12)])
def test_picture_of_few_and_many(tmp_path: Path, num_steps: int, num_ranks: int) -> None:
    rows = [row for step in range(num_steps) for row in make_rows(step + 1, num_ranks)]
    draw_png(rows, tmp_path / "memory.png")
    assert _png_size(tmp_path / "memory.png") == (1800, 750)


def test_bars_of_a_thousand_units_are_labelled_without_an_exponent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    words: list[str] = []
    annotate = Axes.annotate

    def listen(axes: Axes, text: str, *args: Any, **kwargs: Any) -> Any:
        words.append(text)
        return annotate(axes, text, *args, **kwargs)

    monkeypatch.setattr(Axes, "annotate", listen)
    draw_png(make_rows(1, unit_bytes=2300), tmp_path / "memory.png")
    assert words[:3] == ["997.", "1006", "1015"]  # KiB


def test_picture_keeps_the_highest_of_a_long_run(tmp_path: Path, monkeypatch: Any) -> None:
    drawn: list[list[MemoryRow]] = []
    monkeypatch.setattr(
        "shardplug.tracking.picture.draw_png", lambda rows, *_, **__: drawn.append(rows)
    )
    sink = PngSink(tmp_path / "memory.png")
    spike = 100_000  # a step number that gives the largest bytes, in the middle of the run
    for step in range(1, 1002):
        rows = make_rows(spike if step == 500 else step)
        sink.write([MemoryRow(**{**_fields(row), "step": step}) for row in rows])
    sink.close()
    (rows_drawn,) = drawn
    steps = sorted({row.step for row in rows_drawn})
    assert 120 <= len(steps) <= 240
    assert steps[-1] == 1001
    assert max(row.total_bytes for row in rows_drawn) == max(
        row.total_bytes for row in make_rows(spike)
    )


def _fields(row: MemoryRow) -> dict[str, Any]:
    return {name: getattr(row, name) for name in MemoryRow.__slots__}


def test_no_rows_no_picture(tmp_path: Path) -> None:
    PngSink(tmp_path / "memory.png").close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="Expected memory rows to draw"):
        draw_png([], tmp_path / "memory.png")


def test_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "shardplug\[memory\]"'):
        PngSink("memory.png")
