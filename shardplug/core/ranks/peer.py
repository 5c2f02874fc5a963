"""Gathers and reductions between CPU ranks, by direct messages that overlap with computation.

gloo's reduce-scatter is an all-reduce inside and moves 2(N-1)/N of its input per rank; sending
each peer its part moves (N-1)/N. Messages between two ranks are also the one kind of transfer
that gloo carries on beside the computation without a thread of ours. The classes follow the
interfaces of FSDP2's `set_custom_all_gather` and `set_custom_reduce_scatter`, and that of a process
group's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardplug.core.ranks.collective_order import KINDS, CollectiveCheck, CollectiveOrder

__all__ = ["InFlight", "PeerGather", "PeerReduce", "ReplicaSum"]


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

    def __init__(self, order: CollectiveOrder, unit: int) -> None:
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
        check = self._order.announce("gather", self._unit, group)
        rank, size = group.rank(), group.size()
        parts = output_tensor.view(size, -1)
        check.exchange(dict.fromkeys(range(size), input_tensor), dict(enumerate(parts)))
        if parts[rank].data_ptr() != input_tensor.data_ptr():
            parts[rank].copy_(input_tensor)
        handle = _Gathering(check)
        if async_op:
            return handle
        handle.wait()
        return None


class _Gathering(dist.Work):
    def __init__(self, check: CollectiveCheck) -> None:
        super().__init__()
        self._check = check

    def wait(self, timeout: Any = None) -> bool:
        self._check.wait()
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
        self,
        order: CollectiveOrder,
        unit: int,
        in_flight: InFlight,
        may_wait: Callable[[torch.dtype], bool],
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
        check = self._order.announce("reduce", self._unit, group)
        rank, size = group.rank(), group.size()
        parts = list(input_tensor.view(size, -1).unbind())
        received = [torch.empty_like(output_tensor) for _ in range(size - 1)]
        received.insert(rank, parts[rank])
        check.exchange(dict(enumerate(parts)), dict(enumerate(received)))

        def finish() -> None:
            check.wait()
            _add(received, bool(op == dist.ReduceOp.AVG), output_tensor)

        self._in_flight.replace(finish)
        if not self._may_wait(input_tensor.dtype):
            # The one before as well: its result may be this unit's, which this one is added to.
            self._in_flight.complete()


class ReplicaSum(dist.ProcessGroup):
    """Stands for the group of replicas where FSDP2 sums a unit's reduced gradients over them.

    FSDP2 has no interface for a custom all-reduce; it hands the tensor to the group. As with
    `PeerReduce`, the result may be left to arrive during the next units' backward.

    Args:
        order: Where each use is announced.
        unit: The unit's index.
        group: The replicas' ranks.
        in_flight: Shared by the units of a model.
        may_wait: Tells, at a use, whether the result is not needed at once.
    """

    def __init__(
        self,
        order: CollectiveOrder,
        unit: int,
        group: dist.ProcessGroup,
        in_flight: InFlight,
        may_wait: Callable[[torch.dtype], bool],
    ) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._order = order
        self._unit = unit
        self._group = group
        self._in_flight = in_flight
        self._may_wait = may_wait
        self.error: Exception | None = None
        """What the last use has raised. torch's log of errors asks for the backend of the group,
        which it does not know, and raises that instead."""

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        """Write the sum or average of the replicas' tensors, added in rank order.

        Args:
            tensors: One contiguous tensor of any shape, summed in place.
            options: Of which `reduceOp` is SUM or AVG.

        Raises:
            NotImplementedError: For another reduction.
        """
        self.error = None
        try:
            self._sum(tensors[0], options.reduceOp)
        except Exception as error:
            self.error = error
            raise
        return _Done()

    def _sum(self, tensor: torch.Tensor, op: Any) -> None:
        average = bool(op == dist.ReduceOp.AVG)
        if not average and op != dist.ReduceOp.SUM:
            raise NotImplementedError("Expected a SUM or AVG over replicas, got another reduction.")
        rank, size = self.rank(), self.size()
        if size == 1:
            return
        check = self._order.announce(KINDS[2], self._unit, self._group)
        flat = tensor.view(-1)
        # Between two, the whole tensor takes as many bytes as its halves there and back, and one
        # message's time instead of two.
        whole = size == 2 or flat.numel() < size
        parts = [flat] * size if whole else list(flat.tensor_split(size))
        received = [torch.empty_like(parts[rank]) for _ in range(size - 1)]
        received.insert(rank, parts[rank])
        check.exchange(dict(enumerate(parts)), dict(enumerate(received)))

        def finish() -> None:
            check.wait()
            _add(received, average, parts[rank])
            if not whole:
                check.exchange(dict.fromkeys(range(size), parts[rank]), dict(enumerate(parts)))
                check.wait()

        self._in_flight.replace(finish)
        if not self._may_wait(tensor.dtype):
            self._in_flight.complete()


class _Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _add(parts: Sequence[torch.Tensor], average: bool, out: torch.Tensor) -> None:
    """Sum or average tensors in their order; `out` may be one of them."""
    total = parts[0] if any(part is out for part in parts[2:]) else out
    with torch.no_grad():
        torch.add(parts[0], parts[1], out=total)
        for part in parts[2:]:
            total.add_(part)
        if average:
            total.div_(len(parts))
        if total is not out:
            out.copy_(total)
