"""`save_state` and `load_state`: the project's checkpoint folder with Accelerate's side files.

folder/
  .metadata, __<rank>_0.distcp   models and optimizers, by name
  meta.pt, rng_<rank>.pt         counters; random states
  scheduler.bin, scheduler_1.bin schedulers
  scaler.pt                      fp16 loss scale
  dl_state_dict.bin              stateful data loaders; epoch and seed of others are in meta.pt
  custom_checkpoint_<k>.pkl      registered objects
  manifest.json                  written last
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.checkpointing import save_custom_state
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.other import load as load_file
from accelerate.utils.other import save as save_file

from shardplug.checkpoint import Reader, state_of_model, state_of_optimizer, together, write
from shardplug.checkpoint.format.plain import UNREADABLE, why
from shardplug.errors import CheckpointError, ConfigError
from shardplug.integrations.accelerate import folders
from shardplug.integrations.accelerate.loaders import load_loader_state, loader_state
from shardplug.integrations.common.opening import naming_the_newest_whole, steps_done

if TYPE_CHECKING:
    from shardplug.integrations.accelerate.base import AcceleratorBase

__all__ = ["bare_optimizer", "load_state", "save_state"]

_META = "accelerate"


def bare_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside Accelerate's wrapper."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def save_state(accelerator: AcceleratorBase, output_dir: str | os.PathLike[str] | None) -> Path:
    """Write everything the accelerator prepared into one folder. Collective.

    Args:
        accelerator: The accelerator.
        output_dir: The folder, unless its project configuration names folders itself.

    Returns:
        The folder.
    """
    project = accelerator.project_configuration
    automatic = bool(project.automatic_checkpoint_naming)
    folder = folders.new_folder(accelerator) if automatic else output_dir
    if folder is None:
        raise ConfigError(
            "Expected a folder: save_state(output_dir), or a ProjectConfiguration with "
            "automatic_checkpoint_naming=True."
        )
    folder = Path(folder).expanduser()
    if not accelerator.sync_gradients and accelerator.is_main_process:
        warnings.warn(
            "save_state() in the middle of an accumulation window: the gradients accumulated since "
            "the last optimizer step are not saved, so a run resumed from here will differ. Save "
            "where accelerator.sync_gradients is true.",
            UserWarning,
            stacklevel=3,
        )
    models = accelerator._models
    write(
        folder,
        models=together(lambda: [state_of_model(model) for model in models], "Saving"),
        optimizers=[
            state_of_optimizer(models, bare_optimizer(optimizer))
            for optimizer in accelerator._optimizers
        ],
        meta=_meta(accelerator),
        run={
            **accelerator.engine.describe_run(),
            "framework": "accelerate",
            "step": accelerator.completed_steps,
        },
        modules=models,
        side_files=lambda aside: _write_side_files(accelerator, aside),
        background=accelerator.engine.background if accelerator._async_save else None,
    )
    project.iteration += 1
    if automatic and project.total_limit is not None and accelerator.is_main_process:
        root, limit = folder.parent, project.total_limit
        accelerator.engine.background.after(lambda: folders.drop_oldest(root, limit))
    accelerator.wait_for_everyone()
    return folder


def load_state(
    accelerator: AcceleratorBase,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | None = None,
) -> None:
    """Read a folder into everything the accelerator prepared. Collective.

    Args:
        accelerator: The accelerator, with models and optimizers prepared in the saved order.
        input_dir: The folder, or None for the newest one named automatically.
        load_kwargs: Passed to the loader of side files.
        strict: Refuse missing and unexpected parameter names.
        rename: New names by those in the folder.

    Raises:
        CheckpointError: When the folder is no checkpoint or does not match.
    """
    accelerator.wait_for_save()
    folder = folders.find_folder(accelerator, input_dir)
    with naming_the_newest_whole(folder):
        reader = Reader(folder, rename=rename)
        _check_custom_objects(accelerator, reader)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook([], str(reader.path))
        optimizers = [bare_optimizer(optimizer) for optimizer in accelerator._optimizers]
        reader.load(accelerator._models, optimizers, strict=strict)
        _read_side_files(accelerator, reader, reader.path, dict(load_kwargs or {}))
        reader.restore_rng()
    folders.count_on(accelerator, folder.parent)
    accelerator.wait_for_everyone()


def _meta(accelerator: AcceleratorBase) -> dict[str, Any]:
    return {
        "step": accelerator.completed_steps,
        _META: {
            "world_size": accelerator.num_processes,
            "micro_step": accelerator.step,
            "inside_window": not accelerator.sync_gradients,
            "loaders": [loader_state(loader) for loader in accelerator._dataloaders],
        },
    }


def _write_side_files(accelerator: AcceleratorBase, folder: Path) -> None:
    """Write what is Accelerate's own; runs on every rank, with the folder not yet published."""
    for hook in accelerator._save_model_state_pre_hook.values():
        hook(accelerator._models, [], str(folder))
    for index, scheduler in enumerate(accelerator._schedulers):
        save_file(scheduler.state_dict(), folder / _numbered("scheduler", index))
    for index, loader in enumerate(accelerator._dataloaders):
        if _is_stateful(loader) and accelerator.is_main_process:
            torch.save(loader.state_dict(), folder / _numbered("dl_state_dict", index))
    if accelerator.scaler is not None and accelerator.is_main_process:
        torch.save(accelerator.scaler.state_dict(), folder / "scaler.pt")
    for index, obj in enumerate(accelerator._custom_objects):
        save_custom_state(obj, str(folder), index)


