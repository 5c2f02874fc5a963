"""Keeps the ranks' collectives in one order, or says where they parted."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardplug.core.ranks.channel import END, PARTED, Channel, Comparison, send_and_receive
from shardplug.core.ranks.waiting_time import waiting
from shardplug.errors import ScheduleError

__all__ = ["KINDS", "CollectiveCheck", "CollectiveOrder"]

_EVALUATION = -3  # beside END and PARTED
KINDS = ("gather", "reduce", "sum over replicas")
"""What a unit is exchanged for; messages have the tag 4 * unit + place in this list, and more."""

_VERBS = ("gathers", "reduces the gradients of", "sums over the replicas the gradients of")
_ADVICE = (
    "A branch that only some ranks take must not be a unit of its own: leave its class out of "
    "`units`, or run it on every rank (for example with an empty input times zero). A forward, "
    "generate() or save under `if rank == 0:` belongs on every rank."
)


class CollectiveCheck:
    """A comparison of the ranks' next collective that is under way, and the collective's messages.

    Args:
        order: Where it was announced.
        channel: Of the ranks that take part; None where nothing is compared.
        comparison: The comparison.
        group: The ranks that take part.
    """

    def __init__(
        self,
        order: CollectiveOrder,
        channel: Channel | None,
        comparison: Comparison,
        group: dist.ProcessGroup,
    ) -> None:
        self._order = order
        self.channel = channel
        self.comparison = comparison
        self._group = group
        self.messages: list[Any] = []
        """Those that have not arrived yet."""

    def exchange(self, send: dict[int, torch.Tensor], receive: dict[int, torch.Tensor]) -> None:
        """Begin to exchange the collective's tensors, by rank in its group.

        Raises:
            ScheduleError: When another rank is gone, as the ranks differ.
        """
        self.messages += self._order.attempt(
            self.comparison.code,
            lambda: send_and_receive(self._group, self.comparison.code, send, receive),
        )

    def confirm(self) -> None:
        """Wait for the comparison.

        Raises:
            ScheduleError: On every rank, naming the units, when the ranks differ.
        """
        if self.channel is not None:
            self._order.confirm_through(self.channel, self.comparison)

    def wait(self) -> None:
        """Wait for the comparison, then for the messages.

        Raises:
            ScheduleError: On every rank, naming the units, when the ranks differ.
        """
        with waiting():
            self.confirm()
            self._order.attempt(self.comparison.code, lambda: _wait_all(self.messages))
        self.messages.clear()


class CollectiveOrder:
    """The order in which this rank gathers and reduces units.

    Ranks that use different units would exchange the wrong bytes, or wait for each other for
    ever. A checksum of the order is compared once per window, before the optimizer can step;
    with `compare` each collective is also accompanied by a message of 8 bytes to every other rank
    that takes part in it. A rank that finds a difference tells all others before it raises.

    Args:
        group: The CPU-side group over all ranks.
        compare: Compare at every collective.
        first_code: Where this model's codes begin; those of two models must not overlap.
        parts: Groups of some ranks that exchange among themselves; all ranks have theirs.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        compare: bool,
        first_code: int = 0,
        parts: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self._group = group
        self._first_code = first_code
        self._world_size = dist.get_world_size(group)
        self._channels: dict[dist.ProcessGroup, Channel] = {}
        if compare and self._world_size > 1:
            self._channels = {one: Channel.of(one, first_code) for one in (group, *parts)}
        self.units: list[str] = []
        """Names of the units, by index."""
        self.checksum = 0
        """Of the order since the window began; below 2**31, so that sums over ranks are exact."""
        failures = (channel.failure for channel in self._channels.values())
        self.parted: str | None = next(filter(None, failures), None)
        """How the ranks' orders parted. Messages of the units concerned may still be under way,
        so that nothing can be exchanged any more."""
        self._checks: list[CollectiveCheck] = []

    @property
    def compares(self) -> bool:
        """Whether each collective is compared."""
        return bool(self._channels)

    def announce(
        self, kind: str, unit: int, group: dist.ProcessGroup | None = None
    ) -> CollectiveCheck:
        """Note the next collective.

        Args:
            kind: One of `KINDS`.
            unit: The unit's index.
            group: The ranks that take part; None means all.

        Returns:
            The comparison to confirm before the result is used.
        """
        code = self._first_code + unit * 4 + KINDS.index(kind)
        self.checksum = zlib.crc32(code.to_bytes(4, "little"), self.checksum) & 0x7FFFFFFF
        return self._start(code, group or self._group)

    def _start(self, code: int, group: dist.ProcessGroup) -> CollectiveCheck:
        if not self._channels:
            return CollectiveCheck(self, None, Comparison(code), group)
        if self.parted is not None:
            raise ScheduleError(self.parted)
        channel = self._channels[group]
        comparison = self.attempt(code, lambda: channel.compare(code))
        check = CollectiveCheck(self, channel, comparison, group)
        # What is under way is kept: a rank that finds a difference unwinds, and a message dropped
        # there might not have left yet, for which a peer would wait in vain.
        self._checks = [kept for kept in self._checks if kept.messages or not kept.comparison.done]
        self._checks.append(check)
        return check

    def attempt(self, code: int, action: Callable[[], Any]) -> Any:
        """Do something that fails where another rank is gone, and say why if it is known.

        Raises:
            ScheduleError: When another rank has raised it before it went.
            RuntimeError: When another rank is gone for another reason.
        """
        try:
            return action()
        except RuntimeError as error:
            for channel in self._channels.values():
                if text := channel.failure_of_others():
                    self._part(text)
                    raise ScheduleError(text) from error
            raise RuntimeError(
                f"Another rank failed, is gone, or did not come in time, when this rank "
                f"{self.describe_one(code)}. Look at the first error of the other ranks; if they "
                f"have none, they did not make this call. ({str(error).partition(chr(10))[0]})"
            ) from error

    def confirm_through(self, channel: Channel, comparison: Comparison) -> None:
        """Confirm every comparison of a channel up to this one, in the order they were started.

        A rank that finds a difference starts no more of them, so its peers must not wait for a
        later one first.

        Raises:
            ScheduleError: On every rank, when the ranks differ.
        """
        while self.parted is None and not comparison.done:
            first = channel.pending[0]
            text = self.attempt(first.code, lambda: self._compare(channel, first))  # noqa: B023
            if text is not None:
                self._part(text)
                break
            first.done = True
            channel.pending.popleft()
        if self.parted is not None:
            raise ScheduleError(self.parted)

    def _compare(self, channel: Channel, comparison: Comparison) -> str | None:
        """Wait for a comparison; return what differs, if anything does."""
        assert comparison.codes is not None
        _wait_all(comparison.works)
        codes: list[int] = comparison.codes.tolist()
        if PARTED in codes:
            return channel.failure_of_others([p for p, code in enumerate(codes) if code == PARTED])
        same = all(code == comparison.code for code in codes)
        return None if same else self.describe(codes, channel.ranks)

    def _part(self, text: str) -> None:
        """Tell all ranks, and let what they need of this one leave before it does."""
        self.parted = text
        works = [work for channel in self._channels.values() for work in channel.fail(text)]
        for check in self._checks:
            if check.comparison.done:  # the others are there, too
                works += check.messages
        for work in works:
            with contextlib.suppress(RuntimeError):  # to a rank that is gone
                work.wait()

    def end(self, message: torch.Tensor) -> torch.Tensor:
        """Compare that every rank is through with the window's collectives, and sum a message.

        Args:
            message: int64, of the same size on every rank.

        Returns:
            The sum over the ranks.

        Raises:
            ScheduleError: On every rank, when some have more to do.
        """
        if not self.compares:
            dist.all_reduce(message, group=self._group)
            return message
        check = self._start(END, self._group)
        # Both at once, since a link between nodes may take long.
        received, check.messages = self.attempt(
            END, lambda: self._channels[self._group].exchange(message)
        )
        check.wait()
        return torch.stack([message, *received]).sum(0)

    def require_end(self) -> None:
        """Compare that every rank is through with what it gathers, where each use is compared.

        Raises:
            ScheduleError: On every rank, when some have more to do.
        """
        self._start(END, self._group).confirm()

    def evaluation_begins(self) -> None:
        """Compare that every rank begins an evaluation.

        Raises:
            ScheduleError: On every rank, when some do something else.
        """
        self._start(_EVALUATION, self._group).confirm()

    def restart(self) -> None:
        """Begin a new window."""
        self.checksum = 0

    def describe_one(self, code: int) -> str:
        """Say what a rank was about to do."""
        if code == END:
            return "had finished its backward"
        if code == _EVALUATION:
            return "began an evaluation"
        unit, kind = divmod(code - self._first_code, 4)
        known = 0 <= unit < len(self.units)
        return f"{_VERBS[kind]} {self.units[unit] if known else 'another model'}"

    def describe(self, codes: Sequence[int], ranks: Sequence[int]) -> str:
        """Say what each of some ranks was about to do."""
        said = zip(ranks, codes, strict=True)
        rows = "; ".join(f"rank {rank} {self.describe_one(code)}" for rank, code in said)
        return f"Expected every rank to use the same units in the same order, but {rows}. {_ADVICE}"

    def require_same(self, total: int) -> None:
        """Check the sum of all ranks' checksums.

        Raises:
            ScheduleError: When the ranks' orders differed.
        """
        if total != self.checksum * self._world_size:
            raise ScheduleError(
                "Expected every rank to gather and reduce the same units in the same order in "
                "this window, but the ranks' orders differ: gradients of different units may "
                f"have been mixed. {_ADVICE}"
            )


def _wait_all(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
