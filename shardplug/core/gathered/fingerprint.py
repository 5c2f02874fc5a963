"""Tells whether a tensor's bits have changed, without a copy of them."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

__all__ = ["Fingerprint", "changed_since", "fingerprint", "placed_like", "same_bits", "same_bytes"]

Fingerprint = tuple[torch.Tensor, ...]
"""Sums of a tensor's bits by blocks and by places in a block, and the bits at its two ends."""

_WIDTH = 256
"""64-bit words in a block: a fingerprint has about 1/256 of the tensor's bytes."""


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Return sums that change when the tensor does, on its device.

    Values that only change places are noticed too, as each is counted in the sum of its block and
    in the sum of its place in the blocks.

    Args:
        tensor: Contiguous, of any shape and dtype.
    """
    flat = tensor.detach().reshape(-1)
    per_word = max(1, 8 // flat.element_size())
    head = min(-flat.storage_offset() % per_word, flat.numel())
    length = (flat.numel() - head) // (per_word * _WIDTH) * (per_word * _WIDTH)
    ends = (flat[:head].clone(), flat[head + length :].clone())
    if not length:
        return ends
    words = flat[head : head + length].view(torch.int64).view(-1, _WIDTH)
    return (words.sum(0), words.sum(1), *ends)


def changed_since(tensor: torch.Tensor, before: Fingerprint) -> torch.Tensor:
    """Return whether a tensor has changed since its fingerprint was taken, () of bool."""
    now = fingerprint(tensor)
    if [t.shape for t in now] != [t.shape for t in before]:  # in other memory
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    found = torch.zeros((), dtype=torch.bool, device=tensor.device)
    for one, other in zip(now, before, strict=True):
        if one.numel():
            found = found | ((one != other) & ~((one != one) & (other != other))).any()
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors in CPU memory, of one shape and dtype, are equal to the bit.

    Faster than torch.equal, and NaN is equal to itself.
    """
    return same_bytes(one.data_ptr(), other.data_ptr(), one.nbytes)


def same_bytes(one: int, other: int, count: int) -> bool:
    """Whether `count` bytes at two addresses of CPU memory are equal."""
    return not count or not _compare()(one, other, count)


def placed_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return a flat copy that begins in the middle of a 64-bit word where `other` does.

    Their fingerprints are equal where their bits are.
    """
    offset = other.storage_offset() % 8
    memory = tensor.new_empty(offset + tensor.numel())
    return memory[offset:].copy_(tensor.detach().reshape(-1))


@functools.cache
def _compare() -> Any:
    compare = ctypes.CDLL(None).memcmp
    compare.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return compare
