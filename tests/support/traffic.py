"""Counts the bytes that collectives carry."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardplug.core.ranks.collective_order import KINDS


class Traffic(TorchDispatchMode):
    """Sums the bytes that this rank sends, by kind.

    The `KINDS` are the messages of CPU ranks, told apart by their tags. Messages of int64, with
    which ranks agree, are counted apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}
        """dtypes of the gathers and reductions."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("c10d::"):
            self._count(name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        if name in ("barrier", "monitored_barrier_"):
            return
        if name == "recv_":
            return
        if name == "send":
            (tensor,), _, _, tag = args
            kind = "agreement" if tensor.dtype == torch.int64 else KINDS[tag % 4]
            self.dtypes.setdefault(kind, set()).add(tensor.dtype)
            self.bytes[kind] += tensor.numel() * tensor.element_size()
            return
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        for item in () if tensors else args[0]:  # tensors, or a list of them for each input
            tensors += item if isinstance(item, list) else [item]
        if all(t.dtype == torch.int64 for t in tensors):
            self.bytes["agreement"] += max(t.numel() * 8 for t in tensors)
            return
        self.bytes[name] += max(t.numel() * t.element_size() for t in tensors)
