"""Gathers and reductions between CPU ranks, by direct messages that overlap with computation.

gloo's reduce-scatter is an all-reduce inside and moves 2(N-1)/N of its input per rank; sending
each peer its part moves (N-1)/N. Messages between two ranks are also the one kind of transfer
that gloo carries on beside the computation without a thread of ours. Both classes follow the
interfaces of FSDP2's `set_custom_all_gather` and `set_custom_reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardplug.core.order import Check, Order
from shardplug.core.waiting import waiting

__all__ = ["InFlight", "PeerGather", "PeerReduce"]


class _Buffers:
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class PeerGather(_Buffers):
    """All-gather of one unit.

    Args:
        order: Where each use is announced.
        unit: The unit's index; messages carry it, so that units cannot be mixed up.
    """

    def __init__(self, order: Order, unit: int) -> None:
        self._order = order
        self._unit = unit

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill `output_tensor` with all ranks' inputs.

        Args:
            output_tensor: (N * n,), of which this rank's part may share memory with the input.
            input_tensor: (n,), this rank's part.
            group: The N ranks.
            async_op: Return a handle to wait on instead of waiting.
        """
        check, tag = self._order.announce("gather", self._unit)
        rank, size = group.rank(), group.size()
        parts = output_tensor.view(size, -1)
        works: list[Any] = [
            dist.irecv(parts[peer], group=group, group_src=peer, tag=tag)
            for peer in _others(rank, size)
        ]
        works += [
            dist.isend(input_tensor, group=group, group_dst=peer, tag=tag)
            for peer in reversed(_others(rank, size))
        ]
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        self._order.hold(works)
        handle = _Gathering(check, works)
        if async_op:
            return handle
        handle.wait()
        return None


class _Gathering(dist.Work):
    def __init__(self, check: Check, works: list[Any]) -> None:
        super().__init__()
        self._check = check
        self._works = works

    def wait(self, timeout: Any = None) -> bool:
        with waiting():
            self._check.confirm()
            for work in self._works:
                work.wait()
        self._works.clear()
        return True


class InFlight:
    """The one reduction whose messages are still under way."""

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None

    def replace(self, finish: Callable[[], None]) -> None:
        """Complete the reduction under way and remember the next."""
        self.complete()
        self._finish = finish

    def drop(self) -> None:
        """Forget the reduction under way, which will never be complete."""
        self._finish = None

    def complete(self) -> None:
        """Wait for the reduction under way, if any."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class PeerReduce(_Buffers):
    """Reduce-scatter of one unit.

    The result may be left to arrive during the next unit's backward: gradients are views of the
    output and nothing reads them before the end of the backward, where the last one is completed.

    Args:
        order: Where each use is announced.
        unit: The unit's index.
        in_flight: Shared by the units of a model, so that only one reduction is under way.
        may_wait: Tells, at a use, whether the result is not needed at once.
    """

    def __init__(
        self, order: Order, unit: int, in_flight: InFlight, may_wait: Callable[[torch.dtype], bool]
    ) -> None:
        self._order = order
        self._unit = unit
        self._in_flight = in_flight
        self._may_wait = may_wait

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write the sum or average of the ranks' parts, added in rank order.

        Args:
            output_tensor: (n,), this rank's reduced part.
            input_tensor: (N * n,), one part for each of the N ranks of `group`.
            group: The ranks that take part.
            op: SUM or AVG.
            async_op: Not supported.

        Raises:
            NotImplementedError: For another reduction, or `async_op`.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"Expected a synchronous SUM or AVG, got {op}, {async_op}.")
        check, tag = self._order.announce("reduce", self._unit)
        rank, size = group.rank(), group.size()
        parts = list(input_tensor.view(size, -1).unbind())
        works: list[Any] = []
        received = list(parts)
        for peer in _others(rank, size):
            received[peer] = torch.empty_like(output_tensor)
            works.append(dist.irecv(received[peer], group=group, group_src=peer, tag=tag))
        works += [
            dist.isend(parts[peer], group=group, group_dst=peer, tag=tag)
            for peer in reversed(_others(rank, size))
        ]
        self._order.hold(works)

        def finish() -> None:
            with waiting():
                check.confirm()
                for work in works:
                    work.wait()
            works.clear()
            with torch.no_grad():
                torch.add(received[0], received[1], out=output_tensor)
                for part in received[2:]:
                    output_tensor.add_(part)
                if op == dist.ReduceOp.AVG:
                    output_tensor.div_(size)

        self._in_flight.replace(finish)
        if not self._may_wait(input_tensor.dtype):
            self._in_flight.complete()


def _others(rank: int, size: int) -> list[int]:
    """Return the other ranks, each rank starting with another one."""
    return [(rank + offset) % size for offset in range(1, size)]
