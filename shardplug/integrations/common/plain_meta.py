"""Keeps a checkpoint's metadata loadable without running code from it.

The metadata of a training run is mostly plain values and tensors, but hyper-parameters may be
anything: dataclasses, enums, paths, modules. Those few are pickled one by one into bytes, so that
the file as a whole is read with `weights_only=True`, and they are unpickled only when asked to.
"""

from __future__ import annotations

import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardplug.errors import CheckpointError

__all__ = ["decode", "encode", "is_plain", "pickled_entries"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size)
_PICKLED = "__shardplug_pickled__"
_PATH = "__shardplug_path__"


def is_plain(value: Any) -> bool:
    """Whether a file that is read with `weights_only` can hold `value` as it is."""
    if type(value) in (dict, OrderedDict):
        return all(is_plain(entry) for entry in value.values())
    if type(value) in (list, tuple, set):
        return all(is_plain(entry) for entry in value)
    return type(value) in _PLAIN or isinstance(value, torch.Tensor)


def encode(value: Any, where: str = "checkpoint") -> Any:
    """Replace what `weights_only` cannot load.

    Args:
        value: Nested dicts, lists and tuples of anything.
        where: Name of the value, for messages.

    Raises:
        CheckpointError: For an entry that cannot be pickled either, naming it.
    """
    if type(value) in _PLAIN or isinstance(value, torch.Tensor):
        return value
    if type(value) in (dict, OrderedDict):
        # A key may be of a type of its own too (Lightning once keyed callbacks by class).
        return {_key(k, where): encode(v, f"{where}[{k!r}]") for k, v in value.items()}
    if type(value) in (list, tuple, set):
        items = [encode(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if type(value) is list else type(value)(items)
    if isinstance(value, pathlib.Path):
        return {_PATH: str(value)}
    try:
        data = pickle.dumps(value)
    except Exception as error:  # __reduce__ of user classes may raise anything
        raise CheckpointError(
            f"Expected {where} to be something that can be pickled, got "
            f"{type(value).__module__}.{type(value).__qualname__} ({error}); leave it out of the "
            "hyper-parameters with save_hyperparameters(ignore=[...]), or out of the state."
        ) from error
    return {_PICKLED: data, "type": f"{type(value).__module__}.{type(value).__qualname__}"}


def _key(key: Any, where: str) -> Any:
    if type(key) not in _PLAIN:
        raise CheckpointError(
            f"Expected the keys of {where} to be plain values, got {key!r} of type "
            f"{type(key).__qualname__}; use its name."
        )
    return key


def pickled_entries(value: Any, where: str = "checkpoint") -> dict[str, str]:
    """Map the place of each pickled entry to the name of its class."""
    if isinstance(value, Mapping):
        if _PICKLED in value:
            return {where: str(value["type"])}
        found: dict[str, str] = {}
        for key, entry in value.items():
            found.update(pickled_entries(entry, f"{where}[{key!r}]"))
        return found
    if isinstance(value, (list, tuple, set)):
        found = {}
        for index, entry in enumerate(value):
            found.update(pickled_entries(entry, f"{where}[{index}]"))
        return found
    return {}


def decode(value: Any, *, unpickle: bool, where: str = "checkpoint") -> Any:
    """Undo `encode`.

    Args:
        value: What `encode` returned.
        unpickle: Whether entries may be unpickled, which runs code from the file.
        where: Name of the value, for messages.

    Raises:
        CheckpointError: When there is a pickled entry and `unpickle` is false, naming all.
    """
    if not unpickle:
        entries = pickled_entries(value, where)
        if entries:
            named = ", ".join(f"{place} ({kind})" for place, kind in entries.items())
            raise CheckpointError(
                "Expected plain values and tensors, as weights_only=True asks for, but the "
                f"checkpoint holds pickled objects: {named}. If you trust where it comes from, "
                "pass weights_only=False."
            )
    return _decode(value, pickle.loads)


def _decode(value: Any, loads: Callable[[bytes], Any]) -> Any:
    if isinstance(value, Mapping):
        if _PICKLED in value:
            return loads(value[_PICKLED])
        if _PATH in value:
            return pathlib.Path(value[_PATH])
        return {key: _decode(entry, loads) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)) and not isinstance(value, torch.Size):
        items = [_decode(entry, loads) for entry in value]
        return items if isinstance(value, list) else type(value)(items)
    return value
