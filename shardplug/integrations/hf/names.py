"""Which tensor of the files belongs to which parameter of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from shardplug.errors import CheckpointError
from shardplug.integrations.hf.stored import ConvertedTensor, FileTensor, convert, same_values

__all__ = ["Match", "match"]

Stored = FileTensor | ConvertedTensor
Shape = tuple[int, ...]


@dataclass(slots=True)
class Match:
    """What the files hold of a model.

    Attributes:
        found: What to read, by the model's names; tensors that are tied come once.
        missing: Shapes by name of what the files lack; not what is tied to something they have.
        unexpected: Shapes by name, in the files, of what the model has no place for.
        mismatched: Shapes in the files and in the model, by the model's names.
        dtypes: dtype in the files by the model's names, ties included.
    """

    found: dict[str, Stored] = field(default_factory=dict)
    missing: dict[str, Shape] = field(default_factory=dict)
    unexpected: dict[str, Shape] = field(default_factory=dict)
    mismatched: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)


def match(model: nn.Module, files: Mapping[str, FileTensor], where: str) -> Match:
    """Find the place of every tensor of the files.

    Names are translated as transformers does: old names, the conversions of the model's
    architecture, and the base model's prefix in front or absent.

    Args:
        model: The model, on any device, sharded or not.
        files: The tensors by their names in the files.
        where: Where the files are, for messages.

    Raises:
        CheckpointError: When tensors would have to be converted in a way that needs their values,
            or tied parameters have different values in the files.
    """
    places = {n: t for n, t in model.state_dict(keep_vars=True).items() if torch.is_tensor(t)}
    names = _Names(model, places)
    result = Match()
    direct: dict[str, FileTensor] = {}
    parts: dict[str, dict[str, list[FileTensor]]] = {}
    for key in sorted(files, key=_natural):
        name, pattern = names.translate(key)
        if name not in places:
            result.unexpected[key] = files[key].shape
        elif pattern is None:
            direct[name] = files[key]
        else:
            parts.setdefault(name, {}).setdefault(pattern, []).append(files[key])
    for name, stored in direct.items():
        if stored.dtype.is_floating_point != places[name].dtype.is_floating_point:
            raise CheckpointError(
                f"Expected {name} in {places[name].dtype}, got {stored.dtype} in {where}. The "
                "files are of a quantized model, or of another one; load an unquantized one."
            )
        result.found[name] = replace(stored, rounded_to=places[name].dtype)
    for name, by_pattern in parts.items():
        result.found.update(names.convert(name, by_pattern, places, where))
    _compare_shapes(result, places)
    _join_ties(result, places, where)
    _leave_out_ignored(model, result)
    return result


class _Names:
    """Translates names with the tables of transformers, for its models."""

    def __init__(self, model: nn.Module, places: Mapping[str, torch.Tensor]) -> None:
        self._places = dict(places)
        self._prefix: str | None = None
        self._config: Any = getattr(model, "config", None)
        self._class_name = type(model).__name__
        self._renamings: list[Any] = []
        self._converters: list[Any] = []
        if isinstance(model, PreTrainedModel):
            self._prefix = model.base_model_prefix or None
            transforms = get_model_conversion_mapping(model)
            self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
            self._converters = [t for t in transforms if isinstance(t, WeightConverter)]

    def translate(self, key: str) -> tuple[str, str | None]:
        """Return the model's name for a key, and the pattern of the conversion it is part of."""
        name, pattern = self._apply(key, self._renamings, self._converters)
        if name not in self._places and key in self._places:
            return key, None
        return name, pattern

    def _apply(
        self, key: str, renamings: list[Any], converters: list[Any]
    ) -> tuple[str, str | None]:
        name, pattern = rename_source_key(key, renamings, converters, self._prefix, self._places)
        return str(name), pattern

    def convert(
        self,
        first_name: str,
        parts: dict[str, list[FileTensor]],
        places: Mapping[str, torch.Tensor],
        where: str,
    ) -> dict[str, ConvertedTensor]:
        """Return the parameters that a conversion makes, found out by running it on meta.

        Raises:
            CheckpointError: When it does not run without values.
        """
        pattern = next(iter(parts))
        converter = next(c for c in self._converters if pattern in c.source_patterns)
        first_target = converter.target_patterns[0]
        on_meta = {
            key: [torch.empty(part.shape, dtype=part.dtype, device="meta") for part in tensors]
            for key, tensors in parts.items()
        }
        made: dict[str, ConvertedTensor] = {}
        for target in converter.target_patterns:
            name = first_name.replace(first_target, target)
            if name not in places:
                raise CheckpointError(self._refusal(converter, name, where, "has no such place"))
            stored = ConvertedTensor(
                converter=converter,
                name=name,
                first_name=first_name,
                parts=parts,
                shape=(),
                by_row=False,
                rounded_to=places[name].dtype,
                config=self._config,
            )
            try:
                value = convert(stored, on_meta)
            except Exception as error:  # whatever a conversion of transformers needs
                reason = f"needs more than shapes ({type(error).__name__}: {error})"
                raise CheckpointError(self._refusal(converter, name, where, reason)) from error
            shape = tuple(value.shape)
            by_row = _is_by_row(converter.operations) and all(
                len(tensors) == shape[0] for tensors in parts.values()
            )
            made[name] = replace(stored, shape=shape, by_row=by_row)
        return made

    def _refusal(self, converter: Any, name: str, where: str, reason: str) -> str:
        operations = ", ".join(type(op).__name__ for op in converter.operations)
        return (
            f"Expected weights of {self._class_name} that can be read in parts, but {name} is "
            f"made from tensors of {where} by a conversion ({operations}) that {reason}. Load the "
            "model with transformers' from_pretrained and shard it, or save it from there with "
            "save_pretrained(folder, save_original_format=False) and load that folder."
        )


