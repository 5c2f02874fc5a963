"""Reads shards from a drive before they are gathered, in the order of the steps before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardplug.params.pieces import Reading
from shardplug.params.stored_shard import ShardHolder

__all__ = ["ReadAhead"]

_Place = tuple[int, int]
"""The last two units that were gathered: forward and backward pass the same units otherwise."""


class ReadAhead:
    """Learns which unit is gathered after which, and begins to read that one meanwhile.

    What it foresees wrongly costs a read, and what it does not foresee a wait. It holds the unit
    that is gathered and `prefetch` more.

    Args:
        prefetch: Units that are read ahead.
    """

    def __init__(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._units: list[list[ShardHolder]] = []
        self._next: dict[_Place, int] = {}
        self._place: _Place = (-1, -1)
        self._taken: set[ShardHolder] = set()
        self._begun: dict[int, dict[ShardHolder, Reading]] = {}

    def add_unit(self, shards: Sequence[ShardHolder]) -> None:
        """Look after the shards of one more unit."""
        for shard in shards:
            shard.unit = len(self._units)
        self._units.append(list(shards))

    @property
    def held_bytes(self) -> int:
        """Memory of what was read and not yet gathered."""
        return sum(reading.num_bytes for unit in self._begun.values() for reading in unit.values())

    def acquire(self, shard: ShardHolder) -> torch.Tensor:
        """Return the padded shard to gather, which is the caller's then.

        Raises:
            StorageError: When it could not be read.
        """
        if shard.unit != self._place[1] or shard in self._taken:
            self._enter(shard.unit)
        self._taken.add(shard)
        reading = self._begun.get(shard.unit, {}).pop(shard, None) or shard.begin_gather()
        return reading.wait()

    def _enter(self, unit: int) -> None:
        self._next[self._place] = unit
        self._place = (self._place[1], unit)
        self._taken.clear()
        self._begin(unit)
        self.foresee()

    def foresee(self) -> None:
        """Begin to read the units that come next, and drop those that do not."""
        place = self._place
        coming: list[int] = []
        while len(coming) < self._prefetch and place in self._next:
            coming.append(self._next[place])
            place = (place[1], coming[-1])
        for unit in [u for u in self._begun if u not in coming and u != self._place[1]]:
            self.drop(unit)
        for unit in coming:
            self._begin(unit)

    def _begin(self, unit: int) -> None:
        if not self._begun.get(unit):
            self._begun[unit] = {shard: shard.begin_gather() for shard in self._units[unit]}

    def drop(self, unit: int) -> None:
        """Forget what was read of a unit."""
        for reading in self._begun.pop(unit, {}).values():
            reading.end()

    def drop_all(self) -> None:
        """Forget all that was read; its weights are about to change."""
        for unit in list(self._begun):
            self.drop(unit)
