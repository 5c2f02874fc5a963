"""The folder that one rank of one run keeps its swap files in.

    <nvme_path>/shardplug-swap-<run>-rank<r>/lock       held by flock while the run lives
    <nvme_path>/shardplug-swap-<run>-rank<r>/*.swap

The lock is what tells a run that lives from one that was killed: the system gives it up with the
process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from pathlib import Path

from shardplug.errors import ConfigError
from shardplug.tiers.filesystem import filesystem_of

__all__ = ["SwapFolder", "remove_dead"]

_PREFIX = "shardplug-swap-"
_LOCK = "lock"


class SwapFolder:
    """Makes the folder, holds it, and removes it when the object goes or the interpreter ends.

    Args:
        root: Folder given by the user; it must exist.
        run: Name of the run, the same on every rank.
        rank: Global rank.

    Raises:
        ConfigError: When `root` is no folder, or nothing can be made in it.
    """

    def __init__(self, root: str | os.PathLike[str], run: str, rank: int) -> None:
        self.root = Path(root).absolute()
        if not self.root.is_dir():
            what = "is a file" if self.root.exists() else "does not exist"
            raise ConfigError(
                f"Expected nvme_path to be a folder for swap files, but {self.root} {what}. Make "
                "it, or name another."
            )
        self.path = self.root / f"{_PREFIX}{run}-rank{rank}"
        try:
            remove_dead(self.root)
            lock = _hold(self.path)
        except OSError as error:
            raise ConfigError(
                f"Expected nvme_path to be a folder that can be written to, but {self.path} could "
                f"not be made: {error.strerror or error}. Change its rights, or name another."
            ) from error
        self._remove = weakref.finalize(self, _let_go, self.path, lock, os.getpid())

    @property
    def notice(self) -> str | None:
        """What the user should know about the filesystem, if anything."""
        filesystem = filesystem_of(self.root)
        if filesystem.in_memory:
            return (
                f"nvme_path={str(self.root)!r} is on {filesystem.kind}, which keeps files in "
                'memory: it saves none. Name a folder on a drive, or use offload_optimizer="cpu".'
            )
        if filesystem.over_network:
            return (
                f"nvme_path={str(self.root)!r} is on {filesystem.kind}, a network filesystem: "
                "every optimizer step reads and writes all optimizer state over the network. Name "
                "a folder on a local drive."
            )
        return None

    def close(self) -> None:
        """Remove the folder with everything in it; may be called twice."""
        self._remove()


def remove_dead(root: Path) -> list[Path]:
    """Remove the folders of runs that have ended without doing it; return them.

    Folders whose lock is held, or that this user may not touch, are left alone.
    """
    removed: list[Path] = []
    for path in sorted(root.glob(f"{_PREFIX}*-rank*")):
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            continue  # being made or removed at this moment, or another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                removed.append(path)
        except OSError:
            pass  # held: its run lives
        finally:
            os.close(lock)
    return removed


def _hold(path: Path) -> int:
    """Make the folder and its lock, and hold the lock; return the open file."""
    while True:
        path.mkdir(exist_ok=True)
        lock = -1
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Another run may have taken the new folder for a dead one until it was locked.
            if os.path.samestat(os.fstat(lock), os.stat(path / _LOCK)):
                return lock
        except FileNotFoundError:
            pass
        except OSError:
            if lock >= 0:
                os.close(lock)
            raise
        if lock >= 0:
            os.close(lock)


def _let_go(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the folder is its parent's
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
