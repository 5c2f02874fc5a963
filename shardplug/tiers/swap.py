"""The folder that one rank of one run keeps its swap files in.

    <nvme_path>/shardplug-swap-<run>-rank<r>/lock       held by flock while the run lives
    <nvme_path>/shardplug-swap-<run>-rank<r>/*.swap

The lock is what tells a run that lives from one that was killed: the system gives it up with the
process, however it ends. Nothing is removed but folders of such a name in which only such files
are, and no link is followed: others may use the same `nvme_path`.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardplug.errors import ConfigError
from shardplug.tiers.filesystem import filesystem_of

__all__ = ["SwapFolder", "remove_dead"]

_PREFIX = "shardplug-swap-"
_NAME = re.compile(_PREFIX + r"(\d{8}-\d{6}-[0-9a-f]{8}|probe-\d{1,10})-rank\d{1,9}")
_LOCK = "lock"
_FILE = re.compile(r"lock|(state|probe)\.swap")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


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
    found = sorted(path for path in root.iterdir() if _NAME.fullmatch(path.name))
    return [path for path in found if _remove_if_dead(path)]


def _remove_if_dead(path: Path) -> bool:
    lock = -1
    try:
        folder = os.open(path, _FOLDER_FLAGS)
    except OSError:
        return False  # a link, a file, removed at this moment, or another user's
    try:
        names = os.listdir(folder)
        if not _are_ours(folder, names):
            return False
        if _LOCK in names:
            lock = os.open(_LOCK, _LOCK_FLAGS, dir_fd=folder)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path, folder, names)
    except OSError:
        return False  # held: its run lives; or another user's
    finally:
        os.close(folder)
        if lock >= 0:
            os.close(lock)
    return True


def _are_ours(folder: int, names: Iterable[str]) -> bool:
    """Whether an open folder holds nothing but what runs make in theirs."""
    return all(
        _FILE.fullmatch(name)
        and stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        for name in names
    )


def _remove(path: Path, folder: int, names: Iterable[str]) -> None:
    """Remove the files of an open folder, its lock last, and the folder."""
    for name in sorted(names, key=lambda name: name == _LOCK):
        os.unlink(name, dir_fd=folder)
    os.rmdir(path)


def _hold(path: Path) -> int:
    """Make the folder and its lock, and hold the lock; return the open file."""
    while True:
        with suppress(FileExistsError):
            path.mkdir(0o700)
        lock = folder = -1
        try:
            folder = os.open(path, _FOLDER_FLAGS)
            lock = os.open(_LOCK, _LOCK_FLAGS | os.O_CREAT, 0o600, dir_fd=folder)
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
        finally:
            if folder >= 0:
                os.close(folder)
        if lock >= 0:
            os.close(lock)


def _let_go(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the folder is its parent's
    with suppress(OSError):
        folder = os.open(path, _FOLDER_FLAGS)
        try:
            _remove(path, folder, [name for name in os.listdir(folder) if _FILE.fullmatch(name)])
        finally:
            os.close(folder)
    os.close(lock)
