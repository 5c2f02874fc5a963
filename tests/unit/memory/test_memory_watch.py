"""What is said about a run: once, by rank and kind."""

from __future__ import annotations

from dataclasses import replace

from shardplug.memory import Finding, MemoryRow
from shardplug.tracking.alerts import Watch
from tests.unit.memory.fakes import make_rows

MIB = 2**20


def _even(step: int, ranks: int = 4) -> list[MemoryRow]:
    rows = make_rows(step, 1, unit_bytes=MIB)
    return [replace(row, rank=rank) for rank in range(ranks) for row in rows]


def _look(watch: Watch, steps: list[list[MemoryRow]]) -> list[Finding]:
    return [finding for rows in steps for finding in watch.look(rows)]


def test_even_ranks_say_nothing() -> None:
    assert _look(Watch(), [_even(1), _even(1), _even(1)]) == []


def test_a_rank_that_holds_more_is_named_within_a_step() -> None:
    rows = [
        replace(row, gradients_bytes=row.gradients_bytes + 300 * MIB) if row.rank == 2 else row
        for row in _even(1)
    ]
    watch = Watch()
    (finding,) = watch.look(rows)
    assert finding.about == "uneven"
    assert "Rank 2 holds 0.293 GiB more than the others after forward of step 1" in finding.message
    assert "most of it gradients" in finding.message
    assert watch.look(rows) == [], "said once"


def test_what_is_read_roughly_is_given_more_room() -> None:
    def other(size: int) -> list[MemoryRow]:
        rows = [replace(row, other_bytes=0) for row in make_rows(0, 2, unit_bytes=1)]
        return [replace(row, other_bytes=size) if row.rank else row for row in rows]

    assert Watch(exact=False).look(other(8 * MIB)) == []
    assert len(Watch(exact=True).look(other(8 * MIB))) == 1
    assert len(Watch(exact=False).look(other(40 * MIB))) == 1


def test_a_leak_on_one_rank_is_named_with_its_kind() -> None:
    def leaking(step: int) -> list[MemoryRow]:
        return [
            replace(row, step=step, other_bytes=row.other_bytes + step * MIB * (row.rank == 1))
            for row in _even(1)
        ]

    found = _look(Watch(), [leaking(step) for step in range(1, 60)])
    assert [finding.about for finding in found] == ["growth"]
    assert (
        "Memory of rank 1 has grown" in found[0].message and "most of it other" in found[0].message
    )
