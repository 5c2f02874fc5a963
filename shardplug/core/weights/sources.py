"""Weights that stand in files until the model is sharded, when each rank reads its own rows.

A module built on meta carries what it still has to read. Only the protocol is known here; what
reads the files is in an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import ModelError

__all__ = [
    "StoredTensor",
    "Together",
    "DeferredWeights",
    "forget_waiting",
    "defer_loading",
    "read_own_rows",
    "deferred_in",
]

_ATTRIBUTE = "_shardplug_waiting"  # on the module: copied, pickled and collected with it

Together = Callable[[Callable[[], Any], str], Any]
"""Runs an action on every rank and raises on all of them when it failed on one."""


class StoredTensor(Protocol):
    """A tensor that can be read in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""

    def read_into(self, out: torch.Tensor, first_row: int) -> None:
        """Fill `out`, cast to its dtype, with the rows from `first_row` on.

        Args:
            out: Contiguous, of shape (rows, *shape[1:]), on any device; the whole of a scalar.
            first_row: Where its rows start in dimension 0.
        """


@dataclass(slots=True)
class _Left:
    """What one module has left to read."""

    stored: dict[str, StoredTensor]
    stand_ins: dict[str, torch.Tensor]
    """The tensors on meta that hold the places of the stored ones, by the module's names."""
    check: Callable[[], None]
    together: Together


@dataclass(slots=True)
class DeferredWeights:
    """What a model, with the modules inside it, has left to read."""

    tensors: dict[torch.Tensor, StoredTensor] = field(default_factory=dict)
    """By the tensor on meta that holds the place."""
    replaced: list[str] = field(default_factory=list)
    """Names of tensors that were given values by someone else, and are not read."""
    checks: list[Callable[[], None]] = field(default_factory=list)
    together: Together | None = None


def defer_loading(
    module: nn.Module,
    stored: Mapping[str, StoredTensor],
    *,
    check: Callable[[], None],
    together: Together,
) -> None:
    """Let a module's tensors on meta be read when it, or a model that holds it, is sharded.

    Args:
        module: The module; a wrapper may be put around it, and adapters into it, later.
        stored: What to read, by the module's names of parameters and buffers.
        check: Raises when it cannot be read; called on every rank before anything is.
        together: What makes ranks fail together.
    """
    places = dict(_named_tensors(module))
    vars(module)[_ATTRIBUTE] = _Left(
        dict(stored), {name: places[name] for name in stored}, check, together
    )


def deferred_in(root: nn.Module) -> DeferredWeights:
    """Find what a model has left to read.

    Raises:
        ModelError: When it cannot be read into the model as it now is.
    """
    found = DeferredWeights()
    for prefix, module in root.named_modules():
        left = vars(module).get(_ATTRIBUTE)
        if left is not None:
            found.checks.append(left.check)
            found.together = left.together
            _find(prefix, module, left, found)
    if found.together is not None:
        _add_trained_copies(root, found)
    return found


def forget_waiting(root: nn.Module) -> None:
    """Drop what the model had left to read, once it is read."""
    for module in root.modules():
        vars(module).pop(_ATTRIBUTE, None)


@torch.no_grad()
def read_own_rows(tensor: torch.Tensor, stored: StoredTensor) -> None:
    """Fill a tensor: a sharded one with the rows of this rank, another with all.

    Raises:
        ModelError: When it is sharded in another way than by rows over one axis.
    """
    local, first_row = local_tensor(tensor.detach()), 0
    if isinstance(tensor, DTensor):
        axes = [axis for axis, kind in enumerate(tensor.placements) if not kind.is_replicate()]
        if [tensor.placements[axis] for axis in axes] != [Shard(0)]:
            raise ModelError(
                "Expected parameters that are sharded by rows over one axis, got placements "
                f"{tensor.placements}."
            )
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        rows, parts = tensor.shape[0], tensor.device_mesh.size(axes[0])
        rows_per_part = -(-rows // parts)
        first_row = min(coordinate[axes[0]] * rows_per_part, rows)
        assert local.shape[0] == min(rows_per_part, rows - first_row)
    if local.numel():
        stored.read_into(local, first_row)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _find(prefix: str, module: nn.Module, left: _Left, found: DeferredWeights) -> None:
    now = dict(_named_tensors(module))
    present = set(now.values())  # tensors are hashed by identity
    replaced: list[str] = []
    for name, stored in left.stored.items():
        # An adapter renames the layer that it is put around, but keeps its parameters.
        stand_in = left.stand_ins[name]
        tensor = stand_in if stand_in in present else now.get(name)
        full = f"{prefix}.{name}" if prefix else name
        if tensor is None:  # taken out of the model
            continue
        if not tensor.is_meta:
            replaced.append(full)
        elif tuple(tensor.shape) != stored.shape:
            raise ModelError(
                f"Expected {full} to keep the shape {stored.shape} of its weights in the files, "
                f"got {tuple(tensor.shape)}. To resize a model, load it whole in one process "
                "(shardplug.hf.load_pretrained(model)), resize it, save it with "
                "model.save_pretrained(folder), and load that folder."
            )
        else:
            found.tensors[tensor] = stored
    if replaced and len(replaced) == len(left.stored):
        raise ModelError(
            f"Expected {prefix or 'the model'} on meta, with its weights still to be read, but "
            "it was given memory (to_empty()?) before. Hand it to shard() as it was loaded, or "
            "read it whole with shardplug.hf.load_pretrained(model)."
        )
    found.replaced += replaced


def _add_trained_copies(root: nn.Module, found: DeferredWeights) -> None:
    """Let PEFT's trainable copies of whole modules be read from where their originals are."""
    for module in root.modules():
        original = getattr(module, "original_module", None)
        copies: Any = getattr(module, "modules_to_save", None)
        if not isinstance(original, nn.Module) or not isinstance(copies, nn.ModuleDict):
            continue
        stored = {n: found.tensors.get(t) for n, t in _named_tensors(original)}
        for copy in _values(copies):
            for name, tensor in _named_tensors(copy):
                source = stored.get(name)
                if source is not None and tensor.is_meta and tuple(tensor.shape) == source.shape:
                    found.tensors.setdefault(tensor, source)  # an adapter's own file counts more


def _values(modules: nn.ModuleDict) -> Iterable[nn.Module]:
    return modules.values()
