"""Which tests take long: tests/slow.txt."""

from __future__ import annotations

from pathlib import Path

LIST = Path(__file__).parents[1] / "slow.txt"


def slow_tests() -> dict[str, tuple[str, ...]]:
    """Return the beginnings of the tests' ids, by the mark that these get."""
    found: dict[str, tuple[str, ...]] = {}
    mark = ""
    for line in LIST.read_text().splitlines():
        if line.startswith("["):
            mark = line.strip("[]")
        elif line and not line.startswith("#"):
            found[mark] = (*found.get(mark, ()), line)
    return found
