"""What there is of shardplug where torch was built without torch.distributed.

Importing, configurations and the command's help work; all else says what is missing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch.distributed as dist

from shardplug.errors import ConfigError

__all__ = ["MISSING", "ZeroEngine", "refuse_the_rest"]

MISSING = (
    "Expected a build of torch with torch.distributed, got one without "
    "(torch.distributed.is_available() is False). Install torch from PyPI for Linux, or build "
    "it with USE_DISTRIBUTED=1."
)

_HARMLESS = {
    *("__main__", "_launch", "_messages", "_registration", "_undistributed"),
    *("cli", "config", "errors"),
}


class ZeroEngine:
    """Stands in for the engine.

    Raises:
        ConfigError: Always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(MISSING)


class _Refusing(importlib.abc.MetaPathFinder):
    """Refuses the parts of the package that need torch.distributed to be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find nothing; raise for a part that needs torch.distributed.

        Raises:
            ConfigError: For such a part.
        """
        package, _, rest = fullname.partition(".")
        in_cli = rest.startswith("cli.")
        if package == "shardplug" and (in_cli or rest.partition(".")[0] not in {"", *_HARMLESS}):
            raise ConfigError(MISSING)
        return None


def refuse_the_rest() -> bool:
    """Refuse what needs torch.distributed, where there is none.

    Returns:
        Whether there is none.
    """
    if dist.is_available():
        return False
    if not any(isinstance(finder, _Refusing) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Refusing())
    return True
