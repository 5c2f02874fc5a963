"""Tensors: local parts, copies of many at once, and where their memory is."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = [
    "TorchDispatchMode",
    "WeakTensorKeyDictionary",
    "tree_leaves",
    "tree_map",
    "ShardNotes",
    "TensorWithoutMemory",
    "base_of",
    "clamp_all",
    "copies_of_all",
    "copy_all",
    "laid_out_like",
    "local_tensor",
    "multiply_all",
    "share_memory",
    "storage_bytes",
    "take_history",
    "version_of",
    "written_tensors",
]


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor without recording autograd, or the tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply tensors of one device and dtype in place, in few kernels."""
    torch._foreach_mul_(tensors, factor)


def copies_of_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return a copy of each of these tensors, which are numbers on one device, in few kernels."""
    return list(torch._foreach_add(tensors, 0)) if tensors else []


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its target, in few kernels."""
    if targets:
        torch._foreach_copy_(targets, sources)


def clamp_all(tensors: list[torch.Tensor], low: float, high: float) -> None:
    """Clamp tensors of one device and dtype in place, in few kernels."""
    torch._foreach_clamp_min_(tensors, low)
    torch._foreach_clamp_max_(tensors, high)


class TensorWithoutMemory(torch.Tensor):
    """A tensor of a shape, dtype and device, whose values are elsewhere.

    Args:
        like: Has the attributes shape, dtype and device.
    """

    @staticmethod
    def __new__(cls, like: Any) -> TensorWithoutMemory:
        """Make the tensor without a storage."""
        made: TensorWithoutMemory = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        return made


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the distinct storages behind `tensors`; those in a tier have none."""
    sizes: dict[int, int] = {}
    for tensor in tensors:  # hundreds, several times a step
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        for part in (local,) if type(local) is torch.Tensor else _parts(local):
            storage = part.untyped_storage()
            if num_bytes := storage.nbytes():
                sizes[storage.data_ptr()] = num_bytes
    return sum(sizes.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one made of others consists of, as torchao's 8-bit state; else itself."""
    if isinstance(tensor, TensorWithoutMemory):
        return []
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names: list[str] = tensor.__tensor_flatten__()[0]
    return [part for name in names for part in _parts(getattr(tensor, name))]


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one storage, or one has none."""
    if isinstance(one, TensorWithoutMemory) or isinstance(other, TensorWithoutMemory):
        return isinstance(one, TensorWithoutMemory)
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class ShardNotes:
    """Values by sharded parameter, without a reference to it.

    `module.to(...)` raises for a parameter that has weak references.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def set(self, param: Any, value: Any) -> None:
        """Note a value for the shard of one of FSDP2's parameters, as long as that is there."""
        key = id(param.sharded_param)

        def gone(known: weakref.ref[Any]) -> None:
            if key in self._by_id and self._by_id[key][0] is known:
                del self._by_id[key]

        self._by_id[key] = (weakref.ref(param, gone), value)

    def get(self, tensor: torch.Tensor) -> Any:
        """Return the value noted for a shard; None for another tensor."""
        known, value = self._by_id.get(id(tensor), (None, None))
        param = None if known is None else known()
        return value if param is not None and param.sharded_param is tensor else None

    def items(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the shards with their values."""
        found = [(known(), value) for known, value in list(self._by_id.values())]
        return [(param.sharded_param, value) for param, value in found if param is not None]


def take_history(outer: torch.Tensor, inner: torch.Tensor) -> None:
    """Let a tensor have the history of another one for the same memory, which was changed."""
    with torch.autograd._unsafe_preserve_version_counter(outer):  # type: ignore[attr-defined]
        outer.copy_(inner)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that autograd takes another one for a view of."""
    return tensor._base


def laid_out_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the DTensor of which this rank's part is `local`, laid out like `parameter`.

    Unlike `DTensor.from_local` it leaves `local` where it is, which may be the CPU beside a mesh
    of GPUs.

    Args:
        local: Same shape as the local part of `parameter`; any dtype.
        parameter: A DTensor; for a tensor that every rank holds whole, `local` is returned.
    """
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    assert spec.tensor_meta is not None
    meta = type(spec.tensor_meta)(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
    own = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(local, own, requires_grad=False)  # type: ignore[no-untyped-call]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor, or one that shares its memory, was written to in place."""
    return tensor._version


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a dispatched operation writes to."""
    written: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return written
