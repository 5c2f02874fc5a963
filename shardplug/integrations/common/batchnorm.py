"""Synchronised BatchNorm for CPU ranks; torch's own runs on accelerators only."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["run_on_cpu"]


def run_on_cpu(module: nn.Module) -> None:
    """Let the SyncBatchNorm layers inside `module` compute on CPU ranks; in place."""
    for layer in module.modules():
        if type(layer) is nn.SyncBatchNorm:
            layer.__class__ = _CpuSyncBatchNorm


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the sum of the gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(value: Tensor) -> Tensor:
    summed: Tensor = _SumOverRanks.apply(value)  # type: ignore[no-untyped-call]
    return summed


class _CpuSyncBatchNorm(nn.SyncBatchNorm):
    """SyncBatchNorm in plain operations: statistics over the batches of all ranks."""

    def forward(self, input: Tensor) -> Tensor:  # [batch, channels, ...]
        """Normalise over the batch and the positions of every rank."""
        uses_batch = self.training or self.running_mean is None
        if input.device.type != "cpu" or not uses_batch:
            if input.device.type != "cpu":
                return super().forward(input)
            return functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        dims = [dim for dim in range(input.ndim) if dim != 1]
        shape = [1, -1] + [1] * (input.ndim - 2)
        values = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        own = torch.tensor([input.numel() // input.shape[1]])  # integer: exact in any default dtype
        dist.all_reduce(own)
        count = float(own.item())
        mean = _sum_over_ranks(values.sum(dims)) / count
        centred = values - mean.view(shape)
        variance = _sum_over_ranks(centred.square().sum(dims)) / count
        self._update_running(mean.detach(), variance.detach(), count)
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: float) -> None:
        if not self.training or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
