"""Puts shardplug where the frameworks look it up, without importing any of them.

Lightning has no entry point for strategies: a string works only when it was registered before the
Trainer is made. There are four registries (two import names, Trainer and Fabric each), and any of
them may be imported before or after shardplug, or never. So those that are loaded are filled now,
and a finder at the front of `sys.meta_path` fills the others right after their import.

Hugging Face's Trainer makes the Accelerator that it finds under that name. In a process that
`accelerate launch` started with our name in its YAML, the same finder puts ours there.
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

from shardplug._launch import launched_with_shardplug
from shardplug.config import PRESETS

__all__ = ["REGISTRIES", "install"]

REGISTRIES: dict[str, tuple[str, str]] = {
    "lightning.pytorch.strategies": (
        "StrategyRegistry",
        "shardplug.integrations.lightning.strategy",
    ),
    "pytorch_lightning.strategies": (
        "StrategyRegistry",
        "shardplug.integrations.lightning.strategy",
    ),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "shardplug.integrations.fabric.strategy"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "shardplug.integrations.fabric.strategy"),
}
"""Module that holds a registry: the registry's name, and the adapter that makes the strategy."""

_TRAINER_MODULES = (
    "accelerate",
    "transformers.modeling_utils",
    "transformers.trainer",
    "transformers.trainer_utils",
    "transformers.training_args",
)
"""Modules in which names are replaced for Hugging Face's Trainer."""

_ADAPTER = "shardplug.integrations.accelerate"
_TAKEOVER = f"{_ADAPTER}.hf_trainer.takeover"


def install() -> None:
    """Register the presets as strategy strings, now or when a namespace is imported; idempotent."""
    for name in REGISTRIES:
        module = sys.modules.get(name)
        if module is not None and hasattr(module, REGISTRIES[name][0]):
            _register(module)
    if not any(isinstance(finder, _PostImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImport())
    if launched_with_shardplug() and any(name in sys.modules for name in _TRAINER_MODULES):
        importlib.import_module(_ADAPTER)


def _after_import(module: ModuleType) -> None:
    if module.__name__ in REGISTRIES:
        _register(module)
    elif not launched_with_shardplug():
        return
    elif module.__name__ == _ADAPTER:
        importlib.import_module(_TAKEOVER).take_over()
    elif _TAKEOVER in sys.modules:
        sys.modules[_TAKEOVER].adapt(module)
    else:
        importlib.import_module(_ADAPTER)  # after which all that is loaded is taken over


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
    """Completes one of the frameworks' modules right after it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module the ordinary way, with a loader that completes it afterwards."""
        if fullname not in REGISTRIES and fullname not in (*_TRAINER_MODULES, _ADAPTER):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Completing(spec.loader)
                return spec
        return None


class _Completing(importlib.abc.Loader):
    """Another loader, followed by what shardplug adds to the module."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module as the real loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, then complete it; the module keeps its real loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _after_import(module)
