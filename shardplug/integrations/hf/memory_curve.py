"""The memory curve as a callback of Hugging Face's Trainer."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from shardplug.errors import ConfigError
from shardplug.integrations.accelerate.base import engine_of
from shardplug.plan.timeline import MemoryTimeline
from shardplug.tracking.picture import PngSink
from shardplug.tracking.plan_sink import PlanSink
from shardplug.tracking.sinks import JsonlSink, Sink
from shardplug.tracking.tracker import MemoryTracker
from shardplug.tracking.wandb_sink import WandbSink

__all__ = ["MemoryCurve"]

_GIB = 2**30


class MemoryCurve(TrainerCallback):
    """Records the memory of every rank, by kind, over the phases of each optimizer step.

        Trainer(model=model, args=args, callbacks=[shardplug.hf.MemoryCurve()])

    Writes `memory.jsonl` and, at the end of training, the picture `memory.png`; with
    `report_to="wandb"` the rows go into the Trainer's run too. A resumed training continues the
    file; any other replaces it.

    Args:
        folder: Folder of the files; by default `memory` in the trainer's `output_dir`.
        every_n_steps: Log the first optimizer step, and those whose number is a multiple.
        picture: Whether to draw the picture, which needs matplotlib.
        log: Whether to add memory_gib and peak_gib, the highest of all ranks in the last logged
            step, to what Trainer logs.
        plan: What was planned for this run, `shardplug.memory.plan(...).best.timeline`: measured is
            then held against it (`shardplug.memory.PlanSink`).

    Raises:
        ConfigError: If `every_n_steps` is below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        every_n_steps: int = 1,
        picture: bool = True,
        log: bool = True,
        plan: MemoryTimeline | None = None,
    ) -> None:
        if every_n_steps < 1:
            raise ConfigError(f"Expected every_n_steps >= 1, got {every_n_steps!r}.")
        self.folder = folder
        self.every_n_steps = every_n_steps
        self.picture = picture
        self.log_memory = log
        self.plan = plan
        self.jsonl_path: Path | None = None
        """File of the rows, known once training has started."""
        self.png_path: Path | None = None
        """File of the picture, known once training has started."""
        self._tracker: MemoryTracker | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the tracker; the model is sharded and a checkpoint is loaded now.

        Raises:
            ConfigError: If the Trainer does not shard with shardplug.
        """
        self._close()
        engine = engine_of(kwargs["model"])
        if engine is None:
            raise ConfigError(
                "Expected a Trainer that shards with shardplug for MemoryCurve: start the script "
                "with `accelerate launch --config_file zero3.yaml -m shardplug.run`, or remove the "
                "callback."
            )
        folder = Path(args.output_dir, "memory") if self.folder is None else Path(self.folder)
        self.jsonl_path = folder / "memory.jsonl"
        sinks: list[Sink] = [JsonlSink(self.jsonl_path, append=state.global_step > 0)]
        if self.picture:
            self.png_path = folder / "memory.png"
            title = f"ZeRO stage {engine.config.stage}, world size {engine.world_size}"
            sinks.append(PngSink(self.png_path, title=f"{title}, {engine.device.type}"))
        if self.plan is not None:
            exact = engine.device.type != "cpu"
            sinks.append(PlanSink(self.plan, folder, compare_peak=exact, picture=self.picture))
        run = _wandb_run(args) if state.is_world_process_zero else None
        if run is not None:
            # Trainer passes no step to W&B, so a row of our own costs it none.
            sinks.append(WandbSink(run, host_passes_step=False))
        self._tracker = MemoryTracker(
            engine, sinks, self.every_n_steps, first_step=state.global_step
        )

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the memory of the last logged step to the losses."""
        if self._tracker is None or not self.log_memory or logs is None or "loss" not in logs:
            return
        logs["memory_gib"] = self._tracker.total_bytes / _GIB
        logs["peak_gib"] = self._tracker.peak_bytes / _GIB

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the picture and close the files."""
        self._close()

    def _close(self) -> None:
        if self._tracker is not None:
            self._tracker.close()
            self._tracker = None


def _wandb_run(args: Any) -> Any:
    """Return the run that Trainer's own callback, which comes first, has started, if any."""
    if "wandb" not in args.report_to or importlib.util.find_spec("wandb") is None:
        return None
    return getattr(sys.modules.get("wandb"), "run", None)
