"""Hyper-parameters in Lightning's checkpoint dictionary that are more than plain values.

They are kept beside the others, so that what Lightning's own tools read out of a folder holds
plain values only, and neither needs nor misunderstands them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.collective import rank_and_size
from shardplug.integrations.common import plain_meta as meta

__all__ = ["KEYS", "put_back", "take_out"]

KEYS = (
    "hyper_parameters",
    "hparams_type",
    "datamodule_hyper_parameters",
    "datamodule_hparams_type",
)
"""Lightning's keys of a module's and a data module's hyper-parameters."""


def take_out(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take hyper-parameters that are no plain values out of a checkpoint dictionary.

    Paths stay as text. Modules that are part of the sharded model are left out altogether, with a
    warning: their weights are in the checkpoint already, and this rank has only its shards.

    Args:
        checkpoint: Lightning's dictionary; it is changed.

    Returns:
        What was taken out, by the keys it stood under, in a form that a plain file can hold.

    Raises:
        CheckpointError: For one that cannot be pickled, naming it.
    """
    taken: dict[str, Any] = {}
    for key in KEYS:
        entries = checkpoint.get(key)
        if entries is None or meta.is_plain(entries):
            continue
        where = f"checkpoint[{key!r}]"
        if type(entries) is not dict:  # OmegaConf's, or a class
            taken[key] = meta.encode(checkpoint.pop(key), where)
            continue
        _warn_of_shards(key, [name for name, value in entries.items() if _holds_shards(value)])
        kept = {name: value for name, value in entries.items() if not _holds_shards(value)}
        taken[key] = {
            name: meta.encode(value, f"{where}[{name!r}]")
            for name, value in kept.items()
            if not meta.is_plain(value)
        }
        checkpoint[key] = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in kept.items()
            if isinstance(value, Path) or meta.is_plain(value)
        }
    return taken


def put_back(checkpoint: dict[str, Any], taken: Mapping[str, Any] | None) -> None:
    """Undo `take_out`; the entries stay encoded."""
    for key, entries in (taken or {}).items():
        checkpoint[key] = {**checkpoint[key], **entries} if key in checkpoint else entries


def _holds_shards(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return any(isinstance(parameter, DTensor) for parameter in value.parameters())
    if isinstance(value, Mapping):
        return any(_holds_shards(entry) for entry in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds_shards(entry) for entry in value)
    return isinstance(value, DTensor)


def _warn_of_shards(key: str, names: list[str]) -> None:
    if names and rank_and_size()[0] == 0:
        warnings.warn(
            f"Left out of the checkpoint's {key}: {', '.join(names)}, part of the sharded model, "
            "whose weights are saved in any case. Leave them out yourself with "
            f"save_hyperparameters(ignore={names!r}), and pass them to load_from_checkpoint.",
            UserWarning,
            stacklevel=4,
        )
