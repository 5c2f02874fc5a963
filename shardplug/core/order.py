"""Keeps the ranks' collectives in one order, or says where they parted."""

from __future__ import annotations

import zlib
from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from shardplug.errors import ScheduleError

__all__ = ["Check", "Order"]

_END = -1
_EVALUATION = -2
_TAG = 1 << 30  # above the tags of any unit's messages
_ADVICE = (
    "A branch that only some ranks take must not be a unit of its own: leave its class out of "
    "`units`, or run it on every rank (for example with an empty input times zero). A forward, "
    "generate() or save under `if rank == 0:` belongs on every rank."
)


class Check:
    """A comparison of all ranks' next collective that is under way."""

    def __init__(self, order: Order, code: int, everyone: torch.Tensor | None, works: Any) -> None:
        self._order = order
        self._code = code
        self._everyone = everyone
        self._works = works

    def confirm(self) -> None:
        """Wait for the comparison.

        Raises:
            ScheduleError: On every rank, naming the units, when the ranks differ.
        """
        if self._everyone is not None or self._order.parted is not None:
            self._order.confirm_through(self)

    def compare(self) -> str | None:
        """Wait for the comparison; return what differs, if anything does."""
        assert self._everyone is not None
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"Another rank failed, is gone, or did not come in time, when this rank "
                f"{self._order.describe_one(self._code)}. Look at the first error of the other "
                "ranks; if they have none, they did not make this call. "
                f"({str(error).partition(chr(10))[0]})"
            ) from error
        self._works.clear()
        codes: list[int] = self._everyone.tolist()
        self._everyone = None
        same = all(code == self._code for code in codes)
        return None if same else self._order.describe(codes)


class Order:
    """The order in which this rank gathers and reduces units.

    Ranks that use different units would exchange the wrong bytes, or wait for each other for
    ever. A checksum of the order is compared once per window, before the optimizer can step;
    with `compare` each collective is also accompanied by a message of 8 bytes to every other rank.

    Args:
        group: The CPU-side group over all ranks.
        compare: Compare at every collective.
        first_code: Where this model's codes begin; those of two models must not overlap.
    """

    def __init__(self, group: dist.ProcessGroup, *, compare: bool, first_code: int = 0) -> None:
        self._group = group
        self._first_code = first_code
        self._world_size = dist.get_world_size(group)
        self._compare = compare and self._world_size > 1
        self.units: list[str] = []
        """Names of the units, by index."""
        self.checksum = 0
        """Of the order since the window began; below 2**31, so that sums over ranks are exact."""
        self.parted: str | None = None
        """How the ranks' orders parted. Messages of the units concerned may still be under way,
        so that nothing can be exchanged any more."""
        self._pending: deque[Check] = deque()
        self._messages: list[list[Any]] = []

    def announce(self, kind: str, unit: int) -> tuple[Check, int]:
        """Note the next collective.

        Args:
            kind: "gather" or "reduce".
            unit: The unit's index.

        Returns:
            The comparison to confirm before the result is used, and a tag for the messages.
        """
        code = self._first_code + unit * 2 + (kind == "reduce")
        self.checksum = zlib.crc32(code.to_bytes(4, "little"), self.checksum) & 0x7FFFFFFF
        return self._start(code), code

    def _start(self, code: int) -> Check:
        if not self._compare:
            return Check(self, code, None, None)
        if self.parted is not None:
            raise ScheduleError(self.parted)
        check = self._begin(code)
        self._pending.append(check)
        return check

    def _begin(self, code: int) -> Check:
        # Direct messages, as the units' are: those of one pair of ranks arrive in order.
        rank, group = dist.get_rank(self._group), self._group
        tag = _TAG + self._first_code
        everyone = torch.full((self._world_size,), code, dtype=torch.int64)
        mine = torch.tensor([code], dtype=torch.int64)
        others = [peer for peer in range(self._world_size) if peer != rank]
        works: list[Any] = [
            dist.irecv(everyone[peer : peer + 1], group=group, group_src=peer, tag=tag)
            for peer in others
        ]
        works += [dist.isend(mine, group=group, group_dst=peer, tag=tag) for peer in others]
        self.hold(works)
        return Check(self, code, everyone, works)

    def hold(self, messages: list[Any]) -> None:
        """Keep messages alive until their list is emptied, that is, until they have arrived.

        A rank that finds a difference unwinds. A message dropped there might not have left yet,
        and a peer that needs it before it finds the difference would wait in vain.
        """
        self._messages = [kept for kept in self._messages if kept]
        self._messages.append(messages)

    def confirm_through(self, check: Check) -> None:
        """Confirm every comparison up to `check`, in the order they were started.

        A rank that finds a difference starts no more of them, so its peers must not wait for a
        later one first.

        Raises:
            ScheduleError: On every rank, when the ranks differ.
        """
        while self.parted is None:
            first = self._pending[0]
            self.parted = first.compare()  # raises, and may be asked again, when a rank is gone
            self._pending.popleft()
            if first is check and self.parted is None:
                return
        raise ScheduleError(self.parted)

    def end(self) -> None:
        """Compare that every rank is through with the window's collectives.

        Raises:
            ScheduleError: On every rank, when some have more to do.
        """
        self._start(_END).confirm()

    def evaluation_begins(self) -> None:
        """Compare that every rank begins an evaluation.

        Raises:
            ScheduleError: On every rank, when some do something else.
        """
        self._start(_EVALUATION).confirm()

    def restart(self) -> None:
        """Begin a new window."""
        self.checksum = 0

    def describe_one(self, code: int) -> str:
        """Say what a rank was about to do."""
        if code == _END:
            return "had finished its backward"
        if code == _EVALUATION:
            return "began an evaluation"
        verb = "reduces the gradients of" if code % 2 else "gathers"
        unit = (code - self._first_code) // 2
        known = 0 <= unit < len(self.units)
        return f"{verb} {self.units[unit] if known else 'another model'}"

    def describe(self, codes: list[int]) -> str:
        """Say what each rank was about to do."""
        rows = "; ".join(f"rank {rank} {self.describe_one(c)}" for rank, c in enumerate(codes))
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