def _read_side_files(
    accelerator: AcceleratorBase, reader: Reader, folder: Path, load_kwargs: dict[str, Any]
) -> None:
    meta = reader.meta
    ours = meta.get(_META)
    if ours is None:
        if accelerator._schedulers or accelerator._custom_objects:
            warnings.warn(
                f"{folder} holds no state of schedulers and registered objects "
                f"({reader.manifest.get('framework', 'another framework')} wrote it): they start "
                "from where they are.",
                UserWarning,
                stacklevel=5,
            )
        accelerator.completed_steps = steps_done(reader) or 0
        return
    for index, scheduler in enumerate(accelerator._schedulers):
        path = folder / _numbered("scheduler", index)
        if not path.exists():
            raise CheckpointError(
                f"Expected the state of {len(accelerator._schedulers)} schedulers in {folder}, "
                f"found {index}. Prepare the schedulers that were saved."
            )
        state = _read_file(path, load_kwargs)
        scheduler.load_state_dict(
            _rescaled(scheduler, state, ours["world_size"], accelerator.num_processes)
        )
    if accelerator.scaler is not None and (folder / "scaler.pt").exists():
        accelerator.scaler.load_state_dict(_read_file(folder / "scaler.pt", {}))
    for index, obj in enumerate(accelerator._custom_objects):
        file = folder / f"custom_checkpoint_{index}.pkl"
        obj.load_state_dict(_read_file(file, {"map_location": "cpu", **load_kwargs}))
    accelerator.completed_steps = meta["step"]
    accelerator.step = ours["micro_step"]
    if ours.get("inside_window") and accelerator.is_main_process:
        warnings.warn(
            f"{folder} was saved in the middle of an accumulation window, without its gradients: "
            "the first optimizer step has those of the window's other micro-batches only. Load a "
            "folder that was saved where accelerator.sync_gradients was true.",
            UserWarning,
            stacklevel=5,
        )
    for index, loader in enumerate(accelerator._dataloaders):
        if index < len(ours["loaders"]):
            load_loader_state(loader, ours["loaders"][index])
        path = folder / _numbered("dl_state_dict", index)
        if _is_stateful(loader) and path.exists():
            loader.load_state_dict(_read_file(path, load_kwargs))


def _read_file(path: Path, load_kwargs: Mapping[str, Any]) -> Any:
    """Read a file of Accelerate's own kind; objects that run code only where that was asked for.

    Raises:
        CheckpointError: When it cannot be read.
    """
    try:
        return load_file(path, **load_kwargs)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path} is damaged, or holds objects that run code when they are loaded: "
            f"{why(error)}. If you trust where it comes from, pass load_state(..., load_kwargs="
            "{'weights_only': False})."
        ) from error


def _rescaled(
    scheduler: Any, state: dict[str, Any], saved_world_size: int, world_size: int
) -> dict[str, Any]:
    """Convert a schedule's position, which counts `num_processes` per step, to this many ranks.

    Raises:
        CheckpointError: For schedulers whose state also holds lengths, on every rank.
    """
    once = not isinstance(scheduler, AcceleratedScheduler) or scheduler.split_batches
    if once or not scheduler.step_with_optimizer or saved_world_size == world_size:
        return state
    kind = type(scheduler.scheduler).__name__
    if "lr_lambdas" not in state:
        raise CheckpointError(
            f"Expected {saved_world_size} ranks to resume a prepared {kind}, got {world_size}: "
            "Accelerate steps it once per rank, and its saved state holds lengths in those steps. "
            "Use a LambdaLR (all of transformers' schedules are), "
            "DataLoaderConfiguration(split_batches=True), or do not prepare the scheduler."
        )
    position = state["last_epoch"] * world_size // saved_world_size
    return {**state, "last_epoch": position, "_step_count": position + 1}


def _check_custom_objects(accelerator: AcceleratorBase, reader: Reader) -> None:
    found = len(list(reader.path.glob("custom_checkpoint_*.pkl")))
    if found != len(accelerator._custom_objects) and _META in reader.meta:
        raise CheckpointError(
            f"Expected the state of {len(accelerator._custom_objects)} registered objects in "
            f"{reader.path}, found {found}: register_for_checkpointing() the objects that were "
            "saved."
        )


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _numbered(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"
