"""Messages in which the ranks of one group say what each does next, or that it can go on no more.

What a rank says arrives even where it ends at once: the receives of the next code, and of a
failure, are posted at all times, as gloo sends a message only once it is waited for. They would
be in the way of a later receive with the same tag, so that a group's channel lives as long as the
group.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["END", "PARTED", "Channel", "Comparison", "send_and_receive"]

END = -1
"""Code of a rank that is through with a window."""

PARTED = -2
"""Code of a rank that raises; what it raises follows as a text."""

_TAG = 1 << 30  # above the tags of any unit's messages
_TEXT_BYTES = 8192


class Comparison:
    """A rank's next code beside those of the others, which are under way.

    Args:
        code: This rank's.
        codes: (N,) int64, all ranks' once `works` are done; None where nothing is compared.
        works: The messages.
    """

    def __init__(
        self, code: int, codes: torch.Tensor | None = None, works: Iterable[Any] = ()
    ) -> None:
        self.code = code
        self.codes = codes
        self.works = list(works)
        self.done = codes is None
        """Whether all ranks are known to have said the same."""


class Channel:
    """One group's comparisons, in the order in which they are started.

    Args:
        group: The ranks. All of them make the channel.
        tag: Below 2**30; two channels of a group have tags that differ by three or more.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int) -> None:
        self._group = weakref.ref(group)  # which keeps this channel
        self._tag = _TAG + tag
        self._rank, size = group.rank(), group.size()
        self._peers = [peer for peer in range(size) if peer != self._rank]
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)
        """Numbers of the ranks in the whole job, by their number in the group."""
        self.pending: deque[Comparison] = deque()
        self.failure: str | None = None
        """What this rank has raised."""
        self._kept: list[Any] = []
        self._texts = {p: torch.zeros(_TEXT_BYTES, dtype=torch.uint8) for p in self._peers}
        self._failures = self._receive(self._texts, self._tag + 1)
        self._next = torch.empty(size, dtype=torch.int64)
        self._receives: list[Any] = []
        self._post()

    @classmethod
    def of(cls, group: dist.ProcessGroup, tag: int) -> Channel:
        """Return the channel of a group, which all its ranks make at the same point."""
        channels = _channels.setdefault(group, {})
        if tag not in channels:
            channels[tag] = cls(group, tag)
        return channels[tag]

    def _receive(self, tensors: dict[int, torch.Tensor], tag: int) -> dict[int, Any]:
        group = self._group()
        return {
            peer: dist.irecv(tensor, group=group, group_src=peer, tag=tag)
            for peer, tensor in tensors.items()
        }

    def _send(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        return dist.isend(tensor, group=self._group(), group_dst=peer, tag=tag)

    def _post(self) -> None:
        self._next = torch.empty_like(self._next)
        parts = {peer: self._next[peer : peer + 1] for peer in self._peers}
        self._receives = list(self._receive(parts, self._tag).values())

    def compare(self, code: int) -> Comparison:
        """Begin to compare this rank's next code with the others'."""
        codes, works = self._next, self._receives
        self._post()
        codes[self._rank] = code
        mine = torch.tensor([code], dtype=torch.int64)
        works += [self._send(mine, peer, self._tag) for peer in self._peers]
        comparison = Comparison(code, codes, works)
        self.pending.append(comparison)
        return comparison

    def exchange(self, message: torch.Tensor) -> tuple[list[torch.Tensor], list[Any]]:
        """Send all others the same tensor, and receive theirs, which have its size."""
        received = {peer: torch.empty_like(message) for peer in self._peers}
        works = list(self._receive(received, self._tag + 2).values())
        works += [self._send(message, peer, self._tag + 2) for peer in self._peers]
        return list(received.values()), works

    def fail(self, text: str) -> list[Any]:
        """Tell the others that this rank goes on no more, and why.

        Returns:
            Messages to wait for before this rank may end.
        """
        self.failure = text
        message = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        written = text.encode()[: _TEXT_BYTES - 1]
        message[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        message[-1] = 1
        works: list[Any] = []
        for peer in self._peers:
            try:
                works.append(self._send(message, peer, self._tag + 1))
                parted = torch.tensor([PARTED], dtype=torch.int64)
                self._kept.append(self._send(parted, peer, self._tag))
            except RuntimeError:
                continue  # this one is gone
        return works

    def failure_of_others(self, among: Sequence[int] = ()) -> str | None:
        """Return what another rank has raised, if it is known.

        Args:
            among: Numbers in the group of ranks that are known to have said so: wait for the text.
        """
        for peer in among:
            self._failures[peer].wait()
        for text in self._texts.values():
            if text[-1]:  # the last byte to arrive
                return bytes(text[:-1].tolist()).rstrip(b"\0").decode(errors="replace")
        return None


_channels: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Channel]] = (
    weakref.WeakKeyDictionary()
)


def send_and_receive(
    group: dist.ProcessGroup,
    tag: int,
    send: dict[int, torch.Tensor],
    receive: dict[int, torch.Tensor],
) -> list[Any]:
    """Begin to exchange tensors with the other ranks of a group.

    Args:
        group: The ranks.
        tag: Of all these messages.
        send: What to send, by rank in the group.
        receive: Where to receive, by rank in the group.

    Returns:
        The messages.
    """
    rank, size = group.rank(), group.size()
    # Each rank begins with another one.
    peers = [(rank + offset) % size for offset in range(1, size)]
    works: list[Any] = [
        dist.irecv(receive[peer], group=group, group_src=peer, tag=tag) for peer in peers
    ]
    works += [
        dist.isend(send[peer], group=group, group_dst=peer, tag=tag) for peer in reversed(peers)
    ]
    return works
