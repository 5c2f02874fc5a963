"""Plans a load: pairs names, checks shapes, and lays out the tensors to read into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardplug.checkpoint.format.manifest import RANK_BYTES, dtype_of
from shardplug.checkpoint.state.extra_state import is_extra
from shardplug.checkpoint.state.model_state import check_fits, state_and_aliases
from shardplug.checkpoint.state.optimizer_state import parameter_names
from shardplug.checkpoint.state.param_groups import check_class, match_groups
from shardplug.checkpoint.state.tensor_names import Pairing, listed, pair
from shardplug.core.quantised import quantised_like
from shardplug.errors import CheckpointError

__all__ = [
    "LEFT_OUT",
    "ModelPlan",
    "OptimizerPlan",
    "plan_model",
    "plan_optimizer",
    "whole_targets",
]

LEFT_OUT = "left_out"
"""Key in a manifest: for each model what `describe_base` says of tensors that are not in it."""


@dataclass(frozen=True)
class ModelPlan:
    """Where one model's tensors are read into.

    Attributes:
        targets: Tensors by the model's names; they share memory with the model.
        saved: The checkpoint's name for each of them.
        missing: Names that the checkpoint lacks.
        unexpected: Names that the model lacks.
        base: What the checkpoint says of tensors that were left out of it, by the model's names.
    """

    targets: Mapping[str, torch.Tensor]
    saved: Mapping[str, str]
    missing: Sequence[str]
    unexpected: Sequence[str]
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def apart(self) -> ModelPlan:
        """Return the plan with new tensors, so that the model is not changed."""
        return replace(self, targets={n: _empty_like(t) for n, t in self.targets.items()})

    def by_saved_name(self) -> dict[str, torch.Tensor]:
        """Return the targets by the checkpoint's names."""
        return {self.saved[name]: tensor for name, tensor in self.targets.items()}


def plan_model(
    path: Path,
    manifest: Mapping[str, Any],
    index: int,
    model: nn.Module,
    *,
    strict: bool,
    rank: int = 0,
) -> ModelPlan:
    """Pair a model with one of the checkpoint's.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        index: Which model of the checkpoint.
        model: The model.
        strict: Refuse names that differ.
        rank: The rank whose extra state is read, where ranks have their own.

    Raises:
        CheckpointError: For missing models, shapes that differ, names that differ with `strict`,
            and no name in common without.
    """
    saved = _saved_model(path, manifest, index)
    own, aliases = state_and_aliases(model, pack=False)
    left_out = _left_out(manifest, index)
    saved = {**left_out, **saved}
    paired = pair(aliases, saved, given=_given(manifest, index))
    if strict and (paired.missing or paired.unexpected):
        raise CheckpointError(
            f"Expected {path} to hold the model's tensors. Missing in the checkpoint: "
            f"{listed(paired.missing)}. Not in the model: {listed(paired.unexpected)}. Use "
            "strict=False to load the others."
        )
    if own and saved and not paired.saved:
        raise CheckpointError(
            f"Expected {path} to hold some of the model's tensors, but no name is the same. The "
            f"model has {listed(own, 3)}; the checkpoint has {listed(saved, 3)}."
        )
    check_fits(
        (name, own[name], tuple(saved[theirs]["shape"]), dtype_of(saved[theirs]))
        for name, theirs in paired.saved.items()
    )
    targets = {
        name: _whole(saved[theirs], rank) if is_extra(name) else own[name]
        for name, theirs in paired.saved.items()
        if theirs not in left_out
    }
    base = {name: left_out[theirs] for name, theirs in paired.saved.items() if theirs in left_out}
    return ModelPlan(targets, paired.saved, paired.missing, paired.unexpected, base)


def whole_targets(path: Path, manifest: Mapping[str, Any], index: int) -> dict[str, torch.Tensor]:
    """Return empty tensors for all of one model, on the CPU.

    Raises:
        CheckpointError: When there is no such model.
    """
    return {name: _whole(entry) for name, entry in _saved_model(path, manifest, index).items()}


