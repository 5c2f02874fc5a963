"""Monitors and targets as a Lightning callback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from shardplug.errors import ConfigError
from shardplug.integrations.lightning.callback_class import callback_class, remade, wandb_runs
from shardplug.monitor import Monitor, MonitorConfig, Sink, WandbAlerts
from shardplug.plan.run.throughput import batch_size_of

__all__ = ["make_run_monitor"]


class _RunMonitor:
    """Detects what goes wrong in a fit and judges its declared targets, on all ranks together.

        RunMonitor({"targets": {"step_seconds": 1.2}, "actions": {"nonfinite": "rollback"}})

    What is found is logged and, where the Trainer has a `WandbLogger`, sent as a W&B alert. "stop"
    ends the fit after this step. "rollback" returns weights, optimizers, schedulers and the step
    count to the newest whole checkpoint; the data goes on. Needs a zero strategy.
    """

    _namespace: str  # "lightning.pytorch" or "pytorch_lightning", set by make_run_monitor

    def __init__(
        self,
        config: MonitorConfig | Mapping[str, Any] | None = None,
        folder: str | os.PathLike[str] | None = None,
        grad_norm: bool = True,
    ) -> None:
        """Prepare the callback.

        Args:
            config: A `MonitorConfig`, or plain values for `MonitorConfig.from_dict`.
            folder: Folder of checkpoints to go back to; by default the ModelCheckpoint's.
            grad_norm: Whether to take the norm of all gradients before clipping, in each step that
                is looked at: one pass over them and one small message.

        Raises:
            ConfigError: For a wrong option.
        """
        if not isinstance(config, MonitorConfig):
            config = MonitorConfig.from_dict(config or {})
        self.config = config
        self.folder = folder
        self.takes_grad_norm = grad_norm
        self.monitor: Monitor | None = None
        """The monitor of the fit, known once it has started."""
        self._saved: dict[str, Any] | None = None
        self._forget_step()

    def __reduce__(self) -> Any:
        # The class is made at run time and cannot be pickled by name, as launchers that spawn do.
        return remade, (_RunMonitor, self._namespace, {**self.__dict__, "monitor": None})

    def _forget_step(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._tokens: float | None = None
        self._norm: float | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Make the monitor.

        Raises:
            ConfigError: If the strategy is not shardplug's, or there is no folder to go back to.
        """
        if not hasattr(trainer.strategy, "go_back"):
            raise ConfigError(
                "Expected a Trainer with a strategy of shardplug for RunMonitor, got "
                f'{type(trainer.strategy).__name__}; use Trainer(strategy="zero3") (or "zero1", '
                '"zero2") after `import shardplug`.'
            )
        # Lightning's logger passes no step to W&B, so a row of our own costs it none.
        sinks: list[Sink] = [
            WandbAlerts(run, host_passes_step=False) for run in wandb_runs(trainer, self._namespace)
        ]
        self.monitor = Monitor(self.config, folder=self._checkpoints(trainer), sinks=sinks)
        if self._saved is not None:
            self.monitor.load_state_dict(self._saved)

    def _checkpoints(self, trainer: Any) -> Any:
        if self.folder is not None or not self.config.may_roll_back:
            return self.folder
        callback = trainer.checkpoint_callback
        if callback is None:
            return None  # which the monitor refuses
        return callback.dirpath or os.path.join(trainer.default_root_dir, "checkpoints")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock; a checkpoint is loaded by now."""
        self._step = trainer.global_step
        self._forget_step()
        assert self.monitor is not None
        self.monitor.begin()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take the gradient norm before clipping."""
        if self.takes_grad_norm and self.monitor is not None and self.monitor.looks_at_next():
            self._norm = max(self._norm or 0.0, trainer.strategy.engine.grad_norm())

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Look at the step, once its last micro-batch is through, and act."""
        assert self.monitor is not None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
        tokens = batch_size_of(batch).tokens
        if tokens:
            self._tokens = (self._tokens or 0.0) + tokens
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        mean = torch.stack(self._losses).mean() if self._losses else None
        report = self.monitor.step(self._step, loss=mean, grad_norm=self._norm, tokens=self._tokens)
        self._forget_step()
        if report.action == "stop":
            trainer.should_stop = True
        elif report.resume is not None:
            trainer.strategy.wait_for_save()
            trainer.strategy.go_back(report.resume.path)
            self._step = trainer.global_step
            self.monitor.begin()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the time of an evaluation out of the next step."""
        if self.monitor is not None:
            self.monitor.begin()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log each target's last state."""
        if self.monitor is not None:
            self.monitor.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed fit goes on counting."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting from a saved fit."""
        self._saved = state_dict or None
        if self._saved is not None and self.monitor is not None:
            self.monitor.load_state_dict(self._saved)


def make_run_monitor(namespace: str) -> type[Any]:
    """Make the RunMonitor class for one of Lightning's two names; see `callback_class`."""
    return callback_class(_RunMonitor, namespace)
