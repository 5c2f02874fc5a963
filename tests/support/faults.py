"""Faults that a test puts in the way of one rank: full disks, failing calls, damaged bytes."""

from __future__ import annotations

import builtins
import errno
import io
import os
import pathlib
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardplug.errors import CheckpointError


class Hits:
    """How often a fault has struck on this rank."""

    def __init__(self) -> None:
        self.count = 0

    def on_some_rank(self) -> bool:
        """Whether it struck anywhere; a fault that never does proves nothing. Collective."""
        counts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(counts, self.count)
        return sum(counts) > 0


@contextmanager
def no_fault() -> Iterator[Hits]:
    """For the ranks that are well."""
    yield Hits()


@contextmanager
def disk_full(name: str, *, room: int = 100) -> Iterator[Hits]:
    """Let this process write `room` bytes into the file called `name`, and then no more anywhere.

    The kernel cuts the write short, as it does on a full disk; the error is EFBIG for ENOSPC.
    """
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    hits = Hits()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def watching(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = args[position] if len(args) > position else None
            if isinstance(path, (str, os.PathLike)) and Path(path).name == name:
                hits.count += 1
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
            return function(*args, **kwargs)

        return call

    try:
        with (
            mock.patch.object(builtins, "open", watching(builtins.open, 0)),
            mock.patch.object(io, "open", watching(io.open, 0)),
            mock.patch.object(torch, "save", watching(torch.save, 1)),
        ):
            yield hits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing(
    name: str, number: int = 1, *, path: str = "", thread: str = "", code: int = errno.EIO
) -> Iterator[Hits]:
    """Let the nth call of a function of `os` fail.

    Args:
        name: Like "rename".
        number: Which call, from 1.
        path: Count only calls whose first argument is a path with this in it.
        thread: Count only calls of threads of this name.
        code: The error number.
    """
    original = getattr(os, name)
    hits = Hits()
    seen = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        here = threading.current_thread().name
        if (not path or path in os.fspath(args[0])) and thread in ("", here):
            seen += 1
            if seen == number:
                hits.count += 1
                raise OSError(code, os.strerror(code), f"fault in {name}")
        return original(*args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(os, name, call))
        held = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10's paths hold the functions
        if hasattr(held, name):
            patches.enter_context(mock.patch.object(held, name, staticmethod(call)))
        yield hits


@contextmanager
def powerless() -> Iterator[Hits]:
    """Run as a user that may write nowhere, where the tests run as root."""
    hits = Hits()
    hits.count = 1
    mighty = os.geteuid() == 0
    if mighty:
        os.seteuid(65534)
    try:
        yield hits
    finally:
        if mighty:
            os.seteuid(0)


def flip(file: Path) -> None:
    """Change 64 bytes in the middle."""
    data = bytearray(file.read_bytes())
    start = max(0, len(data) // 2 - 32)
    data[start : start + 64] = bytes(byte ^ 0xFF for byte in data[start : start + 64])
    file.write_bytes(data)


def flip_bit(file: Path) -> None:
    """Change one bit near the end."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


def shorten(file: Path) -> None:
    """Drop the last byte."""
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    """Drop all bytes, as after a loss of power without fsync."""
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    """Add a byte."""
    with file.open("ab") as stream:
        stream.write(b"x")


DAMAGES = (flip, flip_bit, shorten, empty, lengthen, Path.unlink)


def files_in(folder: str | Path) -> list[str]:
    """Every file and folder below `folder`, hidden ones too."""
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*"))


def times_in(folder: str | Path) -> dict[str, int]:
    """Every file and folder below `folder` with the time it was changed."""
    return {name: os.stat(f"{folder}/{name}").st_mtime_ns for name in files_in(folder)}


def same_on_all_ranks(value: Any) -> Any:
    """Assert that all ranks have one value, and return it. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == value for other in values), values
    return value


def fails_together(action: Callable[[], Any], *parts: str) -> str:
    """`action` raises CheckpointError on every rank, with one message that has all `parts`."""
    text = None
    try:
        action()
    except CheckpointError as error:
        text = str(error)
    same_on_all_ranks(text)
    assert text is not None, "nothing was raised"
    for part in parts:
        assert part in text, (part, text)
    return text