def _whole(entry: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    shape = [entry[RANK_BYTES][rank]] if RANK_BYTES in entry else entry["shape"]
    return torch.empty(shape, dtype=dtype_of(entry))


def _saved_model(
    path: Path, manifest: Mapping[str, Any], index: int
) -> Mapping[str, Mapping[str, Any]]:
    models: Sequence[Mapping[str, Mapping[str, Any]]] = manifest["models"]
    if index >= len(models):
        raise CheckpointError(f"Expected {path} to hold model {index}, but it has {len(models)}.")
    return models[index]


def _left_out(manifest: Mapping[str, Any], index: int) -> Mapping[str, Mapping[str, Any]]:
    """Return the frozen tensors that a model of the checkpoint was saved without."""
    found: Sequence[Mapping[str, Mapping[str, Any]]] = manifest.get(LEFT_OUT, ())
    return found[index] if index < len(found) else {}


def _given(manifest: Mapping[str, Any], index: int) -> Sequence[str]:
    """Return the names of a model's tensors that the user chose; see `Renaming`."""
    names: Sequence[Sequence[str]] = manifest.get("renamed", ())
    return names[index] if index < len(names) else ()


@dataclass(frozen=True)
class OptimizerPlan:
    """Where one optimizer's state is read into.

    Attributes:
        targets: New tensors by parameter name (as here) and key.
        saved: The checkpoint's name for each of the parameters.
        plain: State that is no tensor, likewise.
        groups: The saved groups, with the names used here.
        kind: The class that was saved.
        left_out: The checkpoint's parameters that have state and are not the optimizer's.
    """

    targets: Mapping[str, Mapping[str, torch.Tensor]]
    saved: Mapping[str, str]
    plain: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    kind: str | None
    left_out: Mapping[str, Any]

    def by_saved_name(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the targets by the checkpoint's names."""
        return {self.saved[name]: tensors for name, tensors in self.targets.items()}

    def state(self) -> dict[str, Any]:
        """Return what was read, in the form of `state_of_optimizer`."""
        return {
            "state": {
                name: {**tensors, **self.plain.get(name, {})}
                for name, tensors in self.targets.items()
            },
            "param_groups": list(self.groups),
            "class": self.kind,
        }


def plan_optimizer(
    manifest: Mapping[str, Any],
    index: int,
    others: Mapping[str, Any],
    models: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    *,
    strict: bool = True,
    in_place: bool = False,
) -> OptimizerPlan:
    """Pair an optimizer's parameters with those of the checkpoint.

    Args:
        manifest: The checkpoint's manifest.
        index: Which optimizer of the checkpoint.
        besides: What the checkpoint has for it besides tensors.
        models: The models that own the parameters.
        optimizer: The optimizer, or None for all parameters of the models.
        strict: Refuse a checkpoint with groups that the optimizer lacks.
        in_place: Read state that lives in a tier straight into it.

    Raises:
        CheckpointError: For groups or shapes that do not match.
    """
    state: Mapping[str, Mapping[str, Any]] = manifest["optimizers"][index]
    names = parameter_names(models)
    saved = _saved_names(manifest, state, models, names)
    here = {theirs: name for name, theirs in saved.items()}
    groups = [
        {**group, "params": [here.get(name, name) for name in group["params"]]}
        for group in others["param_groups"]
    ]
    chosen = dict(names)
    if optimizer is not None:
        check_class(optimizer, others)
        match_groups(optimizer, names, groups, strict=strict)
        chosen = {p: names[p] for group in optimizer.param_groups for p in group["params"]}
    _refuse_both(state, others["plain_state"])
    targets: dict[str, dict[str, torch.Tensor]] = {}
    wrong: list[str] = []
    for parameter, name in chosen.items():
        entries = state.get(saved.get(name, name))
        if entries is None:
            continue
        shape = _saved_shape(manifest, saved.get(name, name))
        if shape is not None and shape != tuple(parameter.shape):
            wrong.append(f"{name}: {shape} in the checkpoint, {tuple(parameter.shape)} here")
            continue
        targets[name] = {
            key: _target(entry, parameter, key, optimizer, in_place=in_place)
            for key, entry in entries.items()
        }
    if wrong:
        raise CheckpointError(
            "Expected optimizer state for parameters of equal shapes, got " + "; ".join(wrong) + "."
        )
    taken = {saved.get(name, name) for name in targets}
    return OptimizerPlan(
        targets=targets,
        saved={name: saved.get(name, name) for name in targets},
        plain={here.get(name, name): values for name, values in others["plain_state"].items()},
        groups=groups,
        kind=others.get("class"),
        left_out={name: None for name, values in state.items() if values and name not in taken},
    )


def _refuse_both(state: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    twice = [
        f"{key} of {name}"
        for name, values in plain.items()
        for key in values
        if key in state.get(name, ())
    ]
    if twice:
        raise CheckpointError(
            "Expected each value of the optimizer's state to be a tensor or not, but the "
            f"checkpoint is damaged: it has both for {listed(twice)}."
        )


def _saved_names(
    manifest: Mapping[str, Any],
    state: Mapping[str, Any],
    models: Sequence[nn.Module],
    names: Mapping[nn.Parameter, str],
) -> dict[str, str]:
    """Map parameter names here to the checkpoint's, model by model."""
    if not manifest["models"]:  # an optimizer saved alone
        return dict(pair({name: {name} for name in names.values()}, state).saved)
    found: dict[str, str] = {}
    for index, model in enumerate(models[: len(manifest["models"])]):
        front = f"model{index}::" if index else ""
        own, aliases = state_and_aliases(model, pack=False)
        given = _given(manifest, index)
        paired: Pairing = pair(aliases, manifest["models"][index], given=given)
        for name, theirs in paired.saved.items():
            for alias in aliases[name]:
                found[front + alias] = front + theirs
    known = set(names.values())
    return {name: theirs for name, theirs in found.items() if name in known}


def _saved_shape(manifest: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    head, separator, tail = name.partition("::")
    index = int(head.removeprefix("model")) if separator else 0
    models = manifest["models"]
    entry = models[index].get(tail if separator else name) if index < len(models) else None
    return None if entry is None else tuple(entry["shape"])


def _target(
    entry: Mapping[str, Any],
    parameter: nn.Parameter,
    key: str,
    optimizer: torch.optim.Optimizer | None,
    *,
    in_place: bool,
) -> torch.Tensor:
    """Return what one value is read into: its place in a tier, or new memory."""
    if optimizer is None or tuple(entry["shape"]) != tuple(parameter.shape):
        return _empty(entry, parameter)
    place = getattr(optimizer.state, "target", None)
    if in_place and place is not None:
        found: torch.Tensor | None = place(parameter, key, dtype_of(entry))
        if found is not None:
            return found
    quantised = quantised_like(optimizer, parameter, key)
    return _empty(entry, parameter) if quantised is None else quantised


def _empty(entry: Mapping[str, Any], parameter: nn.Parameter) -> torch.Tensor:
    """Make a tensor to read one state into, laid out as the optimizer expects it."""
    dtype = dtype_of(entry)
    shape = tuple(entry["shape"])
    if not isinstance(parameter, DTensor) or not shape:
        return torch.empty(shape, dtype=dtype)
    if shape == tuple(parameter.shape):
        return _empty_like(parameter, dtype)
    if "shard_dim" not in entry:
        return torch.empty(shape, dtype=dtype)
    # Statistics over rows or columns: not the parameter's shape, but sharded beside it.
    dim = entry["shard_dim"]
    mesh = parameter.device_mesh
    placements = [*(Replicate() for _ in range(mesh.ndim - 1))]
    last = Replicate() if dim is None else Shard(dim)
    return dtensor.empty(shape, dtype=dtype, device_mesh=mesh, placements=[*placements, last])


def _empty_like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.empty_like(tensor, dtype=dtype)
    # Not torch.empty_like: a DTensor's layout comes out of a cache there, and may be that of an
    # equal mesh whose process groups are gone.
    return DTensor.from_local(
        torch.empty_like(tensor.to_local().detach(), dtype=dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
