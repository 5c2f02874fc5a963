"""What watches a run is told of it here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch
from torch import nn

from shardplug.core.gathered.outside_use import advise

if TYPE_CHECKING:
    from shardplug.engine.engine import ZeroEngine

__all__ = ["EngineListener", "Listeners"]

P = ParamSpec("P")


class EngineListener:
    """Told what an engine does; a method does nothing unless it is overridden.

    Listeners are passed to `ZeroEngine(listeners=...)`, and called in their order, on every rank.
    What a method raises reaches the caller of the engine.
    """

    def opened(self, engine: ZeroEngine) -> None:
        """The engine is made: its ranks are connected and its tiers are open."""

    def before_shard(self, model: nn.Module) -> None:
        """A model is about to be sharded."""

    def after_shard(self) -> None:
        """The model is sharded."""

    def optimizer_bound(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has got the sharded parameters; no room was made for its state yet."""

    def micro_step(self, last: bool) -> None:
        """A `micro_step` begins.

        Args:
            last: Whether it is the last micro-batch before the optimizer step.
        """

    def call(self, model: nn.Module, method: str, args: Any, kwargs: Any) -> None:
        """An outermost call into a model begins that records gradients."""

    def phase(self, phase: str) -> None:
        """One of "after_forward", "after_backward" and "after_step"."""

    def error(self, error: BaseException) -> None:
        """An exception ends a call into the engine or a model; it is raised unchanged after this.

        One exception may be told several times.
        """

    def closed(self) -> None:
        """The engine is closed."""


class Listeners:
    """The listeners of one engine.

    Args:
        listeners: Told in this order.
    """

    def __init__(self, listeners: Sequence[EngineListener]) -> None:
        self._listeners = list(listeners)
        self.on_phase: list[Callable[[str], None]] = []
        """Functions that are told of phases alone, after the listeners."""

    def __iter__(self) -> Iterator[EngineListener]:
        """Iterate over the listeners."""
        return iter(self._listeners)

    def tell(
        self,
        event: Callable[Concatenate[Any, P], None],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Call a method of every listener.

        Args:
            event: The method, of `EngineListener`.
            *args: What it is told.
            **kwargs: The same.
        """
        for listener in self._listeners:
            getattr(listener, event.__name__)(*args, **kwargs)

    def tell_phase(self, phase: str) -> None:
        """Tell of the end of a phase."""
        self.tell(EngineListener.phase, phase)
        for function in tuple(self.on_phase):
            function(phase)

    def tell_error(self, error: BaseException) -> None:
        """Tell of an exception.

        One about a parameter that is not whole gets a line first that says what to do.
        """
        advise(error)
        self.tell(EngineListener.error, error)

    @contextmanager
    def telling_errors(self) -> Iterator[None]:
        """Tell of an exception of the code inside, and let it through."""
        try:
            yield
        except Exception as error:
            self.tell_error(error)
            raise
