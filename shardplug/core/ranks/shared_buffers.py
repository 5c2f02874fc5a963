"""Buffers that training changes, such as BatchNorm's running statistics: rank 0's count."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.core._torch.calls import persistent_buffers
from shardplug.core._torch.tensors import version_of

__all__ = ["SharedBuffers"]

_ALIGNMENT = 16  # bytes; at least the size of an element of any dtype
_HASH_BITS = 24  # the sum of their squares over 2**15 ranks is exact in int64


class SharedBuffers:
    """Gives every rank rank 0's buffers where a rank has changed them.

    This is the rule of DistributedDataParallel. It holds for the buffers in the model's
    state_dict. Those that are registered with `persistent=False`, and those whose shapes differ
    between the ranks, stay each rank's own.

    Args:
        root: The sharded model; modules that have such buffers now are followed.
        group: All ranks, on the CPU.
    """

    def __init__(self, root: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        follow = self._world_size > 1
        self._modules = [m for m in root.modules() if follow and any(_shareable(m))]
        self._seen: list[list[tuple[weakref.ref[torch.Tensor], int]]] = [[] for _ in self._modules]
        self._note()

    def __bool__(self) -> bool:
        """Whether there is anything to share."""
        return bool(self._modules)

    @torch.no_grad()
    def share(self) -> None:
        """Send rank 0's buffers to all ranks, of the modules in which they changed. Collective."""
        if not self:
            return
        message = torch.zeros(3, len(self._modules), dtype=torch.int64)
        for index, module in enumerate(self._modules):
            layout = _layout(module)
            message[:, index] = torch.tensor([self._changed(index), layout, layout * layout])
        dist.all_reduce(message, group=self._group)
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for module, changed, total, squares in zip(self._modules, *message.tolist(), strict=True):
            # The layouts are equal on all ranks if, and only if, these are.
            if changed and total * total == squares * self._world_size:
                for _, buffer in _shareable(module):
                    by_device.setdefault(buffer.device, []).append(buffer)
        for device, buffers in by_device.items():
            _broadcast(buffers, device, self._group)
        self._note()

    def _note(self) -> None:
        self._seen = [
            [(weakref.ref(buffer), version_of(buffer)) for _, buffer in _shareable(module)]
            for module in self._modules
        ]

    def _changed(self, index: int) -> bool:
        seen, buffers = self._seen[index], dict(_shareable(self._modules[index]))
        if "running_mean" in buffers:
            return True  # batch_norm's kernels write there without counting it
        return len(buffers) != len(seen) or any(
            buffer is not known() or version_of(buffer) != version
            for buffer, (known, version) in zip(buffers.values(), seen, strict=True)
        )


def _shareable(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in persistent_buffers(module):
        plain = not isinstance(buffer, DTensor) and buffer.layout is torch.strided
        if plain and not buffer.is_meta and not buffer.is_inference():
            yield name, buffer


def _layout(module: nn.Module) -> int:
    found = [(name, tuple(b.shape), str(b.dtype), b.device.type) for name, b in _shareable(module)]
    return zlib.crc32(repr(found).encode()) & ((1 << _HASH_BITS) - 1)


def _broadcast(
    buffers: Iterable[torch.Tensor], device: torch.device, group: dist.ProcessGroup
) -> None:
    """Send rank 0's values in one message, whatever their dtypes."""
    parts = [(buffer.data, _as_bytes(buffer)) for buffer in buffers]
    padded = [-(-part.numel() // _ALIGNMENT) * _ALIGNMENT for _, part in parts]
    flat = torch.zeros(sum(padded), dtype=torch.uint8, device=device)
    pieces = torch.split(flat, padded)
    for (_, part), piece in zip(parts, pieces, strict=True):
        piece[: part.numel()].copy_(part)
    if device.type == "cpu":
        dist.broadcast(flat, group=group, group_src=0)
    else:
        dist.broadcast(flat, src=0)
    for (buffer, part), piece in zip(parts, pieces, strict=True):
        # Through .data: a graph that is still to be run backward may hold the buffer, and batch
        # norm's own writes do not count as changes there either.
        buffer.copy_(piece[: part.numel()].view(buffer.dtype).view(buffer.shape))


def _as_bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
