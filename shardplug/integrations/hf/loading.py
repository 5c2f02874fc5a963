"""`load_pretrained`: the weights of a Hugging Face folder into a model, each rank its own rows."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.checkpoint import together
from shardplug.core._torch.resharding import reshard_all
from shardplug.core.weights.fill import WeightMaterializer
from shardplug.core.weights.origin import note_source_dtypes
from shardplug.core.weights.sources import defer_loading, deferred_in, read_own_rows
from shardplug.errors import CheckpointError, ConfigError
from shardplug.integrations.hf.adapters import ADAPTER_FILE, match_adapter
from shardplug.integrations.hf.folder import ModelFolder, find_folder
from shardplug.integrations.hf.names import Match, match

__all__ = ["LoadReport", "attach", "load_pretrained"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What of the model was not in the files, and the other way round."""

    missing: tuple[str, ...] = ()
    """The model's names of what the files lack: kept as it was, or newly initialised if on meta."""

    unexpected: tuple[str, ...] = ()
    """Names in the files that the model has no place for."""


def load_pretrained(
    model: nn.Module,
    path: str | os.PathLike[str] | None = None,
    *,
    strict: bool = True,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    token: str | bool | None = None,
) -> LoadReport:
    """Read the weights of a Hugging Face model from safetensors files. In place.

    The model may be on meta, have values already, or be sharded by an engine: then it is
    collective, and each rank reads its own rows. Names are translated as transformers does.

    A folder with a PEFT adapter is read into the adapter of the model, and nothing else is; where
    the base model is still to be read, so is the adapter then.

    Args:
        model: The model. One that `from_pretrained` returned needs no path: this call reads it
            whole into this process, as an engine would read its shards.
        path: A local folder or a hub id; None means where `from_pretrained` found the model.
        strict: Refuse missing and unexpected names. False loads what matches and returns the
            others. Other shapes are always refused.
        device: Where tensors that are on meta go.
        revision: Branch, tag or commit on the hub.
        cache_dir: Folder of the hub's cache.
        local_files_only: Download nothing.
        token: For the hub.

    Returns:
        The names that did not match.

    Raises:
        CheckpointError: When the files cannot be read, or do not match the model; on every rank
            if the model is sharded.
    """
    if path is None:
        _read_waiting(model, torch.device(device))
        return LoadReport()
    hub: dict[str, Any] = {
        "revision": revision,
        "cache_dir": cache_dir,
        "local_files_only": local_files_only,
        "token": token,
    }
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    run = together if sharded else _alone
    if sharded:
        reshard_all(model)  # what is written into gathered copies is lost
    adapter = (Path(path) / ADAPTER_FILE).is_file()
    hub["weights_name"] = ADAPTER_FILE if adapter else None
    folder = run(lambda: find_folder(path, **hub), "Loading the weights")
    found = run(lambda: _matched(model, folder, strict=strict), "Loading the weights")
    note_source_dtypes(model, found.dtypes)
    run(lambda: _read_real(model, found), "Reading the weights")
    _read_meta(model, folder, found, torch.device(device))
    return LoadReport(missing=tuple(found.missing), unexpected=tuple(found.unexpected))


def attach(model: nn.Module, folder: ModelFolder, *, strict: bool) -> None:
    """Let a model on meta be read from a folder when it is sharded.

    Raises:
        CheckpointError: When the files do not match the model.
    """
    found = _matched(model, folder, strict=strict)
    note_source_dtypes(model, found.dtypes)
    defer_loading(model, found.found, check=folder.check, together=together)
    if found.unexpected and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(
            f"Not read from {folder.path}, as {type(model).__name__} has no place for them: "
            f"{_listed(found.unexpected)}.",
            UserWarning,
            stacklevel=3,
        )


def _matched(model: nn.Module, folder: ModelFolder, *, strict: bool) -> Match:
    compare = match_adapter if folder.files == (ADAPTER_FILE,) else match
    found = compare(model, folder.tensors(), str(folder.path))
    wrong = []
    if found.mismatched:
        wrong.append(
            "other shapes: "
            + ", ".join(
                f"{name} {ours} in the files, {theirs} in the model"
                for name, (ours, theirs) in list(found.mismatched.items())[:20]
            )
        )
    if found.missing and strict:
        wrong.append(f"not in the files: {_listed(found.missing)}")
    if found.unexpected and strict:
        wrong.append(f"only in the files: {_listed(found.unexpected)}")
    if wrong:
        hint = "" if found.mismatched else " With strict=False the rest is loaded."
        raise CheckpointError(
            f"The weights in {folder.path} do not match {type(model).__name__}. "
            + "; ".join(wrong)
            + f".{hint}"
        )
    return found


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    shown = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:20])
    return shown + (f" and {len(shapes) - 20} more" if len(shapes) > 20 else "")


def _alone(action: Callable[[], T], doing: str) -> T:
    """Run an action that concerns this process only."""
    return action()


def _read_real(model: nn.Module, found: Match) -> None:
    """Read the tensors that have memory already."""
    places: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
    for name, stored in found.found.items():
        tensor = places[name]
        if tensor.is_meta:
            continue
        if isinstance(tensor, DTensor) or tensor.is_contiguous():
            read_own_rows(tensor, stored)
        else:
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            read_own_rows(whole, stored)
            tensor.detach().copy_(whole)


def _read_meta(model: nn.Module, folder: ModelFolder, found: Match, device: torch.device) -> None:
    """Read, or initialise, the tensors that are on meta."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in tensors):
        return
    places = dict(model.state_dict(keep_vars=True))
    on_meta = {name: stored for name, stored in found.found.items() if places[name].is_meta}
    if folder.files == (ADAPTER_FILE,) and deferred_in(model).together is not None:
        defer_loading(model, on_meta, check=folder.check, together=together)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the report says what is new
        defer_loading(model, on_meta, check=folder.check, together=_alone)
        _read_waiting(model, device)


def _read_waiting(model: nn.Module, device: torch.device) -> None:
    waiting: Any = deferred_in(model)
    if waiting.together is None:
        raise ConfigError(
            "Expected a model from shardplug.hf.from_pretrained that was not sharded yet, or the "
            "path of a folder to read: load_pretrained(model, path)."
        )
    waiting.together = _alone
    filler = WeightMaterializer(model, device, waiting, alone=True)
    filler.fill(list(model.modules()))
    filler.finish()
