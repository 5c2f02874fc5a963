"""Out of a sharded checkpoint, back to an ordinary LightningModule."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from shardplug.checkpoint import Reader
from shardplug.errors import CheckpointError
from shardplug.integrations.common import opening
from shardplug.integrations.lightning import tensors
from shardplug.integrations.lightning.restoring import read_meta
from shardplug.integrations.lightning.saving import OWN_KEY

__all__ = ["load_from_checkpoint"]

_INSTANTIATORS = (
    "lightning.pytorch.cli.instantiate_module",
    "pytorch_lightning.cli.instantiate_module",
)

ModuleT = TypeVar("ModuleT")


def load_from_checkpoint(
    cls: type[ModuleT],
    path: str | os.PathLike[str],
    *,
    weights_only: bool | None = None,
    load_rename: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> ModuleT:
    """Build an unsharded LightningModule from a checkpoint folder, or from an ordinary file.

    Does what `cls.load_from_checkpoint` does for a file; needs no process group and no Trainer,
    and reads the whole model into this process's memory.

    Args:
        cls: The LightningModule class.
        path: A folder that a zero strategy saved, or a Lightning checkpoint file.
        load_rename: New names of parameters, buffers or whole modules, by those in the checkpoint.
        weights_only: False also unpickles hyper-parameters that are not plain values.
        **kwargs: Passed on: `map_location`, `strict`, and hyper-parameters to replace.

    Returns:
        The module, with whole parameters.

    Raises:
        CheckpointError: When there is no checkpoint at the path.
    """
    path = Path(path)
    build: Any = cls.load_from_checkpoint  # type: ignore[attr-defined]
    if path.is_file() and not load_rename:
        loaded: ModuleT = build(path, weights_only=weights_only, **kwargs)
        return loaded
    checkpoint: dict[str, Any]
    if path.is_file():
        checkpoint = torch.load(path, map_location="cpu", weights_only=weights_only)
    else:
        with opening.naming_the_newest_whole(path):
            checkpoint = _read_folder(cls, path, weights_only)
    if load_rename:
        checkpoint["state_dict"] = opening.renamed(path, checkpoint["state_dict"], load_rename)
    # Lightning's own loader reads a file object; what is in it was vetted above.
    with tempfile.TemporaryFile() as file:
        torch.save(checkpoint, file)
        file.seek(0)
        del checkpoint
        module: ModuleT = build(file, weights_only=False, **kwargs)
    return module


def _check_class(cls: type, path: Path, hyper_parameters: Any) -> None:
    """Check what LightningCLI keeps of how a module is made: older Lightning runs what it names.

    Raises:
        CheckpointError: For a function that is not LightningCLI's own, or a class that is no
            imported subclass of the one that is loaded.
    """
    found = hyper_parameters if isinstance(hyper_parameters, Mapping) else {}
    function, named = found.get("_instantiator"), found.get("_class_path")
    if function is None:
        return
    module, _, name = str(named).rpartition(".")
    made = getattr(sys.modules.get(module), name, None)
    is_subclass = isinstance(made, type) and issubclass(made, cls)
    if function not in _INSTANTIATORS or not (named is None or is_subclass):
        raise CheckpointError(
            f"Expected the hyper-parameters in {path} to be made by LightningCLI for a subclass of "
            f"{cls.__name__} that is imported, got {function!r} and {named!r}: import the module "
            "that has the class if you trust where the checkpoint comes from."
        )


def _read_folder(cls: type, path: Path, weights_only: bool | None) -> dict[str, Any]:
    reader = Reader(path, alone=True)
    checkpoint = read_meta(reader, weights_only)
    state = reader.whole_state(0)
    for name, first in checkpoint.pop(OWN_KEY).get("tied", {}).items():
        if first in state:
            state.setdefault(name, state[first])
    _check_class(cls, path, checkpoint.get("hyper_parameters"))
    checkpoint = dict(tensors.put_back(checkpoint, reader.whole_state))
    checkpoint["state_dict"] = state
    checkpoint.setdefault("pytorch-lightning_version", "2.0.0")
    return checkpoint
