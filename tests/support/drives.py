"""Small filesystems for tests, mounted for a while: the system itself says that they are full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        pytest.skip(f"needs the command {error.filename}")
    if done.returncode:
        pytest.skip(f"needs to run {' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def memory_drive(folder: Path, num_bytes: int, num_inodes: int = 1000) -> Iterator[Path]:
    """Mount a tmpfs of that size on a new folder; skips the test where that is not allowed."""
    folder.mkdir()
    options = f"size={num_bytes},nr_inodes={num_inodes}"
    _call("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(("umount", "-l", str(folder)), check=True, timeout=60)


@contextmanager
def read_only(folder: Path) -> Iterator[Path]:
    """Make a mounted folder read-only for a while."""
    _call("mount", "-o", "remount,ro", str(folder))
    try:
        yield folder
    finally:
        _call("mount", "-o", "remount,rw", str(folder))


@contextmanager
def thin_drive(folder: Path, promised_bytes: int, real_bytes: int) -> Iterator[Path]:
    """Mount an ext4 filesystem that has less room behind it than it says.

    Reserving room succeeds, and a write in the middle of a run is refused by the system, as on a
    thinly provisioned volume.
    """
    with memory_drive(folder.with_name(f"{folder.name}-behind"), real_bytes) as behind:
        image = behind / "image"
        with image.open("wb") as file:
            file.truncate(promised_bytes)
        _call("mkfs.ext4", "-q", "-F", "-O", "^has_journal", str(image))
        folder.mkdir()
        _call("mount", "-o", "loop", str(image), str(folder))
        try:
            yield folder
        finally:
            subprocess.run(("umount", str(folder)), check=True, timeout=60)
