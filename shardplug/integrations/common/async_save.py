"""Saves beside the training, the same for Trainer and Fabric."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from shardplug.checkpoint import Reader
from shardplug.checkpoint.foreign.foreign_folders import identify
from shardplug.checkpoint.format.commit import is_ours
from shardplug.errors import CheckpointError
from shardplug.integrations.common import opening
from shardplug.integrations.common.paths import local_path

if TYPE_CHECKING:
    from shardplug.checkpoint.write.background import Background
    from shardplug.engine import ZeroEngine

__all__ = ["AsyncSaveMixin"]

_FILES = ("lightning_file", "torch_file")
"""Kinds of files that are checkpoints of other strategies."""


class AsyncSaveMixin:
    """Mixed into a framework's strategy, which provides the attributes declared here."""

    is_global_zero: bool
    engine: ZeroEngine
    _engine: ZeroEngine | None

    _async_save = False
    _rename: Mapping[str, str] = {}
    _newest: Path | None = None
    """The last folder that a save was started for."""

    def _keep_checkpoints(self, async_save: bool, load_rename: Mapping[str, str] | None) -> None:
        """Store the options."""
        self._async_save = async_save
        self._rename = opening.check_rename(load_rename)

    def wait_for_save(self) -> None:
        """Wait until the save that `async_save` left to the background is on disk. Collective.

        Raises:
            CheckpointError: On every rank, when it failed.
        """
        if self._engine is not None:
            self._engine.wait_for_save()

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, but not before the save under way is on disk.

        When that save fails, nothing is removed: the one before it is still needed.

        Args:
            filepath: The folder; rank 0 removes it.
        """
        path, newest = local_path(os.fspath(filepath)), self._newest
        self._after_save(lambda: _remove(path, newest))

    def _link(self, link: Path, target: Path) -> None:
        """Make a symbolic link to a checkpoint, as soon as the save under way is on disk."""
        self._after_save(lambda: _point(link, target))

    def _after_save(self, action: Callable[[], None]) -> None:
        """Do something on rank 0; the others do not know of it, so a failure is a warning."""

        def guarded() -> None:
            try:
                action()
            except OSError as error:
                warnings.warn(f"After a save: {error}", UserWarning, stacklevel=2)

        if not self.is_global_zero:
            return
        if self._engine is None:
            guarded()
        else:
            self._engine.background.after(guarded)

    def _is_being_saved(self, path: Path) -> bool:
        """Whether the save under way will make this folder."""
        background = None if self._engine is None else self._engine.background
        pending = background is not None and background.is_pending
        return pending and self._newest is not None and path.absolute() == self._newest.absolute()

    def _writer_of(self, path: Path, *, in_background: bool) -> Background | None:
        """Return what writes a save, to be given to `write`; None writes it at once. Collective.

        Raises:
            CheckpointError: On every rank, when the save before failed.
        """
        self._newest = path
        if self._async_save and in_background:
            return self.engine.background
        self.wait_for_save()  # or the older one could be published over this one
        return None

    def _end_save_after(self, exception: BaseException) -> None:
        """Let the save under way end after another failure, which is the one to be seen."""
        try:
            self.wait_for_save()
        except CheckpointError as error:
            warnings.warn(f"After {type(exception).__name__}: {error}", UserWarning, stacklevel=2)

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Wait for the save under way; say which checkpoint is whole when this one is not."""
        self.wait_for_save()
        with opening.naming_the_newest_whole(path):
            yield

    def _open(self, path: Path) -> Reader:
        return opening.open_renamed(path, self._rename)


def _point(link: Path, target: Path) -> None:
    """Make or replace a symbolic link; there is one at every moment."""
    if link.absolute() == target.absolute():
        return
    if link.is_dir() and not link.is_symlink():
        _remove_checkpoint(link)
    new = link.with_name(f".{link.name}.{uuid4().hex[:8]}")
    new.symlink_to(os.path.relpath(target, link.parent))
    new.replace(link)


def _remove(path: Path, newest: Path | None) -> None:
    """Remove a checkpoint; links to it in its folder lead to the newest one from now on."""
    if path.is_symlink() or (path.is_file() and identify(path).kind in _FILES):
        path.unlink()
        return
    if path.is_file():
        raise OSError(errno.EPERM, "it is no checkpoint, and stays", str(path))
    if not path.is_dir():
        return
    if newest is not None and newest.absolute() != path.absolute() and newest.is_dir():
        for link in path.absolute().parent.iterdir():
            if link.is_symlink() and link.resolve() == path.resolve():
                _point(link, newest)
    _remove_checkpoint(path)


def _remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint of ours.

    Frameworks name what is to be removed by what they read from an earlier checkpoint.

    Raises:
        OSError: When the folder is something else.
    """
    if not is_ours(folder):
        raise OSError(errno.EPERM, "it is no checkpoint of shardplug, and stays", str(folder))
    shutil.rmtree(folder)
