"""Where checkpoints may live."""

from __future__ import annotations

from pathlib import Path

from shardplug.errors import ConfigError

__all__ = ["local_path"]


def local_path(path: str) -> Path:
    """Return the path of a local or mounted folder.

    Raises:
        ConfigError: For an address of remote storage.
    """
    if "://" in path and not path.startswith("file://"):
        raise ConfigError(
            f"Expected a local or mounted folder, got {path}: the zero strategies write one file "
            "per rank with ordinary file operations. Save locally and copy the folder."
        )
    return Path(path.removeprefix("file://"))
