"""Batches of one optimizer step: as many on every rank, and how many tokens they train on.

The engine averages gradients over ranks, and a window of micro-batches sums them. Where ranks and
micro-batches have different numbers of label tokens, a mean of their means weighs a token in a
short text more than one in a long text. `Windows` counts the tokens of a whole step before its
first forward, with one small message, so that a *sum* of token losses times `Window.scale` is the
mean over all tokens. The same message tells the ranks when one of them has run out of batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from shardplug.errors import ConfigError, ScheduleError

__all__ = ["Fetch", "Together", "Window", "Windows", "count_labels", "fetched", "in_step"]

T = TypeVar("T")

Fetch = Callable[[Callable[[], Any]], Any]
"""Calls a function that reads one batch; raises StopIteration on all ranks together."""

_FAILED = -1


def count_labels(labels: torch.Tensor, *, ignore_index: int = -100, shifted: bool = True) -> int:
    """Count the tokens that a batch trains on.

    Args:
        labels: (..., s); int.
        ignore_index: Label of a token that is not trained on.
        shifted: Whether position i predicts label i + 1, as in causal language models: the first
            label of a row is then predicted by nothing.
    """
    return int((labels[..., 1:] if shifted else labels).ne(ignore_index).sum())


def _exchange(*numbers: int) -> list[list[int]]:
    """Return each rank's numbers, by rank. Collective, where a process group is up."""
    mine = torch.tensor(numbers, dtype=torch.int64)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [mine.tolist()]
    if "gloo" not in dist.get_backend_config():
        mine = mine.to("cuda")
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [one.tolist() for one in everyone]


def _require_no_failure(counts: list[int]) -> None:
    failed = [rank for rank, count in enumerate(counts) if count == _FAILED]
    if failed:
        raise ScheduleError(
            f"Expected a batch on every rank, but reading one failed on rank {failed[0]}: look at "
            "its error. This rank stops with it."
        )


class Together:
    """Fetches batches in step: every rank goes on, or none does.

    Each fetch exchanges one number, on every rank.

    Args:
        what: What is read, for messages.
    """

    def __init__(self, what: str = "the data") -> None:
        self._what = what
        self._fetched = 0

    def begin(self, fetched: int = 0) -> None:
        """Begin another pass over the data.

        Args:
            fetched: Batches of it that were read before, in the run that this one resumes.
        """
        self._fetched = fetched

    def fetch(self, read: Callable[[], T]) -> T:
        """Return what `read` returns, if every rank has got something.

        Args:
            read: Returns this rank's next batch; raises StopIteration when there is none.

        Raises:
            StopIteration: On every rank, when one has none; batches of the others are dropped.
            ScheduleError: When reading failed on another rank.
        """
        batch: T | None = None
        ended = False
        try:
            batch = read()
        except StopIteration:
            ended = True
        except Exception:
            _exchange(_FAILED)
            raise
        counts = [count for (count,) in _exchange(0 if ended else 1)]
        _require_no_failure(counts)
        if all(counts):
            self._fetched += 1
            return batch  # type: ignore[return-value]
        if any(counts):
            out = [rank for rank, count in enumerate(counts) if not count]
            warnings.warn(
                f"{self._what} ended after {self._fetched} batches on rank "
                f"{', '.join(map(str, out))} and not on the others. All ranks stop there, as a "
                "sharded forward needs every rank; what the others had left is not used.",
                UserWarning,
                stacklevel=3,
            )
        raise StopIteration


def fetched(fetch: Fetch, iterator: Iterator[T]) -> Iterator[T]:
    """Yield what an iterator has, read through `fetch`."""
    while True:
        try:
            batch = fetch(lambda: next(iterator))
        except StopIteration:
            return
        yield batch


