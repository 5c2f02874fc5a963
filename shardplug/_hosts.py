"""Puts the strategy strings where Lightning looks them up, without importing Lightning.

Lightning has no entry point for strategies: a string works only when it was registered before the
Trainer is made. There are four registries (two import names, Trainer and Fabric each), and any of
them may be imported before or after shardplug, or never. So those that are loaded are filled now,
and a finder at the front of `sys.meta_path` fills the others right after their import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from shardplug.config import PRESETS

__all__ = ["REGISTRIES", "install"]

REGISTRIES: dict[str, tuple[str, str]] = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "shardplug.lightning.strategy"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "shardplug.lightning.strategy"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "shardplug.fabric.strategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "shardplug.fabric.strategy"),
}
"""Module that holds a registry: the registry's name, and the adapter that makes the strategy."""


def install() -> None:
    """Register the presets as strategy strings, now or when a namespace is imported; idempotent."""
    for name in REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, REGISTRIES[name][0]):
            _register(module)
    if not any(isinstance(finder, _PostImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImport())


def _register(module: ModuleType) -> None:
    registry_name, adapter = REGISTRIES[module.__name__]
    registry: Any = getattr(module, registry_name)
    namespace = module.__name__.rpartition(".")[0]
    for preset in (*PRESETS, "zero_auto"):
        registry.register(
            preset,
            functools.partial(_make, adapter, namespace, preset),
            description=f"shardplug: the preset {preset!r}, sharded with PyTorch FSDP2",
            override=True,
        )


def _make(adapter: str, namespace: str, preset: str) -> Any:
    """Build the strategy behind a string, importing the adapter only now."""
    return importlib.import_module(adapter).from_preset(namespace, preset)


class _PostImport(importlib.abc.MetaPathFinder):
    """Registers the strings right after one of the registries' modules has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module the ordinary way, with a loader that registers afterwards."""
        if fullname not in REGISTRIES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Registering(spec.loader)
                return spec
        return None


class _Registering(importlib.abc.Loader):
    """Another loader, followed by the registration."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then register; the module keeps its real loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)
