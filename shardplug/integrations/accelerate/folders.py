"""Checkpoint folders that a ProjectConfiguration names, counts and limits."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from shardplug.checkpoint import resume_point
from shardplug.checkpoint.format import manifest as manifests
from shardplug.collective import from_rank_0
from shardplug.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from shardplug.integrations.accelerate.base import AcceleratorBase

__all__ = ["count_on", "drop_oldest", "find_folder", "new_folder"]

_AUTOMATIC = re.compile(r"checkpoint_(\d+)")


def find_folder(accelerator: AcceleratorBase, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder to load: the one asked for, or the newest whole one. Collective.

    Raises:
        CheckpointError: When there is none with an automatic name.
        ConfigError: When none is asked for and names are not automatic.
    """
    if input_dir is not None:
        return Path(input_dir).expanduser()
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError(
            "Expected a folder: load_state(input_dir), or a ProjectConfiguration with "
            "automatic_checkpoint_naming=True."
        )
    root = _automatic_root(accelerator)
    point = resume_point(root)
    if point is None:
        raise CheckpointError(f"Expected a folder checkpoint_<n> in {root}, found none.")
    return point.path


def count_on(accelerator: AcceleratorBase, root: Path) -> None:
    """Let the next save go on behind all folders there are, instead of meeting one of them."""
    project = accelerator.project_configuration
    if project.automatic_checkpoint_naming and root.absolute() == _automatic_root(accelerator):
        project.iteration = from_rank_0(max(_numbers(root), default=-1)) + 1


def _numbers(root: Path) -> list[int]:
    """Return the numbers that are taken, also by what a save that was killed has moved aside."""
    if not root.is_dir():
        return []
    found = (re.match(r"\.?checkpoint_(\d+)", path.name) for path in root.iterdir())
    return [int(match[1]) for match in found if match is not None]


def _automatic_root(accelerator: AcceleratorBase) -> Path:
    return (Path(accelerator.project_dir) / "checkpoints").absolute()


def new_folder(accelerator: AcceleratorBase) -> Path:
    """Return the next automatic folder. Collective.

    Raises:
        ConfigError: When it exists.
    """
    folder = _automatic_root(accelerator) / f"checkpoint_{accelerator.save_iteration}"
    if from_rank_0(folder.exists()):
        raise ConfigError(
            f"Expected a new folder, but {folder} exists. Load it first, or set "
            "accelerator.project_configuration.iteration to the number to go on with."
        )
    return folder


def _automatic_folders(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        return {}
    found = ((_AUTOMATIC.fullmatch(path.name), path) for path in root.iterdir())
    return {int(match[1]): path for match, path in found if match is not None}


def drop_oldest(root: Path, limit: int) -> None:
    """Remove whole checkpoints above the limit; others do not count, and are nobody's to remove."""
    whole = {n: path for n, path in _automatic_folders(root).items() if _is_whole(path)}
    for number in sorted(whole)[: max(0, len(whole) - max(1, limit))]:
        try:
            shutil.rmtree(whole[number])
        except OSError as error:
            warnings.warn(
                f"{whole[number]} is above total_limit={limit} and could not be removed: {error}.",
                UserWarning,
                stacklevel=2,
            )


def _is_whole(folder: Path) -> bool:
    try:
        manifests.read(folder)
    except (CheckpointError, OSError):
        return False
    return True