class _InStep(Generic[T]):
    def __init__(self, batches: Iterable[T]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[T]:
        together = Together(f"{type(self._batches).__name__}")
        yield from fetched(together.fetch, iter(self._batches))

    def __getattr__(self, name: str) -> Any:
        if name in ("_batches", "__len__"):
            raise AttributeError(name)
        return getattr(self._batches, name)


def in_step(batches: Iterable[T]) -> Iterable[T]:
    """Iterate over batches until the first rank has none left. Collective at each batch.

    Args:
        batches: This rank's batches, such as a DataLoader over an IterableDataset. May be iterated
            several times if they can.

    Returns:
        An iterable without a length. It warns, on every rank, when a rank ended before others.
    """
    return _InStep(batches)


@dataclass(slots=True)  # not frozen: Lightning moves what is in it to the device
class Window(Generic[T]):
    """This rank's micro-batches of one optimizer step."""

    micro_batches: list[T]
    tokens: int
    """Label tokens of the step: all ranks, all micro-batches."""
    num_ranks: int

    @property
    def scale(self) -> float:
        """What to multiply a sum of token losses with, for the mean over all tokens of the step.

        The engine divides by the ranks, which this takes back. Frameworks that divide by the number
        of micro-batches too (Accelerate, Lightning) need it times that number.
        """
        return self.num_ranks / max(self.tokens, 1)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[tuple[T, bool]]:
        """Yield each micro-batch, and whether it is the last."""
        last = len(self.micro_batches) - 1
        return ((batch, index == last) for index, batch in enumerate(self.micro_batches))


class Windows(Generic[T]):
    """Groups batches into optimizer steps, equal on all ranks. Collective once per step.

        for window in Windows(loader, accumulate=4):
            for batch, last in window:
                with engine.micro_step(last=last):
                    (nll_sum(model, batch) * window.scale).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        batches: This rank's batches. Those of one step are in memory together.
        accumulate: Micro-batches per step; the last step may have fewer.
        count: Returns the label tokens of a batch; None counts `batch["labels"]` of a causal
            language model.
        uneven: What to do when ranks have different numbers of batches left: "raise", or "stop"
            after the batches that all have, with a warning.

    Raises:
        ConfigError: For an impossible value.
    """

    def __init__(
        self,
        batches: Iterable[T],
        accumulate: int = 1,
        *,
        count: Callable[[T], int] | None = None,
        uneven: Literal["raise", "stop"] = "raise",
    ) -> None:
        if accumulate < 1 or uneven not in ("raise", "stop"):
            raise ConfigError(
                "Expected accumulate of at least 1 and uneven to be 'raise' or 'stop', got "
                f"{accumulate} and {uneven!r}."
            )
        self._batches = batches
        self._accumulate = accumulate
        self._count: Callable[[T], int] = _labels_of if count is None else count
        self._uneven = uneven

    def __iter__(self) -> Iterator[Window[T]]:
        iterator, done = iter(self._batches), 0
        while True:
            mine, tokens = self._read(iterator)
            numbers = _exchange(len(mine), *tokens, *[0] * (self._accumulate - len(tokens)))
            counts = [one[0] for one in numbers]
            _require_no_failure(counts)
            shortest = min(counts)
            ends = shortest < self._accumulate
            if len(set(counts)) > 1:
                self._report(counts, done)
            if shortest:
                total = sum(sum(one[1 : 1 + shortest]) for one in numbers)
                yield Window(mine[:shortest], total, len(numbers))
            if ends:
                return
            done += shortest

    def _read(self, iterator: Iterator[T]) -> tuple[list[T], list[int]]:
        mine: list[T] = []
        tokens: list[int] = []
        try:
            while len(mine) < self._accumulate:
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                tokens.append(int(self._count(batch)))
                mine.append(batch)
        except Exception:
            _exchange(_FAILED, *[0] * self._accumulate)
            raise
        return mine, tokens

    def _report(self, counts: list[int], done: int) -> None:
        what = f"got {[done + count for count in counts]} by rank"
        if self._uneven == "raise":
            raise ScheduleError(
                f"Expected every rank to have as many batches, {what}: a sharded forward needs "
                "every rank. Give the ranks equal parts of the data (DistributedSampler, "
                "drop_last), or pass uneven='stop' to end with the shortest."
            )
        warnings.warn(
            f"Ranks have different numbers of batches: {what}. All stop after "
            f"{done + min(counts)}; the rest is not used.",
            UserWarning,
            stacklevel=3,
        )


def _labels_of(batch: Any) -> int:
    try:
        labels = batch["labels"]
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"Expected batches with 'labels' to count tokens in, got a {type(batch).__name__} "
            "without. Pass count=, which returns the number of label tokens of a batch."
        ) from error
    return count_labels(labels)
