"""Publishing a folder: made aside, renamed when it is whole, and cleaned up after.

Names beside a checkpoint `step-1`: `.step-1.tmp-<id>` is being written, `.step-1.old-<id>` is what
it replaces. A living save holds a lock on its folder; what a dead one left has none.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardplug.checkpoint.format.durable import sync
from shardplug.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "StagingFolder",
    "is_leftover",
    "is_ours",
    "locate",
    "new_id",
    "nobody_in",
]

MANIFEST = "manifest.json"
"""Written last: a folder that has it is whole."""

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<kind>tmp|old)-[0-9a-f]{8}")

_RANDOM_STATE = re.compile(r"rng_\d+\.pt")
_FORMAT = re.compile(rb'"format":\s*"shardplug"')
_BEGINNING = 200
"""Bytes of a manifest that say what it is."""

_PART = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|meta\.pt|manifest\.json\.tmp")


def new_id() -> str:
    """Return what tells one save from another."""
    return uuid.uuid4().hex[:8]


def is_leftover(path: Path) -> bool:
    """Whether a folder has the name of one that a save works on."""
    return _LEFTOVER.fullmatch(path.name) is not None


def locate(path: str | os.PathLike[str]) -> Path:
    """Return where the checkpoint of this path is.

    A save that was killed just as it replaced a checkpoint leaves that one under another name.
    """
    target = Path(path)
    if target.exists():
        return target
    if target.is_symlink():  # to a folder that is missing
        target = target.parent / os.readlink(target)
    whole = [old for old in _beside(target, "old") if (old / MANIFEST).is_file()]
    return max(whole, key=lambda old: old.stat().st_mtime) if whole else Path(path)


def _beside(target: Path, kind: str) -> list[Path]:
    found = []
    if target.parent.is_dir():
        for entry in target.parent.iterdir():
            match = _LEFTOVER.fullmatch(entry.name)
            if match and match["kind"] == kind and match["name"] == target.name:
                found.append(entry)
    return found


class StagingFolder:
    """The folder that one save writes into, on one rank.

    Args:
        target: Where the checkpoint will be.
        save_id: The same on every rank; see `new_id`.
    """

    def __init__(self, target: Path, save_id: str) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.tmp-{save_id}")
        self._old = target.with_name(f".{target.name}.old-{save_id}")
        self._new_parents: list[Path] = []
        self._lock: int | None = None

    def open(self) -> None:
        """Make the folder, after removing what dead saves left. On rank 0.

        Raises:
            CheckpointError: When something else is at the target.
        """
        target = self.target
        if target.is_file():
            raise CheckpointError(
                f"Expected a new path or an older checkpoint of shardplug, but {target} is a file. "
                "Choose another path, or remove it."
            )
        if target.is_dir() and any(target.iterdir()) and not is_ours(target.resolve()):
            raise CheckpointError(
                f"Expected a new path or an older checkpoint of shardplug, but {target} is a "
                "folder with other things in it. Choose another path, or empty it."
            )
        # A whole folder that was never published may be what this run resumed from: it goes when
        # there is a newer one.
        _clear(target, keep_whole=True)
        self._new_parents = [folder for folder in target.parents if not folder.exists()]
        for _ in range(2):  # another save may take it for a dead one's before it is locked
            self._release()
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):
                self._hold()
            if self.folder.exists():
                break

    def publish(self) -> None:
        """Rename the folder to its target, in place of an older checkpoint. On rank 0."""
        sync(self.folder)
        target = self.target
        try:
            if target.is_dir() or target.is_symlink():
                target.rename(self._old)
            self.folder.rename(target)
            for folder in (target.parent, *(new.parent for new in self._new_parents)):
                sync(folder)
        except BaseException:
            self._withdraw()
            raise
        self._release()
        with suppress(OSError):  # the save itself is done
            _clear(target, keep_whole=False)  # what was replaced is among it

    def _withdraw(self) -> None:
        with suppress(OSError):
            if not self.folder.exists():
                self.target.rename(self.folder)
            if os.path.lexists(self._old):
                self._old.rename(self.target)

    def discard(self) -> None:
        """Remove what a save that failed made. On rank 0."""
        with suppress(OSError):  # first, so that what cannot be removed is not taken for whole
            (self.folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        for parent in self._new_parents:
            with suppress(OSError):  # others may have put something there
                parent.rmdir()
        self._release()

    def _hold(self) -> None:
        self._lock = os.open(self.folder, os.O_RDONLY)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def _release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):
                # Closing is not enough: processes forked meanwhile hold the same lock.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None


def is_ours(folder: Path) -> bool:
    """Whether a folder is a checkpoint of ours, or what is left of one (an interrupted copy)."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = os.listdir(folder)
    if any(_RANDOM_STATE.fullmatch(name) for name in names):
        return True
    if MANIFEST in names:
        with (folder / MANIFEST).open("rb") as file:
            if _FORMAT.search(file.read(_BEGINNING)):
                return True
    return False


def _is_left_over(entry: Path, kind: str) -> bool:
    """Whether a folder that is named as one that a save works on holds what saves write."""
    with suppress(OSError):
        if entry.is_symlink():
            return kind == "old"  # a link that a save has replaced
        if is_ours(entry):
            return True
        return all(_PART.fullmatch(name) for name in os.listdir(entry))  # also where it is empty
    return False


def _clear(target: Path, *, keep_whole: bool) -> None:
    """Remove what dead saves left beside a target; bring back what they had moved away."""
    parent = target.parent
    if not parent.is_dir():
        return
    for entry in list(parent.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is None or not _is_left_over(entry, match["kind"]):
            continue
        original, save_id = parent / match["name"], entry.name[-8:]
        with nobody_in(original.with_name(f".{match['name']}.tmp-{save_id}")) as dead:
            if dead is None:  # the file system has no locks
                dead = original == target
            whole = (entry / MANIFEST).is_file()
            if not dead:
                continue
            if match["kind"] == "old" and whole and not os.path.lexists(original):
                entry.rename(original)
            elif match["kind"] == "old" or not whole or not keep_whole:
                _remove(entry)


@contextmanager
def nobody_in(folder: Path) -> Iterator[bool | None]:
    """Tell whether no living save works in a folder, and keep it so; None: it cannot be told."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield True
        return
    except OSError:  # another user's
        yield False
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            dead: bool | None = True
        except BlockingIOError:
            dead = False
        except OSError:
            dead = None
        yield dead
    finally:
        os.close(handle)


def _remove(folder: Path) -> None:
    try:
        if folder.is_symlink():
            folder.unlink()
            return
        (folder / MANIFEST).unlink(missing_ok=True)  # first: what is left is not taken for whole
        for path in folder.iterdir():  # by the random states the rest is known to be ours
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif not _RANDOM_STATE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        shutil.rmtree(folder)
    except FileNotFoundError:  # another save was faster
        return
    except OSError as error:
        warnings.warn(
            f"What is left of an earlier save could not be removed from {folder}: {error}.",
            UserWarning,
            stacklevel=4,
        )
