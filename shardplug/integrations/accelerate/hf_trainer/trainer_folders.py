"""Checkpoints of Hugging Face's Trainer: one folder of ours inside its `checkpoint-<step>`.

Trainer writes a checkpoint in parts: the whole weights as Hugging Face files, then, through two
functions of Accelerate that these replace, what a sharded run resumes from, then scheduler, random
state, and last `trainer_state.json`. Our part is the same folder that every host writes: any stage,
number of ranks or framework reads it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import fsdp_utils as stock
from torch import nn

from shardplug.checkpoint import Reader, state_of_model, state_of_optimizer, write
from shardplug.checkpoint.export.export_plan import CHANGED_BASE
from shardplug.checkpoint.foreign.dcp_folder import check_safe
from shardplug.checkpoint.foreign.foreign_folders import TRAINER_FOLDER
from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.dcp_metadata import METADATA
from shardplug.checkpoint.read.load_plan import LEFT_OUT
from shardplug.checkpoint.state.frozen_base import unchanged_base
from shardplug.collective import from_rank_0, together
from shardplug.errors import CheckpointError
from shardplug.integrations.accelerate.states import bare_optimizer

__all__ = [
    "FOLDER",
    "last_whole_checkpoint",
    "load_model",
    "load_optimizer",
    "save_all",
    "skip_model_save",
]

FOLDER = TRAINER_FOLDER
"""Our folder in a checkpoint. Trainer looks for both parts of this name before it loads either."""

_STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def skip_model_save(
    plugin: Any, accelerator: Any, model: nn.Module, output_dir: str, *args: Any, **kwargs: Any
) -> None:
    """Do nothing: `save_all`, which Trainer calls next, writes the model too.

    Args:
        plugin: The FSDP plugin; not used.
        accelerator: The trainer's; not used.
        model: The sharded model; not used.
        output_dir: The checkpoint; not used.
        *args: As for Accelerate's function.
        **kwargs: As for Accelerate's function.
    """


def save_all(
    plugin: Any,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Write model, optimizer and random state into a folder of the checkpoint. Collective.

    The frozen base under PEFT's adapters is left out, as Accelerate does with FSDP, but for the
    tensors of it that have changed since the model was set up.

    Args:
        plugin: The FSDP plugin.
        accelerator: The trainer's.
        optimizer: Its prepared optimizer.
        model: Its sharded model.
        output_dir: The checkpoint; rank 0's counts.
        *args: As for Accelerate's function.
        **kwargs: As for Accelerate's function.

    Raises:
        CheckpointError: On every rank, when a rank could not write.
    """
    if "FULL_STATE_DICT" not in str(plugin.state_dict_type) and accelerator.is_main_process:
        warnings.warn(
            f"fsdp_state_dict_type is {plugin.state_dict_type.name}: Trainer writes no Hugging "
            "Face files, in checkpoints and in save_model(). Write them with `shardplug export "
            f"{Path(output_dir) / FOLDER} <folder>`, or set FULL_STATE_DICT.",
            UserWarning,
            stacklevel=2,
        )
    named = _CHECKPOINT.fullmatch(Path(output_dir).name)
    step = int(named[1]) if named else accelerator.completed_steps
    state = together(lambda: state_of_model(model), "Saving")
    base, changed = together(lambda: unchanged_base(model, state), "Saving")
    run = {**accelerator.engine.describe_run(), "framework": "transformers", "step": step}
    if base:
        run[LEFT_OUT] = [base]
    if changed:
        run[CHANGED_BASE] = [changed]
    if changed and accelerator.is_main_process:
        warnings.warn(
            f"The frozen base under the adapters has changed since it was loaded ({len(changed)} "
            f"tensors): {FOLDER} in {output_dir} holds what has changed, and training resumes from "
            "there. adapter_model.safetensors and `shardplug export` hold the adapter alone, which "
            "belongs to the changed base: save that too (merge_and_unload, save_pretrained).",
            UserWarning,
            stacklevel=2,
        )
    write(
        Path(output_dir) / FOLDER,
        models=[{name: value for name, value in state.items() if name not in base}],
        optimizers=[state_of_optimizer([model], bare_optimizer(optimizer))],
        meta={"step": step},
        run=run,
        modules=[model],
    )


