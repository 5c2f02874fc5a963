"""`fabric.save` and `fabric.load`, in shardplug's one folder format."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardplug.checkpoint import (
    Reader,
    load_model,
    load_optimizer,
    state_of_model,
    state_of_optimizer,
    together,
    write,
)
from shardplug.errors import ConfigError
from shardplug.integrations.common import comm, hyper_parameters, opening
from shardplug.integrations.common import plain_meta as meta
from shardplug.integrations.common.options import refuse_checkpoint_io
from shardplug.integrations.common.paths import local_path
from shardplug.integrations.fabric.entry import bare

if TYPE_CHECKING:
    _Base: Any  # Fabric's ParallelStrategy
else:
    _Base = object

__all__ = ["SavesState"]

_OWN = "shardplug"
Filter = Mapping[str, Callable[[str, Any], bool]]


class SavesState(_Base):  # type: ignore[misc]
    """The part of the strategy that saves and restores."""

    _meeting: comm.Meeting

    @property
    def checkpoint_io(self) -> Any:
        """Fabric's checkpoint IO; not used."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        refuse_checkpoint_io(io, "Fabric")
        self._checkpoint_io = io

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's tensors, sharded."""
        return dict(state_of_model(bare(module)))

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, sharded."""
        return state_of_optimizer(self.engine, optimizer)

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load sharded or whole tensors into a module."""
        load_model(bare(module), state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filter | None = None,
    ) -> None:
        """Write modules, optimizers and other objects into a folder. Collective.

        With `async_save` it returns when the shards are copied.

        Args:
            path: The folder; rank 0's counts.
            state: Modules and optimizers that were set up, objects with a state_dict, and values.
            storage_options: Refused.
            filter: For a key of `state`, which entries of its state to keep.

        Raises:
            ConfigError: For storage options, or a path that is not local.
            CheckpointError: On every rank, when a rank could not write, or when the save before,
                in the background, had failed.
        """
        if storage_options is not None:
            raise ConfigError(
                f"Expected no storage_options, got {storage_options!r}: the zero strategies write "
                "to a local or mounted folder."
            )
        self._meeting.wait("fabric.save")
        target = local_path(self.broadcast(os.fspath(path)))
        keep = filter or {}
        modules = {key: bare(obj) for key, obj in state.items() if isinstance(obj, nn.Module)}
        optimizers = {key: obj for key, obj in state.items() if isinstance(obj, Optimizer)}
        rest = {
            key: _kept(keep.get(key), obj.state_dict() if _is_stateful(obj) else obj)
            for key, obj in state.items()
            if key not in modules and key not in optimizers
        }
        own = {"models": list(modules), "optimizers": list(optimizers)}
        owners = list(modules.values()) or self.engine.models
        write(
            target,
            models=together(
                lambda: [_kept(keep.get(k), state_of_model(m)) for k, m in modules.items()],
                "Saving",
            ),
            optimizers=[
                _kept(keep.get(key), state_of_optimizer(owners, optimizer))
                for key, optimizer in optimizers.items()
            ],
            meta=together(lambda: meta.encode({**rest, _OWN: own}), "Saving"),
            run={**self.engine.describe_run(), "framework": "fabric", "step": rest.get("step")},
            modules=list(modules.values()),
            background=self._writer_of(target, in_background=True),
        )

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Restore objects from a folder of shardplug's, or from an ordinary file. Collective.

        Args:
            path: Folder or file; rank 0's counts.
            state: Objects to restore, by the keys they were saved under; or one module or
                optimizer, to restore the first. From a folder that another framework wrote,
                modules and optimizers are taken in order.
            strict: Refuse keys of `state` that are not there, and names that differ.
            weights_only: False unpickles objects that are not plain values; else they are
                refused, by name.

        Returns:
            What is in the checkpoint besides `state`.

        Raises:
            CheckpointError: On every rank, when there is no checkpoint at the path.
            ConfigError: When `state` is left out for a folder.
        """
        source = local_path(self.broadcast(os.fspath(path)))
        with self._reading(source):
            if self.broadcast(source.is_file()):
                return self._load_file(source, state, strict, weights_only)
            return self._load_folder(self._open(source), state, strict, weights_only)

    def _load_folder(
        self, reader: Reader, state: Any, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        if not state:
            raise ConfigError(
                f"{type(self).__name__}.load_checkpoint(...) got no state, but tensors are read "
                "into the objects they belong to: pass fabric.load(path, {'model': model, ...})."
            )
        raw = dict(reader.meta)
        own = dict(raw.pop(_OWN, {}))
        hyper_parameters.put_back(raw, own.pop("hyper_parameters", None))
        if reader.manifest.get("framework") in (None, "pytorch"):  # what engine.save was given
            raw.update(raw.pop("extra", {}))
        rest: dict[str, Any] = meta.decode(raw, unpickle=weights_only is False)
        single = not isinstance(state, dict)
        wanted = {"state": state} if single else state
        modules = {k: bare(o) for k, o in wanted.items() if isinstance(o, nn.Module)}
        optimizers = {k: o for k, o in wanted.items() if isinstance(o, Optimizer)}
        saved_models = _places(own.get("models"), modules, single)
        saved_optimizers = _places(own.get("optimizers"), optimizers, single)
        absent = set(wanted) - set(saved_models) - set(saved_optimizers) - set(rest)
        if strict and absent:
            raise KeyError(
                f"Expected {reader.path} to hold {', '.join(sorted(absent))}, found "
                f"{', '.join([*own.get('models', []), *own.get('optimizers', []), *rest])}. "
                "Use strict=False to load the others."
            )
        for key, index in saved_models.items():
            tensors = reader.model_state(index, modules[key], strict=strict)
            load_model(modules[key], tensors, strict=strict)
        owners = list(modules.values()) or self.engine.models
        for key, index in saved_optimizers.items():
            loaded = reader.optimizer_state(index, owners, optimizers[key])
            load_optimizer(owners, optimizers[key], loaded, copy=False)
        if not single:
            _restore_others(state, rest, set(modules) | set(optimizers))
        return rest

    def _load_file(
        self, path: Path, state: Any, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only
        )
        if not state:
            return loaded
        if isinstance(state, nn.Module):
            load_model(bare(state), self._renamed(path, loaded), strict=strict)
            return {}
        if isinstance(state, Optimizer):
            load_optimizer(self.engine, state, loaded)
            return {}
        absent = set(state) - set(loaded)
        if strict and absent:
            raise KeyError(
                f"Expected {path} to hold {', '.join(sorted(absent))}, found {', '.join(loaded)}. "
                "Use strict=False to load the others."
            )
        special = set()
        for key, obj in state.items():
            if key not in loaded:
                continue
            if isinstance(obj, nn.Module):
                load_model(bare(obj), self._renamed(path, loaded.pop(key)), strict=strict)
                special.add(key)
            elif isinstance(obj, Optimizer):
                load_optimizer(self.engine, obj, loaded.pop(key))
                special.add(key)
        _restore_others(state, loaded, special)
        return loaded

    def _renamed(self, path: Path, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
        return opening.renamed(path, tensors, self._rename) if self._rename else tensors


def _restore_others(state: dict[str, Any], loaded: dict[str, Any], done: set[str]) -> None:
    """Restore what is neither module nor optimizer, taking it out of `loaded`."""
    for key, obj in list(state.items()):
        if key in done or key not in loaded:
            continue
        if _is_stateful(obj):
            obj.load_state_dict(loaded.pop(key))
        else:
            state[key] = loaded.pop(key)


def _places(saved: list[str] | None, wanted: Mapping[str, Any], single: bool) -> dict[str, int]:
    """Map each wanted object to its index in the checkpoint."""
    if saved is None or single:
        return {key: index for index, key in enumerate(wanted)}
    return {key: saved.index(key) for key in wanted if key in saved}


def _is_stateful(obj: Any) -> bool:
    return callable(getattr(obj, "state_dict", None)) and callable(
        getattr(obj, "load_state_dict", None)
    )


def _kept(choose: Callable[[str, Any], bool] | None, state: Any) -> Any:
    if choose is None or not isinstance(state, Mapping):
        return state
    return {key: value for key, value in state.items() if choose(key, value)}
