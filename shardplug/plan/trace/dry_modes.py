"""Dispatch modes for a trace beside a run: what it may not do, and values that nobody has."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from shardplug.core._torch.tensors import TorchDispatchMode, tree_leaves, written_tensors
from shardplug.core._torch.tracing import is_copy, is_read_of_value
from shardplug.plan.trace.recorder import flops_of

__all__ = ["Guard", "Reads", "Refused"]

_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")


class Refused(Exception):
    """The step does what a trace beside a run must not do."""


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands out values that nobody has, where no module is at work.

    Steps log what they have computed: `loss.item()`, `loss.detach().cpu()`. Inside of a module a
    value decides what is computed next, and the trace has to end.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made_up = 0
        self._depth = 0

    @contextmanager
    def following(self, inside: int) -> Iterator[None]:
        """Know whether a module is at work, beyond those that the step itself is in."""
        self._depth = -inside
        enter = register_module_forward_pre_hook(lambda *_: self._count(1))
        leave = register_module_forward_hook(lambda *_: self._count(-1), always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _count(self, by: int) -> None:
        self._depth += by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth <= 0 and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if is_read_of_value(func):
                self.made_up += 1
                return torch.ones((), dtype=args[0].dtype).item()
            if is_copy(func):
                kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)


class Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would be seen outside of the trace, and counts recomputation."""

    def __init__(self, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_backward = False
        self.recomputed_flops = 0
        self._deadline = deadline
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise Refused(f"the step talks to other ranks ({func})")
        if time.monotonic() > self._deadline:
            raise Refused("tracing the step takes too long")
        if not all(self._is_own(tensor) for tensor in written_tensors(func, args, kwargs)):
            raise Refused(f"the step writes to a tensor that is no parameter ({func})")
        output = func(*args, **kwargs)
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                self._made[id(storage)] = weakref.ref(storage)
        # A backward runs without recording, but for a forward that it computes again.
        if self.in_backward and torch.is_grad_enabled():
            self.recomputed_flops += flops_of(func, args, kwargs, output)
        return output

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no memory, or memory that the trace has made."""
        if tensor.is_meta:
            return True
        storage = tensor.untyped_storage()
        known = self._made.get(id(storage))
        return known is not None and known() is storage
