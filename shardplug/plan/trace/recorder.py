"""Notes every storage that operations make, and when it goes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from shardplug.core._torch.tensors import TorchDispatchMode
from shardplug.core._torch.tracing import grouped_product_flops, is_read_of_value, run_on_meta
from shardplug.plan.trace.known_values import KnownValues

__all__ = ["MADE", "Event", "Mark", "Recorder", "flops_of"]


class Mark(IntEnum):
    """What an event is."""

    ALLOCATE = 0  # number: storage, size: bytes
    FREE = 1  # number: storage
    ENTER = 2  # number: unit; its forward begins
    LEAVE = 3  # number: unit; its forward has ended
    BACK = 4  # number: unit; its backward begins
    DONE = 5  # number: unit; its backward has ended
    GRADIENT = 6  # number: parameter, size: storage that now holds its whole gradient
    FLOPS = 7  # size: operations since the last such event
    LOSS = 8  # the forward has ended, the backward begins
    END = 9  # the backward has ended
    AWAY = 10  # number: storage, size: bytes; as ALLOCATE, but in CPU memory


MADE = (Mark.ALLOCATE, Mark.AWAY)
"""Marks of a storage that begins."""


class Event(NamedTuple):
    """One event of a trace."""

    mark: Mark
    number: int = -1
    size: int = 0


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every storage that an operation makes, and when it goes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Event] = []
        self._storages: dict[int, tuple[Any, int]] = {}
        self._next = 0
        self._silent: set[int] = set()
        self._flops = 0
        self.known = KnownValues()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Forget the storages at the end: what goes later is in no trace."""
        try:
            yield
        finally:
            self._storages.clear()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave the storages of parameters and buffers out."""
        for tensor in tensors:
            self._silent.add(self._note(tensor))
        self.events.clear()

    def add(self, mark: Mark, number: int = -1, size: int = 0) -> None:
        """Add a mark."""
        if self._flops:
            self.events.append(Event(Mark.FLOPS, -1, self._flops))
            self._flops = 0
        self.events.append(Event(mark, number, size))

    def gradient(self, parameter: int, grad: torch.Tensor) -> None:
        """Note that a storage has become the whole gradient of a parameter."""
        number = self._note(grad)
        if number in self._silent:
            return  # it has grown, in place
        self._silent.add(number)
        self.add(Mark.GRADIENT, parameter, number)

    def away(self, tensor: torch.Tensor) -> None:
        """Note that a storage which has just been made is in CPU memory beside the device."""
        number = self._note(tensor)
        made = self.events.pop()
        assert made == Event(Mark.ALLOCATE, number, tensor.untyped_storage().nbytes())
        self.events.append(Event(Mark.AWAY, number, made.size))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_read_of_value(func) and args[0].is_meta:
            return self.known.read(args[0])
        output = run_on_meta(func, args, kwargs)
        self.known.follow(func, args, kwargs, output)
        self._flops += flops_of(func, args, kwargs, output)
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, torch.Tensor):
                self._note(value)
            elif isinstance(value, (tuple, list)):
                for inner in value:
                    if isinstance(inner, torch.Tensor):
                        self._note(inner)
        return output

    def _note(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        key = id(storage)  # torch keeps the Python object as long as the storage lives
        known = self._storages.get(key)
        if known is not None:
            return known[1]
        number = self._next
        self._next += 1
        self._storages[key] = (weakref.ref(storage, lambda _: self._gone(key)), number)
        self.events.append(Event(Mark.ALLOCATE, number, storage.nbytes()))
        return number

    def _gone(self, key: int) -> None:
        known = self._storages.pop(key, None)
        if known is not None and known[1] not in self._silent:
            self.events.append(Event(Mark.FREE, known[1]))


def flops_of(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    """Count an operation's floating point operations as torch's FlopCounterMode does."""
    from torch.utils.flop_counter import flop_registry

    packet = getattr(func, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return grouped_product_flops(func, args)
    return int(formula(*_with_all_heads(str(packet), args), **kwargs, out_val=output))


def _with_all_heads(name: str, args: Any) -> Any:
    """Give keys and values the queries' heads, which torch before 2.13 needs to count attention.

    Grouped-query attention computes with each head of the keys once per query head of its group.
    """
    if not name.startswith("aten._scaled_dot_product"):
        return args
    first = 1 if name.endswith("_backward") else 0  # the gradient of the output comes first
    heads = args[first].shape[1]
    grown = (value[:, :1].expand(-1, heads, -1, -1) for value in args[first + 1 : first + 3])
    return (*args[: first + 1], *grown, *args[first + 3 :])
