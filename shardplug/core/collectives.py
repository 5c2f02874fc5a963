"""Collectives of our own where the backend's are slow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["AllToAllReduceScatter"]


class AllToAllReduceScatter:
    """Reduce-scatter for CPU ranks: each rank sends every other rank its part, and adds up.

    gloo's own reduce-scatter moves the bytes of an all-reduce, 2(N-1)/N of the input per rank;
    this one moves (N-1)/N. Parts are added in rank order, so the result does not depend on
    timing. It follows the interface of FSDP2's `set_custom_reduce_scatter`.
    """

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write the sum or average of the ranks' parts.

        Args:
            output_tensor: (n,), this rank's reduced part.
            input_tensor: (N * n,), one part for each of the N ranks of `group`.
            group: The ranks that take part.
            op: SUM or AVG.
            async_op: Not supported; the call returns when the result is there.

        Raises:
            NotImplementedError: For another reduction, or `async_op`.
        """
        if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise NotImplementedError(f"Expected a synchronous SUM or AVG, got {op}, {async_op}.")
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        world_size = dist.get_world_size(group)
        torch.sum(parts.view(world_size, -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(world_size)
