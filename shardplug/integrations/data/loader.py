"""Makes an ordinary DataLoader resumable in the middle of an epoch.

The loader becomes an instance of a subclass of its own class with `state_dict` and
`load_state_dict`, which is what Lightning looks for. After loading, the next epoch begins at the
batch after the last one handed out:

    map-style data     the sampler is run past the indices already used; no sample is loaded
    iterable data      the batches already used are fetched and dropped

The order is the saved run's, because the random states that the sampler drew from are saved: the
one when the iterator was made (it draws the workers' base seed), and the one before the first
batch (a RandomSampler draws its seed then, not earlier).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
)

from shardplug.errors import CheckpointError
from shardplug.integrations.common import scoped_rng as rng
from shardplug.integrations.data.iterators import Counted, Later, PastFirst, Position
from shardplug.windows import Together

__all__ = ["is_resumable", "resumable"]


def is_resumable(loader: object) -> bool:
    """Whether the loader can save and load its position."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def resumable(
    loader: DataLoader[Any],
    before_fetch: Callable[[], None] = lambda: None,
    beginning: Callable[[], AbstractContextManager[None]] = nullcontext,
    resumed: Callable[[int, int], None] = lambda saved, skipped: None,
    together: Together | None = None,
) -> DataLoader[Any]:
    """Return a resumable copy of `loader`; a loader that is resumable already is returned as is.

    Args:
        loader: Any DataLoader, also of a subclass. It is not changed.
        before_fetch: Called before a batch is fetched.
        beginning: Makes the context that the iterator of a new epoch is made in.
        resumed: Called when an epoch is resumed, with the number of batches that the saved run
            had used of it and the number of this loader's batches that hold the same samples.
        together: Reads the batches in step with the other ranks.

    Returns:
        A shallow copy, an instance of the loader's class.
    """
    if is_resumable(loader):
        return loader
    copied = copy.copy(loader)
    kind = type(loader)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    copied.__class__ = type(kind.__name__, (_Resumable, kind), body)
    vars(copied)["_position"] = Position(before_fetch, beginning, resumed, together)
    return copied


class _Resumable(DataLoader[Any]):
    _position: Position

    def state_dict(self) -> dict[str, Any]:
        position = self._position
        state = {
            "batches": position.batches,
            "samples_per_batch": _samples_per_batch(self),
            "epoch": next((s.epoch for s in _samplers(self) if hasattr(s, "epoch")), None),
            "at_start": position.at_start,
            "at_first": position.at_first,
            "is_reset": position.is_reset,
            "generators": position.generators,
            "generators_now": [g.get_state() for g in _generators(self)],
            "complete": False,  # the framework knows whether this was the epoch's last batch
        }
        return state if position.pending is None else dict(position.pending)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._position.pending = dict(state)
        if state["epoch"] is not None:
            for sampler in _samplers(self):
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(state["epoch"])

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        position, state = self._position, self._position.pending
        position.pending = None
        if state is not None:
            return self._resume(state)
        with position.beginning():
            iterator = self._begin()
        return Counted(iterator, position, wants_state=position.at_start is not None)

    def _begin(self) -> Iterator[Any]:
        position = self._position
        position.batches = 0
        position.generators = [g.get_state() for g in _generators(self)]
        position.at_start = rng.rng_state() if _order_is_random(self) else None
        position.at_first = None
        position.is_reset = getattr(self, "_iterator", None) is not None
        return super().__iter__()

    def _resume(self, state: dict[str, Any]) -> Iterator[Any]:
        position = self._position
        if state["complete"]:
            for generator, saved in zip(_generators(self), state["generators_now"], strict=False):
                generator.set_state(saved)
            return Later(self._begin, position)
        skip = _batches_to_skip(self, state)
        position.resumed(state["batches"], skip)
        position.batches = skip
        position.at_start, position.at_first = state["at_start"], state["at_first"]
        position.is_reset = state["is_reset"]
        position.generators = state["generators"]
        for generator, saved in zip(_generators(self), state["generators"], strict=False):
            generator.set_state(saved)
        if skip == 0:
            return Counted(super().__iter__(), position, wants_state=_order_is_random(self))
        if isinstance(self.dataset, IterableDataset) or _iterates_its_own_way(self):
            with rng.replaying(state["at_start"]):
                iterator = super().__iter__()
            return Counted(iterator, position, drop=skip)
        name = "sampler" if self.batch_sampler is None else "batch_sampler"
        before_order = state["at_start"] if state["is_reset"] else None
        sampler = PastFirst(getattr(self, name), skip, state["at_first"], before_order)
        # The iterator reads the sampler once, when it is made. DataLoader refuses to have it set,
        # so it is put in place underneath, for that moment only.
        original, self.__dict__[name] = self.__dict__[name], sampler
        try:
            with rng.replaying(state["at_start"]):
                sampler.making_iterator = True
                iterator = super().__iter__()
                sampler.making_iterator = False
        finally:
            self.__dict__[name] = original
        if not sampler.used:
            raise CheckpointError(
                f"Expected {type(self).__name__} to read its {name} when an iterator is made, but "
                "it did not: its position cannot be restored. Resume from a checkpoint saved at "
                "the end of an epoch, or give the loader state_dict and load_state_dict."
            )
        return Counted(iterator, position)


def _batches_to_skip(loader: DataLoader[Any], state: dict[str, Any]) -> int:
    """Batches of this loader that hold the samples the saved run has used.

    The number of ranks and the batch size may differ from the saved run's.
    """
    size = _samples_per_batch(loader)
    samples = state["batches"] * state["samples_per_batch"]
    skip, rest = divmod(samples, size)
    if rest:
        raise CheckpointError(
            f"Expected the {samples} samples used in this epoch to be a whole number of "
            f"global batches, got batches of {size} samples over all ranks. Resume with a batch "
            "size and number of ranks whose product divides it, or from the end of an epoch."
        )
    return int(skip)


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """The loader's samplers, inner ones included, each once."""
    found: list[Any] = []
    queue: list[Any] = [loader.sampler, loader.batch_sampler]
    while queue:
        sampler = queue.pop(0)
        if sampler is None or any(sampler is one for one in found):
            continue
        found.append(sampler)
        queue.append(getattr(sampler, "sampler", None))
    return found


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    candidates = [loader.generator, *(getattr(s, "generator", None) for s in _samplers(loader))]
    return list({id(g): g for g in candidates if isinstance(g, torch.Generator)}.values())


def _order_is_random(loader: DataLoader[Any]) -> bool:
    """Whether the order, or the workers' seeds, come from the process's random states."""
    if loader.num_workers > 0 or isinstance(loader.dataset, IterableDataset):
        return True
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return True
    return not isinstance(loader.sampler, (DistributedSampler, SequentialSampler))


def _iterates_its_own_way(loader: DataLoader[Any]) -> bool:
    """Whether a subclass of DataLoader makes its iterator itself."""
    own = [kind for kind in type(loader).__mro__ if kind is not _Resumable]
    return next(kind for kind in own if "__iter__" in vars(kind)) is not DataLoader


def _samples_per_batch(loader: DataLoader[Any]) -> int:
    """Samples that all ranks together take in one batch; 1 where it cannot be known."""
    size = loader.batch_size
    if size is None:
        size = getattr(loader.batch_sampler, "batch_size", None) or 1
    replicas = next((s.num_replicas for s in _samplers(loader) if hasattr(s, "num_replicas")), 1)
    return int(size) * int(replicas)