def load_model(
    plugin: Any, accelerator: Any, model: nn.Module, input_dir: str, *args: Any, **kwargs: Any
) -> None:
    """Read the weights of a checkpoint. Collective.

    It is ours, plain Accelerate's with FSDP2, or a folder of Hugging Face files.

    Args:
        plugin: The FSDP plugin.
        accelerator: The trainer's.
        model: Its sharded model.
        input_dir: The checkpoint; rank 0's counts.
        *args: As for Accelerate's function.
        **kwargs: As for Accelerate's function.

    Raises:
        CheckpointError: On every rank, when its part is damaged or does not match.
    """
    folder = Path(input_dir)
    with _naming_the_last_whole(folder):
        if from_rank_0((folder / FOLDER).is_dir()):
            Reader(folder / FOLDER).load([model])
        elif from_rank_0(any(folder.glob("pytorch_model_fsdp*"))):
            _check_safe(folder, "pytorch_model_fsdp_*")
            accelerator.engine.reshard()
            stock.load_fsdp_model(plugin, accelerator, model, input_dir, *args, **kwargs)
        else:
            Reader(folder).load([model])
            if accelerator.is_main_process and not any(folder.glob("optimizer*")):
                warnings.warn(
                    f"{folder} holds weights only: the optimizer starts anew.",
                    UserWarning,
                    stacklevel=2,
                )


def load_optimizer(
    plugin: Any,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Read the optimizer of a checkpoint: ours, or plain Accelerate's. Collective.

    Args:
        plugin: The FSDP plugin.
        accelerator: The trainer's.
        optimizer: Its prepared optimizer.
        model: Its sharded model.
        input_dir: The checkpoint; rank 0's counts.
        *args: As for Accelerate's function.
        **kwargs: As for Accelerate's function.

    Raises:
        CheckpointError: On every rank, when its state is not there or does not match.
    """
    folder = Path(input_dir)
    with _naming_the_last_whole(folder):
        if from_rank_0((folder / FOLDER).is_dir()):
            reader = Reader(folder / FOLDER)
            # Trainer has loaded the model just before.
            reader.load([model], [bare_optimizer(optimizer)], weights=False)
            accelerator.completed_steps = reader.meta["step"]
        elif from_rank_0(any(folder.glob("pytorch_model_fsdp*"))):
            _check_safe(folder, "optimizer_*")
            stock.load_fsdp_optimizer(
                plugin, accelerator, optimizer, model, input_dir, *args, **kwargs
            )
        else:
            raise CheckpointError(
                f"Expected the optimizer's state of a sharded run in {folder}, got optimizer.pt of "
                "a Trainer that does not shard. Start a new run from its weights: "
                f'from_pretrained("{folder}"), without resume_from_checkpoint.'
            )


def _check_safe(folder: Path, pattern: str) -> None:
    """Check that nothing runs when Accelerate reads the sharded folders in a checkpoint.

    Raises:
        CheckpointError: On every rank, naming what is in the way.
    """

    def check() -> None:
        for path in sorted(folder.glob(pattern)):
            if (path / METADATA).exists():
                check_safe(path)

    together(check, "Loading")


def last_whole_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint that was finished, as `get_last_checkpoint` does for all.

    Args:
        folder: The trainer's `output_dir`.

    Returns:
        Its path, or None. Those passed over are warned of on rank 0.
    """
    passed_over: list[str] = []
    for path in _newest_first(Path(folder)):
        reason = _why_not_whole(path)
        if reason is None:
            # Scripts ask before the process group is up: the launcher's number counts.
            if passed_over and os.environ.get("RANK", "0") == "0":
                warnings.warn(
                    f"Resuming from {path}, the newest whole checkpoint in {folder}. Passed over: "
                    + "; ".join(passed_over),
                    UserWarning,
                    stacklevel=2,
                )
            return str(path)
        passed_over.append(reason)
    return None


def _newest_first(folder: Path) -> Iterator[Path]:
    numbers = {
        int(match[1]): path
        for path in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(path.name)) and path.is_dir()
    }
    for number in sorted(numbers, reverse=True):
        yield numbers[number]


def _why_not_whole(folder: Path) -> str | None:
    """Say what is missing in a checkpoint, which Trainer writes in parts, or damaged."""
    if _CHECKPOINT.fullmatch(folder.name):
        try:
            json.loads((folder / _STATE).read_text())
        except (OSError, ValueError):
            return f"{folder} was not finished: there is no whole {_STATE} in it."
    if (folder / FOLDER).is_dir():
        try:
            manifests.read(folder / FOLDER)
        except (CheckpointError, OSError) as error:
            return str(error)
    return None


@contextmanager
def _naming_the_last_whole(folder: Path) -> Iterator[None]:
    """Add the newest whole checkpoint beside `folder` to the message of a load that fails."""
    try:
        yield
    except CheckpointError as error:
        beside = (p for p in _newest_first(folder.absolute().parent) if p != folder.absolute())
        # One without optimizer state by name does not resume either.
        sharded = (p for p in beside if any(p.glob("pytorch_model_fsdp*")))
        found = next((path for path in sharded if _why_not_whole(path) is None), None)
        if found is None:
            raise
        raise CheckpointError(
            f"{error} The newest whole checkpoint beside it is {found}: "
            f'resume_from_checkpoint="{found}".'
        ) from error
