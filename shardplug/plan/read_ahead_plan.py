"""What is read ahead of the gathers when parameters rest in files, as a plan plays it.

The rule is that of `shardplug.params.read_ahead`: after two units in a row comes what came after
them before.
"""

from __future__ import annotations

__all__ = ["AheadOfGathers"]


class AheadOfGathers:
    """Bytes in memory that were read and not yet gathered.

    Args:
        prefetch: Units read ahead.
        sizes: Bytes of each unit's shards as they are read.
    """

    def __init__(self, prefetch: int, sizes: list[int]) -> None:
        self._prefetch = prefetch
        self._sizes = sizes
        self._next: dict[tuple[int, int], int] = {}
        self._place = (-1, -1)
        self._begun: set[int] = set()

    @property
    def held(self) -> int:
        """Bytes now."""
        return sum(self._sizes[unit] for unit in self._begun)

    def enter(self, unit: int) -> None:
        """Begin a gather: its unit is read, if it is not yet, and what comes next."""
        self._next[self._place] = unit
        self._place = (self._place[1], unit)
        self._begun.add(unit)
        self._foresee()

    def take(self, unit: int) -> None:
        """The gather has taken what was read."""
        self._begun.discard(unit)

    def step(self) -> None:
        """An optimizer step: what was read is old, and the next forward's first units come."""
        self._begun.clear()
        self._foresee()

    def _foresee(self) -> None:
        place, coming = self._place, list[int]()
        while len(coming) < self._prefetch and place in self._next:
            coming.append(self._next[place])
            place = (place[1], coming[-1])
        self._begun &= {*coming, self._place[1]}
        self._begun |= set(coming)
