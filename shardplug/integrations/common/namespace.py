"""Lightning exists under two import names; each has classes of its own that do not mix."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from shardplug.errors import ConfigError

__all__ = ["FABRIC", "TRAINER", "first_installed", "lookup"]

TRAINER = ("lightning.pytorch", "pytorch_lightning")
"""Import names of the Trainer."""

FABRIC = ("lightning.fabric", "lightning_fabric")
"""Import names of Fabric, in the same order."""


def lookup(namespace: str, submodule: str, name: str) -> Any:
    """Return `name` out of `namespace.submodule`, importing it."""
    return getattr(importlib.import_module(f"{namespace}.{submodule}"), name)


def first_installed(namespaces: tuple[str, ...]) -> str:
    """Choose the namespace the program already uses, else the first that is installed.

    Raises:
        ConfigError: When none is installed.
    """
    for namespace in namespaces:
        if namespace in sys.modules:
            return namespace
    for namespace in namespaces:
        if importlib.util.find_spec(namespace.partition(".")[0]) is not None:
            return namespace
    raise ConfigError(
        f"Expected one of {', '.join(namespaces)} to be installed, found none; "
        'run pip install "shardplug[lightning]".'
    )