def _is_by_row(operations: Iterable[Any]) -> bool:
    kinds = [(type(op), getattr(op, "dim", None)) for op in operations]
    stacked = kinds[0] == (MergeModulelist, 0)
    return stacked and all(kind is Concatenate and dim and dim > 0 for kind, dim in kinds[1:])


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort layers and experts by number, not by digits."""
    pieces = re.split(r"(\d+)", key)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in pieces if p]


def _compare_shapes(result: Match, places: Mapping[str, torch.Tensor]) -> None:
    for name, stored in list(result.found.items()):
        wanted = tuple(places[name].shape)
        result.dtypes[name] = stored.dtype
        if stored.shape != wanted:
            result.mismatched[name] = (stored.shape, wanted)
            del result.found[name]


def _join_ties(result: Match, places: Mapping[str, torch.Tensor], where: str) -> None:
    """Keep one name of each tied tensor, and sort out what is really missing."""
    read: dict[int, str] = {}
    for name in list(result.found):
        first = read.setdefault(id(places[name]), name)
        if first == name:
            continue
        one, other = result.found[first], result.found.pop(name)
        if not isinstance(one, FileTensor) or not isinstance(other, FileTensor):
            same = one == other
        else:
            same = same_values(one, other)
        if not same:
            raise CheckpointError(
                f"Expected {first} and {name} to be equal in {where}, because the model ties "
                "them, but their values differ. Load it with tie_word_embeddings=False."
            )
    for name, tensor in places.items():
        first_name = read.get(id(tensor))
        if first_name is not None:
            result.dtypes.setdefault(name, result.dtypes[first_name])
        elif name not in result.mismatched:
            result.missing[name] = tuple(tensor.shape)


def _leave_out_ignored(model: nn.Module, result: Match) -> None:
    """Leave out what the model's class says need not be in files, or may be left over there."""
    missing = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    unexpected = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Buffers that older versions saved.
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        unexpected.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        unexpected.add(r"(^|\.)position_ids$")
    for patterns, entries in ((missing, result.missing), (unexpected, result.unexpected)):
        for name in [n for n in entries if any(re.search(p, n) for p in patterns)]:
            del entries[name]
