"""What every rank must do or fail at together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from shardplug.errors import CheckpointError, ShardplugError

__all__ = [
    "background_group",
    "from_rank_0",
    "gather",
    "message_group",
    "raise_together",
    "rank_and_size",
    "together",
]

T = TypeVar("T")

_GONE = (
    "Another rank is gone, or did not answer in time. Make this call on every rank: rank 0 alone "
    "waits for the others."
)

_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups made so far, for each default group that was up."""


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def message_group() -> dist.ProcessGroup | None:
    """Return a group over all ranks whose messages go through CPU memory. Collective.

    On such a group a rank that is gone is noticed at once, and no device memory is used.
    """
    if rank_and_size()[1] == 1:
        return None
    if dist.get_backend() == dist.Backend.GLOO:
        return dist.group.WORLD
    return _new_group("messages")


def background_group(owner: int) -> dist.ProcessGroup | None:
    """Return a group for messages of a thread beside the training. Collective when first asked.

    Two threads that send on one group would meet each other's messages.

    Args:
        owner: A number of the thread's own.

    Raises:
        CheckpointError: On every rank, when it cannot be made; also when another rank is gone.
    """
    watch = message_group()
    return None if watch is None else _new_group(f"background {owner}", watch)


def _new_group(use: str, watch: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    groups = _GROUPS.setdefault(dist.group.WORLD, {})
    if use not in groups:
        groups[use] = _make_group() if watch is None else _make_group_watched(watch)
    return groups[use]


def _make_group() -> dist.ProcessGroup:
    group: dist.ProcessGroup = dist.new_group(backend=dist.Backend.GLOO)
    return group


def _make_group_watched(watch: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group, and look on another one that all ranks live on.

    Alone, `new_group` would wait half an hour for a rank that died meanwhile.
    """
    made: Future[dist.ProcessGroup] = Future()

    def make() -> None:
        try:
            made.set_result(_make_group())
        except BaseException as error:  # raised again below
            made.set_exception(error)

    threading.Thread(target=make, name="shardplug-group", daemon=True).start()
    while not all(gather(made.done(), "Saving", watch)):
        wait([made], timeout=0.01)
    return together(made.result, "Saving", group=watch)


def from_rank_0(value: T) -> T:
    """Return rank 0's value on every rank. Collective.

    Raises:
        CheckpointError: When another rank is gone.
    """
    box = [value]
    group = message_group()
    if group is not None:
        try:
            dist.broadcast_object_list(box, src=0, group=group)
        except RuntimeError as error:
            raise CheckpointError(_GONE) from error
    return box[0]


def gather(value: T, doing: str, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, by rank. Collective.

    Args:
        value: This rank's; it is pickled.
        doing: What a message says has failed, like "Saving".
        group: The group to ask on; None means the one of `message_group`.

    Raises:
        CheckpointError: When another rank is gone.
    """
    group = group or message_group()
    if group is None:
        return [value]
    values: list[T] = [value] * group.size()
    try:
        if not dist.is_initialized():
            raise RuntimeError("the process group was destroyed under a thread that saves")
        dist.all_gather_object(values, value, group=group)
    except (RuntimeError, ValueError, KeyError) as error:  # the last two: destroyed just now
        raise CheckpointError(f"{doing} failed. {_GONE}") from error
    return values


def raise_together(
    error: Exception | None, kind: type[ShardplugError], doing: str, group: dist.ProcessGroup
) -> None:
    """Raise on every rank what went wrong on one. Collective.

    Costs one reduction of one number where nothing went wrong.

    Args:
        error: What this rank has to report.
        kind: Class of the exception on the ranks that had no error.
        doing: What a message says has failed, like "The optimizer step".
        group: The ranks, with messages on the CPU.

    Raises:
        ShardplugError: `kind`, naming the first rank that failed and why; this rank's own error,
            where it is of that kind and no rank had another one.
    """
    if dist.get_world_size(group) == 1:
        if error is not None:
            raise error
        return
    failed = torch.tensor([int(error is not None)])
    dist.all_reduce(failed, op=dist.ReduceOp.SUM, group=group)
    if not int(failed):
        return
    texts: list[Any] = [None] * dist.get_world_size(group)
    own = None
    if error is not None:
        own = (
            str(error) if isinstance(error, ShardplugError) else f"{type(error).__name__}: {error}"
        )
    dist.all_gather_object(texts, own, group=group)
    if isinstance(error, kind) and set(texts) == {own}:
        raise error
    rank = next(rank for rank, text in enumerate(texts) if text is not None)
    raise kind(f"{doing} failed on rank {rank}: {texts[rank]}") from error


def together(
    action: Callable[[], T],
    doing: str,
    *,
    alone: bool = False,
    group: dist.ProcessGroup | None = None,
    explain: Callable[[BaseException], str] = lambda _: "",
) -> T:
    """Run `action` on every rank, and raise on all of them when it failed on one. Collective.

    Args:
        action: What to do; it may contain collectives that themselves fail on every rank.
        doing: What a message says has failed, like "Saving".
        alone: Do not ask the other ranks.
        group: The group to ask them on; None means the one of `message_group`.
        explain: Returns what to add to the text of an error that is not the project's own.

    Returns:
        What `action` returned on this rank.

    Raises:
        CheckpointError: On every rank, naming the first rank that failed and why; also when
            another rank is gone.
    """
    value: T | None = None
    failure: tuple[int | None, str] | None = None
    cause: BaseException | None = None
    try:
        value = action()
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        failure, cause = _describe(error, explain), error
    failures = [failure] if alone else gather(failure, doing, group)
    found = [(rank, *entry) for rank, entry in enumerate(failures) if entry is not None]
    if not found:
        return value  # type: ignore[return-value]
    rank, inner, text = found[0]
    if (
        isinstance(cause, CheckpointError)
        and len(found) == len(failures)
        and {entry[2] for entry in found} == {text}
    ):
        raise cause
    rank = rank if inner is None else inner
    raise CheckpointError(f"{doing} failed on rank {rank}: {text}") from cause


def _describe(
    error: BaseException, explain: Callable[[BaseException], str]
) -> tuple[int | None, str]:
    """Return the rank that an error names, if any, and its text."""
    if isinstance(error, CheckpointError):
        return None, str(error)
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        inner = error.failures[rank][0]
        if isinstance(inner, CheckpointError):
            return rank, str(inner)
        return rank, f"{type(inner).__name__}: {inner}{explain(inner)}"
    return None, f"{type(error).__name__}: {error}{explain(error)}"
