"""Finds the checkpoint to go on from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.commit import MANIFEST, is_leftover
from shardplug.checkpoint.read.stored_tensors import check_content
from shardplug.collective import from_rank_0, rank_and_size, together
from shardplug.errors import CheckpointError

__all__ = ["ResumePoint", "Survey", "candidates", "resume_point", "survey"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """The newest whole checkpoint of a folder."""

    path: Path
    """The checkpoint."""

    step: int | None
    """Optimizer steps done, where the save knew them."""

    passed_over: tuple[tuple[Path, str], ...]
    """What looks like a checkpoint and is not whole, and why."""


def resume_point(
    folder: str | os.PathLike[str], *, verify: bool = False, warn: bool = True
) -> ResumePoint | None:
    """Return the newest whole checkpoint in a folder. Collective where a process group is up.

    Newest is the one saved last, by the clock of rank 0 at its save. What was passed over is
    warned of.

    Args:
        folder: A folder of checkpoints; rank 0's counts.
        verify: Read every file and compare its checksums. Without, sizes are compared; a load
            compares what it reads in any case.
        warn: Warn of what was passed over.

    Returns:
        None where no save was ever completed: training starts from the beginning.

    Raises:
        CheckpointError: On every rank, when there were checkpoints and none of them is whole.
    """

    def find() -> ResumePoint | None:
        return _find(Path(folder), verify) if rank_and_size()[0] == 0 else None

    point = from_rank_0(together(find, "Looking for a checkpoint"))
    if point is not None and point.passed_over and warn and rank_and_size()[0] == 0:
        reasons = "; ".join(reason for _, reason in point.passed_over)
        warnings.warn(
            f"Resuming from {point.path}, the newest whole checkpoint in {folder}. Passed over: "
            f"{reasons}",
            UserWarning,
            stacklevel=2,
        )
    return point


def candidates(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder and is, or was to become, a checkpoint of shardplug."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            names = os.listdir(path)
        except OSError:  # removed just now, or not ours
            continue
        torn = ".metadata" in names or any(name.endswith(".distcp") for name in names)
        if MANIFEST in names or is_leftover(path) or torn:
            yield path


@dataclass(frozen=True, slots=True)
class Survey:
    """What a folder holds: whole checkpoints with the time of their save, and what is not whole."""

    whole: list[tuple[float, Path, dict[str, Any]]]
    broken: list[tuple[Path, str]]
    unfinished: list[tuple[Path, str]]

    def newest(self, passing_over: Collection[Path] = ()) -> tuple[Path, dict[str, Any]] | None:
        """Return the whole checkpoint that was saved last, and its manifest."""
        left = [entry for entry in self.whole if entry[1] not in passing_over]
        if not left:
            return None
        # Of two equal ones, what a save replaced and the save itself, the published one.
        _, path, manifest = max(left, key=lambda entry: (entry[0], not is_leftover(entry[1])))
        return path, manifest


def survey(folder: Path, *, verify: bool = False) -> Survey:
    """Look at every checkpoint in a folder, on this rank alone."""
    found = Survey([], [], [])
    for path in candidates(folder):
        leftover = is_leftover(path)
        try:
            if leftover and not (path / MANIFEST).is_file():
                raise CheckpointError(f"{path} is a save that did not finish.")
            manifest = manifests.read(path)
            if verify:
                manifests.verify(path, manifest, list(manifest["files"]))
                check_content(path)
            saved_at = manifest.get("saved_at_seconds") or (path / MANIFEST).stat().st_mtime
        except (CheckpointError, OSError) as error:
            known = isinstance(error, CheckpointError)
            reason = str(error) if known else f"{path} cannot be read: {error}."
            (found.unfinished if leftover else found.broken).append((path, reason))
        else:
            found.whole.append((saved_at, path, manifest))
    return found


def _find(folder: Path, verify: bool) -> ResumePoint | None:
    found = survey(folder, verify=verify)
    passed_over = (*found.broken, *found.unfinished)
    newest = found.newest()
    if newest is not None:
        path, manifest = newest
        return ResumePoint(path=path, step=manifest.get("step"), passed_over=passed_over)
    if not all(path.is_dir() for path, _ in passed_over):
        return _find(folder, verify)  # a save renamed them just now
    if found.broken:
        reasons = "; ".join(reason for _, reason in found.broken)
        raise CheckpointError(
            f"Expected a whole checkpoint in {folder}, but there is none: {reasons} To train from "
            "the beginning, remove them or choose another folder."
        )
    return None
