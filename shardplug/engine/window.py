"""The micro-batches of one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardplug.core._torch.gradients import drop_unreduced_gradients, has_unreduced_gradients
from shardplug.core.schedule import Schedule
from shardplug.engine.listener import EngineListener, Listeners
from shardplug.engine.models import ShardedModels
from shardplug.engine.offload import Offload
from shardplug.errors import ScheduleError

__all__ = ["Window"]


class Window:
    """Which micro-batch of an optimizer step runs, and what completes a backward.

    Args:
        models: The sharded models.
        schedule: Tells FSDP2 what to gather and reduce.
        offload: The tiers.
        listeners: Told of micro-batches and phases.
    """

    def __init__(
        self, models: ShardedModels, schedule: Schedule, offload: Offload, listeners: Listeners
    ) -> None:
        self._models = models
        self._schedule = schedule
        self._offload = offload
        self._listeners = listeners
        self._backward_ran = False
        self._pending = False  # gradients were accumulated and not reduced

    @contextmanager
    def micro_step(self, last: bool) -> Iterator[None]:
        """Run a micro-batch's forward and backward inside."""
        self._schedule.begin(last)
        self._listeners.tell(EngineListener.micro_step, last)
        try:
            with self._listeners.telling_errors():
                yield
                self.after_backward()
        finally:
            self._schedule.begin(True)

    def backward_reaches_unit(self) -> None:
        """Note that a backward runs."""
        self._backward_ran = True

    def after_backward(self) -> None:
        """Complete a backward, if one has run. Collective.

        Raises:
            ScheduleError: On every rank, when the ranks used different units.
        """
        if not self._backward_ran:
            return
        self._backward_ran = False
        self._pending = not self._schedule.last
        if self._schedule.last:
            for sharded in self._models:
                sharded.rank_sync.window_closes()
        for sharded in self._models:
            sharded.rank_sync.backward_ends()
        self._offload.raise_errors("The backward")
        self._listeners.tell_phase("after_backward")

    def require_boundary(self, what: str) -> None:
        """Complete a backward, and refuse a call before the window's last micro-batch.

        Raises:
            ScheduleError: Naming `what` was called.
        """
        self.after_backward()
        if self._pending:
            raise ScheduleError(
                f"Expected {what} after the last micro-batch of a window, but the latest one ran "
                "under micro_step(last=False), so its gradients are not reduced over the ranks. "
                "Run the window's last micro-batch with last=True, or drop the window with "
                "optimizer.zero_grad()."
            )

    def drop_gradients(self, only: Callable[[], set[int] | None]) -> None:
        """Drop the window's unreduced gradients.

        Args:
            only: Returns the ids of the parameters concerned; None means all.
        """
        if not self._pending:
            return
        models = self._models.modules
        for model in models:
            drop_unreduced_gradients(model, only())
        if not any(has_unreduced_gradients(model) for model in models):
            self._pending = False
            for sharded in self._models:
                sharded.rank_sync.reset()

    def reset(self) -> None:
        """Begin a new window."""
        self._backward_ran = False
        self._pending = False
        self._schedule.begin(True)
