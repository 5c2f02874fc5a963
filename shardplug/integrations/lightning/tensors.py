"""Tensors inside Lightning's checkpoint dictionary.

Callbacks keep further copies of the weights there: WeightAveraging the model beside its average,
StochasticWeightAveraging the average in its own state. A dictionary whose keys are names of the
module's tensors, and that holds DTensors, is written as one more model of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug.checkpoint.state.model_state import local_rows

__all__ = ["Names", "distribute", "put_back", "take_out"]

_PLACEHOLDER = "__shardplug_model__"


class Names:
    """The names of a module's parameters and persistent buffers.

    Args:
        module: A sharded module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[str, torch.Tensor] = {
            name: value
            for name, value in module.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor)
        }
        first: dict[int, str] = {}
        self._first = {n: first.setdefault(id(t), n) for n, t in self._tensors.items()}

    @property
    def tied(self) -> dict[str, str]:
        """Map the further names of tied tensors to the first, under which they are saved."""
        return {name: first for name, first in self._first.items() if name != first}

    def cover(self, entries: Mapping[Any, Any]) -> bool:
        """Whether `entries` is a state of the module, or a part of it."""
        return bool(entries) and all(
            key in self._tensors and isinstance(value, torch.Tensor)
            for key, value in entries.items()
        )

    def once(self, entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Keep tied tensors under their first name only."""
        return {
            name: value
            for name, value in entries.items()
            if self._first.get(name, name) == name or self._first[name] not in entries
        }

    def all(self, entries: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add the other names of tied tensors, as an unsharded module's state has them."""
        whole = dict(entries)
        for name, first in self.tied.items():
            if name not in whole and first in whole:
                whole[name] = whole[first]
        return whole

    def shard(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Lay a whole tensor out like the module's tensor of that name."""
        like = self._tensors[name]
        if not isinstance(like, DTensor) or isinstance(value, DTensor):
            return value
        if value.shape != like.shape:
            return value  # loading it names the difference
        return DTensor.from_local(
            local_rows(value, like).to(like.device, copy=True),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


def take_out(value: Any, names: Names, models: list[dict[str, torch.Tensor]]) -> Any:
    """Move states of the module out of nested containers, into `models`. Collective.

    A DTensor that stands elsewhere is replaced by its whole value.

    Args:
        value: Nested dicts, lists and tuples.
        names: The module's.
        models: Receives the states; a placeholder with the index is left in their place.
    """
    if isinstance(value, Mapping):
        if names.cover(value) and any(isinstance(v, DTensor) for v in value.values()):
            models.append(names.once(value))
            return {_PLACEHOLDER: len(models) - 1}
        return _like(value, {k: take_out(v, names, models) for k, v in value.items()})
    if type(value) in (list, tuple):
        return type(value)(take_out(entry, names, models) for entry in value)
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value


def put_back(value: Any, read: Callable[[int], Mapping[str, torch.Tensor]]) -> Any:
    """Undo `take_out`; `read` returns the model's state of an index. Collective."""
    if isinstance(value, Mapping):
        if _PLACEHOLDER in value:
            return read(value[_PLACEHOLDER])
        return _like(value, {key: put_back(entry, read) for key, entry in value.items()})
    if type(value) in (list, tuple):
        return type(value)(put_back(entry, read) for entry in value)
    return value


def distribute(value: Any, names: Names) -> Any:
    """Shard whole states of the module, from an ordinary file, wherever they stand."""
    if isinstance(value, Mapping):
        if names.cover(value):
            return {name: names.shard(name, tensor) for name, tensor in value.items()}
        return _like(value, {key: distribute(entry, names) for key, entry in value.items()})
    return value


def _like(original: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Keep OrderedDict, AttributeDict and the like where nothing had to be replaced."""
    same = all(original[key] is entry for key, entry in entries.items())
    return original if same else entries
