"""State dicts, exported weights and checkpoints of sharded models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardplug.collective import gather
from shardplug.core.ranks.every_rank import on_every_rank
from shardplug.errors import ConfigError
from shardplug.integrations.accelerate import states
from shardplug.integrations.accelerate.base import AcceleratorBase, engine_of

__all__ = ["SavingMethods"]


class SavingMethods(AcceleratorBase):
    """The part of an Accelerator that writes and reads files."""

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Gather the whole state dict. Every rank calls it.

        Args:
            model: A prepared model.
            unwrap: As in Accelerate; the model is not wrapped.

        Returns:
            Full tensors on the CPU on rank 0, an empty dictionary elsewhere.

        Raises:
            CheckpointError: When another rank does not make this call.
        """
        engine = engine_of(model)
        if engine is None:
            return model.state_dict() if self.is_main_process else {}
        gather(None, "get_state_dict()")
        return engine.full_state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write the whole model as safetensors files, with an index if there are several.

        Args:
            model: A prepared model. Every rank calls it; rank 0 writes.
            save_directory: The folder; it is created.
            max_shard_size: Largest file, in bytes or like "5GB".
            safe_serialization: False writes torch files instead.

        Raises:
            ConfigError: When the path is a file, on every rank.
            CheckpointError: When another rank does not make this call.
        """
        gather(None, "save_model()")
        if Path(save_directory).is_file():
            raise ConfigError(f"Expected a folder to save to, got the file {save_directory}.")
        super().save_model(model, save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save models, optimizers, schedulers, samplers, scaler, RNG and registered objects.

        One folder is written aside and renamed when it is complete. Every rank calls it. In the
        middle of an accumulation window the gradients accumulated so far are not saved; that is
        warned of. With `async_save` the folder is there some time after this returns, at the
        latest when `wait_for_save`, `end_training` or the next save or load returns.

        With a `total_limit` the oldest whole folders above it are removed once the new one is on
        disk, and only those: a damaged one does not count.

        Args:
            output_dir: The folder; not used with `automatic_checkpoint_naming`.
            safe_serialization: Only True: nothing is pickled but what users registered.
            **save_model_func_kwargs: None are known.

        Returns:
            The folder.

        Raises:
            ConfigError: For options that cannot be honoured, or a missing or taken path.
            CheckpointError: When a rank could not write, on every rank; an older folder stays.
                With `async_save` also for the save before this one.
        """
        if not safe_serialization or save_model_func_kwargs:
            raise ConfigError(
                "Expected save_state(output_dir) without other options, got "
                f"safe_serialization={safe_serialization}, {sorted(save_model_func_kwargs)}."
            )
        return states.save_state(self, output_dir)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state`, or the Lightning strategy's checkpoint, wrote.

        The number of ranks and the stage may differ. Every rank calls it. Of a folder that plain
        Accelerate wrote with FSDP2, weights and optimizers are loaded.

        Args:
            input_dir: The folder, or None for the newest whole one with
                `automatic_checkpoint_naming`; those passed over are warned of.
            load_kwargs: Passed to the loader of schedulers and other side files.
            **load_model_func_kwargs: `strict` (default True) is known, and `rename`: new names of
                parameters, buffers or whole modules, by those in the folder.

        Raises:
            CheckpointError: When the folder is no checkpoint or does not match, on every rank.
        """
        strict = load_model_func_kwargs.pop("strict", True)
        rename = load_model_func_kwargs.pop("rename", None)
        load_model_func_kwargs.pop("map_location", None)  # shards are loaded where they live
        if load_model_func_kwargs:
            raise ConfigError(
                "Expected no options of load_state but strict and rename, got "
                f"{sorted(load_model_func_kwargs)}."
            )
        states.load_state(self, input_dir, load_kwargs, strict=strict, rename=rename)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has come here.

        Raises:
            ScheduleError: When another rank is gone, or makes another call.
        """
        with on_every_rank("wait_for_everyone()"):
            super().wait_for_everyone()

    def wait_for_save(self) -> None:
        """Wait until the save that was started with `async_save` is on disk. Every rank calls it.

        Raises:
            CheckpointError: When it failed, on every rank.
        """
        if self._engine is not None:
            self._engine.wait_for_save()

    def end_training(self) -> None:
        """Wait for the save under way, then do what Accelerate does at the end.

        Raises:
            CheckpointError: When that save failed, on every rank.
        """
        try:
            self.wait_for_save()
        finally:
            super().end_training()
