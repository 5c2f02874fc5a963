"""The steps of the loops: forward, backward, and what comes between them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    _Base: Any  # Lightning's ParallelStrategy
else:
    _Base = object

__all__ = ["RunsSteps"]


class RunsSteps(_Base):  # type: ignore[misc]
    """The part of the strategy that the loops call."""

    _in_window: bool

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's validation_step."""
        with _without_inference_mode():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's test_step."""
        with _without_inference_mode():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's predict_step."""
        with _without_inference_mode():
            return super().predict_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Evaluate from shards."""
        self._before_evaluation()

    def on_test_start(self) -> None:
        """Evaluate from shards."""
        self._before_evaluation()

    def on_predict_start(self) -> None:
        """Evaluate from shards."""
        self._before_evaluation()

    def _before_evaluation(self) -> None:
        # In the middle of a window stages 1 and 2 hold gathered copies, which a callback that
        # swaps weights for the evaluation would not reach.
        self.engine.reshard()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Continue the saved run's random numbers, if no loader of ours has done it already."""
        self.restore_rng()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Run a micro-batch that is not the last of its accumulation window."""
        with self.engine.micro_step(last=False):
            self._in_window = True
            try:
                yield
            finally:
                self._in_window = False

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the backward; gradients are complete before `on_after_backward`."""
        plugin, module = self.precision_plugin, self.lightning_module
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if not self._in_window:
            self.engine.after_backward()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss


@contextmanager
def _without_inference_mode() -> Generator[None, None, None]:
    """Evaluate under no_grad where the loop runs under inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield
