"""Reads a checkpoint folder into models and optimizers of any layout."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.commit import MANIFEST, is_leftover, locate
from shardplug.checkpoint.read.load_plan import (
    ModelPlan,
    OptimizerPlan,
    plan_model,
    plan_optimizer,
    whole_targets,
)
from shardplug.checkpoint.read.renaming import Renaming
from shardplug.checkpoint.read.stored_tensors import OwnFolder, Source, open_source, read_meta
from shardplug.checkpoint.state.extra_state import decode, is_extra
from shardplug.checkpoint.state.frozen_base import check_base
from shardplug.checkpoint.state.model_state import restore_extra_state, state_of_model
from shardplug.checkpoint.state.optimizer_state import load_optimizer, models_of, warn_left_out
from shardplug.checkpoint.state.planners import LoadPlanner
from shardplug.checkpoint.state.rank_rng import read_rng, set_rng_state
from shardplug.checkpoint.state.tensor_names import listed
from shardplug.checkpoint.write.writer import PARAM_GROUPS
from shardplug.collective import (
    from_rank_0,
    gather,
    message_group,
    rank_and_size,
    together,
)
from shardplug.errors import CheckpointError

__all__ = ["Reader", "is_checkpoint"]

_LOADING = "Loading"
_ATTEMPTS = 5
"""How often a folder is opened that another run replaces meanwhile."""


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a complete checkpoint folder of shardplug."""
    return (locate(path) / MANIFEST).is_file()


class Reader:
    """One checkpoint folder, opened for reading.

    Tensors are read by the ranks that need them, each its own rows, whatever the layout at save.
    A constant prefix in front of all names (a LightningModule's "model.") is mapped away.
    Where a process group is up, making a Reader and reading from it is collective.
    Every byte that is used is compared with the checksums in the manifest.

    The weights of a plain torch.distributed.checkpoint folder, or of a Hugging Face folder of
    safetensors, can be read too.

    Args:
        path: The folder; rank 0's counts where a process group is up.
        weights_only: Refuse objects other than plain types and tensors in `meta.pt`.
        alone: Read on this rank only, into plain models, whatever other ranks do.
        rename: New names of parameters, buffers or whole modules, by those in the checkpoint.

    Raises:
        CheckpointError: On every rank, when it is no checkpoint of a version that can be read, a
            file is damaged, or `rename` names what is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        weights_only: bool = True,
        alone: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self._alone = alone or rank_and_size()[1] == 1
        self._source = self._open(path)
        self._renaming, self.manifest = together(
            lambda: Renaming.of(self.path, self._source.manifest, rename or {}),
            _LOADING,
            alone=self._alone,
        )
        self._weights_only = weights_only
        rank, size = rank_and_size()
        self._is_on_same_ranks = not self._alone and self.manifest["world_size"] == size
        self._rank = rank if self._is_on_same_ranks else 0

    def _plan_model(self, index: int, model: nn.Module, *, strict: bool) -> ModelPlan:
        if not self._is_on_same_ranks and index < self.num_models:
            self._warn_of_ranks(index)
        return plan_model(self.path, self.manifest, index, model, strict=strict, rank=self._rank)

    def _open(self, path: str | os.PathLike[str]) -> Source:
        """Open the folder, again where another run replaces it just now."""
        for attempt in range(_ATTEMPTS):
            given = together(
                lambda: str(locate(Path(path).expanduser())), _LOADING, alone=self._alone
            )
            self.path = Path(given if self._alone else from_rank_0(given))
            try:
                source = together(lambda: open_source(self.path), _LOADING, alone=self._alone)
                verify = functools.partial(self._verify_small_files, source)
                together(verify, _LOADING, alone=self._alone)
            except CheckpointError:
                if attempt + 1 == _ATTEMPTS or not self._is_in_flux():
                    raise
                continue
            stamps = [_stamp(source)] if self._alone else gather(_stamp(source), _LOADING)
            if len(set(stamps)) == 1:
                return source
        raise CheckpointError(f"{self.path} was replaced by other saves while it was opened.")

    def _is_in_flux(self) -> bool:
        """Whether a save is at work beside the folder, on any rank's view. Collective."""

        def seen() -> bool:
            beside = self.path.parent.glob(f".{self.path.name.lstrip('.')}.*-*")
            return is_leftover(self.path) or any(is_leftover(entry) for entry in beside)

        return seen() if self._alone else any(gather(seen(), _LOADING))

    def _verify_small_files(self, source: Source) -> None:
        """Check all files but the tensors, which are checked as they are read."""
        if isinstance(source, OwnFolder) and (self._alone or rank_and_size()[0] == 0):
            files = source.manifest["files"]
            names = [name for name in files if not name.endswith(".distcp")]
            manifests.verify(self.path, source.manifest, names)

    @functools.cached_property
    def _file(self) -> dict[str, Any]:
        if not isinstance(self._source, OwnFolder):
            return {PARAM_GROUPS: self._source.besides_tensors()}
        return read_meta(self.path, self.num_optimizers, weights_only=self._weights_only)

    @functools.cached_property
    def meta(self) -> dict[str, Any]:
        """What was given to `write` as meta."""
        return {key: value for key, value in self._file.items() if key != PARAM_GROUPS}

    @property
    def num_models(self) -> int:
        """Number of models in the checkpoint."""
        return len(self.manifest["models"])

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers in the checkpoint."""
        return len(self.manifest["optimizers"])

    def load(
        self,
        models: Any,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        strict: bool = True,
        weights: bool = True,
    ) -> list[tuple[list[str], list[str]]]:
        """Read models and optimizers in place. Collective.

        Names, shapes and groups of all of them are checked before the first tensor changes. Extra
        state of modules that was another one on each rank goes to the rank it came from; on another
        number of ranks all get rank 0's, which is warned of.
        Parameters are read straight into their shards, without a second copy.

        Args:
            models: An engine, a model or models, in the order they were saved.
            optimizers: Optimizers, in the order they were saved.
            strict: Refuse missing and unexpected names, and parameter groups that an optimizer
                lacks; False loads what matches.
            weights: False reads the optimizers alone, into models that have been loaded.

        Returns:
            For each model that was read the names that it has and the checkpoint lacks, and the
            other way round.

        Raises:
            CheckpointError: On every rank, when something does not match or cannot be read.
        """
        owners = models_of(models)
        read = owners if weights else []
        self._agree_on_what(len(read), optimizers, strict)

        def plan() -> tuple[list[ModelPlan], list[OptimizerPlan]]:
            return (
                [self._plan_model(index, model, strict=strict) for index, model in enumerate(read)],
                [
                    self._plan_optimizer(index, owners, optimizer, strict=strict, in_place=True)
                    for index, optimizer in enumerate(optimizers)
                ],
            )

        model_plans, optimizer_plans = together(plan, _LOADING, alone=self._alone)
        for model, planned in zip(read, model_plans, strict=True):
            self._check_base(model, planned)
        self._warn_of_rest(len(owners), len(optimizers))
        tensors: dict[str, Any] = {}
        for index, found in enumerate(model_plans):
            tensors |= self._model_keys(index, found.by_saved_name(), self._rank)
        for index, state in enumerate(optimizer_plans):
            tensors |= self._optimizer_keys(index, state.by_saved_name())
        for optimizer in optimizers:
            begin_load = getattr(optimizer.state, "begin_load", None)
            if begin_load is not None:
                begin_load()
        try:
            self._read(tensors)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} The weights may be partly the checkpoint's now: load another one before "
                "going on."
            ) from error
        for model, found in zip(read, model_plans, strict=True):
            restore_extra_state(
                model,
                {n: decode(n, value) for n, value in found.targets.items() if is_extra(n)},
            )
        for optimizer, state in zip(optimizers, optimizer_plans, strict=True):
            found_state = {**state.state(), "class": None}  # checked with the plan
            load_optimizer(owners, optimizer, found_state, copy=False, strict=strict)
            warn_left_out(optimizer, state.left_out)
        for found in model_plans:
            _warn_of_names(found)
        return [(list(found.missing), list(found.unexpected)) for found in model_plans]

    def model_state(
        self, index: int, model: nn.Module, *, strict: bool = True, warn: bool = True
    ) -> dict[str, torch.Tensor]:
        """Read tensors shaped and sharded like the model's. Collective.

        Args:
            index: Which model of the checkpoint.
            model: A sharded or plain model; it is not changed.
            strict: Raise when a name of the model or of the checkpoint has no partner.
            warn: Without `strict`, warn of such names on rank 0.

        Returns:
            Tensors by the model's names.

        Raises:
            CheckpointError: For missing models, shapes that differ, and names with `strict`.
        """
        found = together(
            lambda: self._plan_model(index, model, strict=strict).apart(),
            _LOADING,
            alone=self._alone,
        )
        self._check_base(model, found)
        self._read(self._model_keys(index, found.by_saved_name(), self._rank))
        if warn:
            _warn_of_names(found)
        return dict(found.targets)

    def whole_state(self, index: int = 0) -> dict[str, Any]:
        """Read one model's whole tensors onto the CPU, on this rank alone, under their own names.

        Args:
            index: Which model of the checkpoint.

        Returns:
            What an unsharded model's `load_state_dict` takes, extra state unpacked; tied tensors
            under one of their names. Extra state that differs between ranks is rank 0's.

        Raises:
            CheckpointError: When there is no such model, or it cannot be read.
        """
        tensors = whole_targets(self.path, self.manifest, index)
        self._warn_of_ranks(index)
        self._read(self._model_keys(index, tensors), alone=True)
        return {n: decode(n, value) if is_extra(n) else value for n, value in tensors.items()}

    def optimizer_state(
        self, index: int, models: Any, optimizer: torch.optim.Optimizer | None = None
    ) -> dict[str, Any]:
        """Read one optimizer's state, sharded like the parameters. Collective.

        Args:
            index: Which optimizer of the checkpoint.
            models: The engine, model or models that own the optimizer's parameters.
            optimizer: The optimizer to read for; it is not changed. None reads the state of all
                parameters that have some.

        Returns:
            As `state_of_optimizer`, with the current models' names.

        Raises:
            CheckpointError: When the checkpoint has no such optimizer, or shapes differ.
        """
        found = together(
            lambda: self._plan_optimizer(index, models_of(models), optimizer),
            _LOADING,
            alone=self._alone,
        )
        self._read(self._optimizer_keys(index, found.by_saved_name()))
        warn_left_out(optimizer, found.left_out)
        return found.state()

    def _check_base(self, model: nn.Module, planned: ModelPlan) -> None:
        """Compare what was left out of the checkpoint with what the model has. Collective."""

        def check() -> None:
            own = state_of_model(model)
            here = {name: own[name] for name in planned.base}
            check_base(self.path, here, planned.base)

        if planned.base:
            together(check, _LOADING, alone=self._alone)

    def restore_rng(self) -> bool:
        """Restore this rank's random state; False when the world size is another.

        Raises:
            CheckpointError: When the file cannot be read.
        """
        rank, world_size = rank_and_size()
        if self.manifest["world_size"] != world_size:
            return False
        set_rng_state(read_rng(self.path, rank))
        return True

    def _plan_optimizer(
        self,
        index: int,
        models: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        *,
        strict: bool = True,
        in_place: bool = False,
    ) -> OptimizerPlan:
        if index >= self.num_optimizers:
            raise CheckpointError(
                f"Expected {self.path} to hold the state of {index + 1} or more optimizers, but "
                f"it has that of {self.num_optimizers or 'none'}. Load the weights alone, or start "
                "from a full checkpoint."
            )
        groups = self._renaming.groups(self._file[PARAM_GROUPS][index])
        return plan_optimizer(
            self.manifest, index, groups, models, optimizer, strict=strict, in_place=in_place
        )

    def _agree_on_what(
        self, models: int, optimizers: Sequence[torch.optim.Optimizer], strict: bool
    ) -> None:
        """Refuse ranks that load different things. Collective."""
        if self._alone:
            return
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
        wanted = gather(f"models: {models}, optimizers: {kinds}, strict={strict}", _LOADING)
        other = next((rank for rank, text in enumerate(wanted) if text != wanted[0]), None)
        if other is not None:
            raise CheckpointError(
                f"Expected every rank to load the same, but rank 0 loads {wanted[0]} and rank "
                f"{other} loads {wanted[other]}."
            )

    def _warn_of_rest(self, models: int, optimizers: int) -> None:
        rest = []
        if models < self.num_models:
            rest.append(f"{self.num_models} models and {models} are loaded")
        if 0 < optimizers < self.num_optimizers:
            rest.append(f"{self.num_optimizers} optimizers and {optimizers} are loaded")
        if rest and rank_and_size()[0] == 0:
            warnings.warn(
                f"{self.path} holds {' and '.join(rest)}: the others are left out.",
                UserWarning,
                stacklevel=3,
            )

    def _warn_of_ranks(self, index: int) -> None:
        """Say which extra state is rank 0's here, where each rank had its own."""
        names = [
            name
            for name, entry in self.manifest["models"][index].items()
            if manifests.RANK_BYTES in entry
        ]
        if names and (self._alone or rank_and_size()[0] == 0):
            modules = (name.rpartition(".")[0] or "the model itself" for name in names)
            warnings.warn(
                f"The extra state (get_extra_state) of {listed(modules)} differed between the "
                f"{self.manifest['world_size']} ranks that saved {self.path}. It is not loaded on "
                "as many ranks: rank 0's is used everywhere.",
                UserWarning,
                stacklevel=4,
            )

    def _model_keys(self, index: int, tensors: Mapping[str, Any], rank: int = 0) -> dict[str, Any]:
        """Return tensors of a model by DCP's keys; a rank's own, where ranks have their own."""
        entries = self.manifest["models"][index]

        def key(name: str) -> str:
            shared = self._source.model_key(index, self._renaming.saved(index, name))
            own = rank and manifests.RANK_BYTES in entries.get(name, ())
            return manifests.rank_key(rank, shared) if own else shared

        return {key(name): tensor for name, tensor in tensors.items()}

    def _optimizer_keys(self, index: int, state: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return tensors of an optimizer's state by DCP's keys."""
        return {
            self._source.optimizer_key(index, self._renaming.saved_parameter(name), key): tensor
            for name, tensors in state.items()
            for key, tensor in tensors.items()
        }

    def _read(self, tensors: Mapping[str, Any], alone: bool = False) -> None:
        alone = alone or self._alone
        group = None if alone else message_group()

        def read() -> None:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load_tensors(
                    dict(tensors),
                    storage_reader=self._source.storage_reader(),
                    planner=LoadPlanner(),
                    process_group=group,
                    no_dist=alone,
                )

        try:
            together(read, f"Reading {self.path}", alone=alone)
        except CheckpointError as error:
            if not self._was_replaced(alone):
                raise
            raise CheckpointError(
                f"{self.path} was replaced by another save while it was read: load it again."
            ) from error

    def _was_replaced(self, alone: bool) -> bool:
        """Whether the folder holds another checkpoint now, on any rank's view. Collective."""

        def seen() -> bool:
            try:
                return _stamp(open_source(self.path)) != _stamp(self._source)
            except CheckpointError:
                return not self.path.exists()

        return seen() if alone else any(gather(seen(), _LOADING))


def _stamp(source: Source) -> float | None:
    """Return what tells one save into a folder from the next."""
    stamp: float | None = source.manifest.get("saved_at_seconds")
    return stamp


def _warn_of_names(found: ModelPlan) -> None:
    if (found.missing or found.unexpected) and rank_and_size()[0] == 0:
        warnings.warn(
            f"Loaded with strict=False: {len(found.targets)} tensors. Missing in the checkpoint, "
            f"and left as they were: {listed(found.missing)}. Not in the model, and left out: "
            f"{listed(found.unexpected)}.",
            UserWarning,
            stacklevel=4,
        )
