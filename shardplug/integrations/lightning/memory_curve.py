"""The memory curve as a Lightning callback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from shardplug.errors import ConfigError
from shardplug.integrations.lightning.callback_class import callback_class, remade, wandb_runs
from shardplug.integrations.lightning.first_step import first_step
from shardplug.plan.timeline import MemoryTimeline
from shardplug.tracking.picture import PngSink
from shardplug.tracking.sinks import JsonlSink, Sink
from shardplug.tracking.tracker import MemoryTracker
from shardplug.tracking.wandb_sink import WandbSink

__all__ = ["make_memory_curve"]

_GIB = 2**30


class _MemoryCurve:
    """Records the memory of every rank, by kind, over the phases of each optimizer step.

    Writes `memory.jsonl` and, at the end of the fit, the picture `memory.png`; where the Trainer
    has a `WandbLogger`, the rows go into its run too. Before the first step it plans the run, and
    draws predicted beside measured. Needs the strategy zero1, zero2 or zero3.
    A resumed fit continues the file; any other replaces it.
    """

    _namespace: str  # "lightning.pytorch" or "pytorch_lightning", set by make_memory_curve

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        every_n_steps: int = 1,
        picture: bool = True,
        log: bool = True,
        plan: MemoryTimeline | Literal["auto"] | None = "auto",
        alert_share: float = 0.1,
        peak_tflops: float | None = None,
    ) -> None:
        """Prepare the callback.

        Args:
            folder: Local folder of the files; by default `memory` in `trainer.default_root_dir`.
            every_n_steps: Log the first optimizer step, and those whose number is a multiple.
            picture: Whether to draw the picture, which needs matplotlib.
            log: Whether to show memory_gib and peak_gib, the highest of all ranks in the last
                logged step, in the progress bar.
            plan: "auto" plans the run at its first batch: `plan.json` and `plan.png`, and predicted
                beside measured in everything else. `shardplug.memory.plan(...).best.timeline` is
                what was planned before; None goes without.
            alert_share: Warn when measured exceeds predicted by this share.
            peak_tflops: What a device could do, in 10^12 operations per second, for MFU; known for
                the devices in `shardplug.memory.PEAK_TFLOPS`.

        Raises:
            ConfigError: If `every_n_steps` is below 1.
        """
        if every_n_steps < 1:
            raise ConfigError(f"Expected every_n_steps >= 1, got {every_n_steps!r}.")
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.picture = picture
        self.log_memory = log
        self.plan = plan
        self.alert_share = alert_share
        self.peak_tflops = peak_tflops
        self.jsonl_path: Path | None = None
        """File of the rows, known once a fit has started."""
        self.png_path: Path | None = None
        """File of the picture, known once a fit has started."""
        self._tracker: MemoryTracker | None = None
        self._jsonl: JsonlSink | None = None

    def __reduce__(self) -> Any:
        # The class is made at run time and cannot be pickled by name, as launchers that spawn do.
        state = {**self.__dict__, "_tracker": None, "_jsonl": None}
        return remade, (_MemoryCurve, self._namespace, state)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the tracker; the model is sharded now.

        Raises:
            ConfigError: If the strategy is not shardplug's, the folder is not a local one, or
                matplotlib is needed and missing.
        """
        self._close()
        engine: Any = getattr(trainer.strategy, "engine", None)
        if engine is None or not hasattr(engine, "add_phase_listener"):
            raise ConfigError(
                "Expected a Trainer with a strategy of shardplug for MemoryCurve, got "
                f'{type(trainer.strategy).__name__}; use Trainer(strategy="zero3") (or "zero1", '
                '"zero2") after `import shardplug`, or remove the callback.'
            )
        folder = self._local_folder(trainer)
        self.jsonl_path = folder / "memory.jsonl"
        self._jsonl = JsonlSink(self.jsonl_path)
        sinks: list[Sink] = [self._jsonl]
        if self.picture:
            self.png_path = folder / "memory.png"
            title = (
                f"ZeRO stage {engine.config.stage}, world size {engine.world_size}, "
                f"{engine.device.type}"
            )
            sinks.append(PngSink(self.png_path, title=title))
        # Lightning's logger passes no step to W&B, so a row of our own costs it none.
        sinks += [
            WandbSink(run, host_passes_step=False) for run in wandb_runs(trainer, self._namespace)
        ]
        self._tracker = MemoryTracker(
            engine,
            sinks,
            self.every_n_steps,
            plan=self.plan,
            folder=folder,
            alert_share=self.alert_share,
            peak_tflops=self.peak_tflops,
        )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take over the number of steps done; a checkpoint is loaded by now."""
        if self._tracker is not None and self._jsonl is not None:
            self._tracker.step = trainer.global_step
            self._jsonl.append = trainer.global_step > 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Plan the run by its first batch, before that runs; and count what is trained on."""
        if self._tracker is not None:
            self._tracker.begin(lambda: first_step(trainer, pl_module, batch, batch_idx))
            self._tracker.count(batch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Leave the time of an evaluation out of tokens per second."""
        if self._tracker is not None:
            self._tracker.interrupt()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the memory of the last logged step in the progress bar."""
        if self._tracker is None or not self.log_memory:
            return
        values = {
            "memory_gib": self._tracker.total_bytes / _GIB,
            "peak_gib": self._tracker.peak_bytes / _GIB,
        }
        # The W&B run has better curves of these already; batch_size is only used for means.
        pl_module.log_dict(
            values, prog_bar=True, logger=False, on_step=True, on_epoch=False, batch_size=1
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the picture and close the files."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep what was recorded until then."""
        self._close()

    def _close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = self._jsonl = None

    def _local_folder(self, trainer: Any) -> Path:
        folder = self.folder
        if folder is None:
            root = str(trainer.default_root_dir)
            if "://" in root:
                raise ConfigError(
                    f"Expected a local folder for the memory curve, got {root!r} from "
                    "Trainer(default_root_dir=...); give MemoryCurve(folder=...)."
                )
            folder = Path(root) / "memory"
        return Path(folder)


def make_memory_curve(namespace: str) -> type[Any]:
    """Make the MemoryCurve class for one of Lightning's two names; see `callback_class`."""
    return callback_class(_MemoryCurve, namespace)
