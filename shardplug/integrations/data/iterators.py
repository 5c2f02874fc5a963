"""The iterators behind a resumable DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardplug.integrations.common import scoped_rng as rng
from shardplug.windows import Together

__all__ = ["Counted", "Later", "PastFirst", "Position"]


@dataclass
class Position:
    """Where the iterator under way is."""

    before_fetch: Callable[[], None]
    beginning: Callable[[], AbstractContextManager[None]]
    """Context that the iterator of a new epoch is made in."""
    resumed: Callable[[int, int], None] = lambda saved, skipped: None
    """Told how many batches the saved run had used, and how many of this loader's those are."""
    together: Together | None = None
    """Reads a batch in step with the other ranks, where their data may end at different times."""
    batches: int = 0
    """Batches of this epoch handed out."""
    at_start: dict[str, Any] | None = None
    """Random states when the iterator was made, if the order depends on them."""
    at_first: dict[str, Any] | None = None
    """Random states before the first batch."""
    generators: list[torch.Tensor] = field(default_factory=list)
    """States of the loader's and the samplers' own generators when the iterator was made."""
    is_reset: bool = False
    """Whether persistent workers began this epoch, which draws no new seed for them."""
    pending: dict[str, Any] | None = None
    """State to resume from at the next `iter`."""


class PastFirst:
    """A sampler whose first entries are drawn, but not handed out.

    Args:
        sampler: The sampler.
        count: Entries to draw in vain, the first time.
        state: Random states to draw them from, where they are drawn at the first batch.
        making_state: The same, where they are drawn while the iterator is made; None for those
            that the iterator is made in.
    """

    def __init__(
        self,
        sampler: Any,
        count: int,
        state: dict[str, Any] | None,
        making_state: dict[str, Any] | None,
    ) -> None:
        self._sampler = sampler
        self._count = count
        self._state = state
        self._making_state = making_state
        self._is_spent = False
        self.used = False
        self.making_iterator = False

    def __iter__(self) -> Iterator[Any]:
        self.used = True
        # Persistent workers keep the sampler for their later epochs, which are whole.
        return iter(self._sampler) if self._is_spent else self._rest()

    def __len__(self) -> int:
        return len(self._sampler)

    def _rest(self) -> Iterator[Any]:
        # Runs at the first entry: iterators that no entry is taken from do not count.
        self._is_spent = True
        # With workers the loader draws indices at once, from the state it was made in.
        with rng.replaying(self._making_state if self.making_iterator else self._state):
            iterator = iter(self._sampler)
            for _ in range(self._count):
                next(iterator, None)
        yield from iterator


class Counted(Iterator[Any]):
    """The loader's iterator, counting the batches it hands out."""

    def __init__(
        self,
        iterator: Iterator[Any],
        position: Position,
        *,
        wants_state: bool = False,
        drop: int = 0,
    ) -> None:
        self._iterator = iterator
        self._position = position
        self._wants_state = wants_state
        self._drop = drop
        if position.together is not None:
            position.together.begin(position.batches)

    def __next__(self) -> Any:
        position = self._position
        if self._wants_state:
            self._wants_state = False
            position.at_first = rng.rng_state()
        if self._drop:
            with rng.replaying(position.at_first):
                for _ in range(self._drop):
                    next(self._iterator, None)
            self._drop = 0
        position.before_fetch()
        if position.together is None:
            batch = next(self._iterator)
        else:
            batch = position.together.fetch(lambda: next(self._iterator))
        position.batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Later(Iterator[Any]):
    """The next epoch of a saved run: begun at the first batch, from the restored random state."""

    def __init__(self, begin: Callable[[], Iterator[Any]], position: Position) -> None:
        self._begin = begin
        self._position = position
        self._iterator: Counted | None = None

    def __next__(self) -> Any:
        if self._iterator is None:
            self._position.before_fetch()
            iterator = self._begin()
            wants_state = self._position.at_start is not None
            self._iterator = Counted(iterator, self._position, wants_state=wants_state)
        return next(self._iterator)
