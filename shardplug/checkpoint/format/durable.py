"""Files that are known to be whole: checksums while writing, checks while reading, fsync.

A checksum is kept for every block of a file, so that a reader of some rows checks what it reads
and nothing more.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from shardplug.errors import CheckpointError
from shardplug.tiers.filesystem import FULL

__all__ = [
    "BLOCK_BYTES",
    "CheckedFileSystem",
    "SummingFileSystem",
    "bytes_of",
    "file_checksums",
    "is_full",
    "naming",
    "sync",
    "verify_file",
]

BLOCK_BYTES = 2**20
"""Bytes of a file that one checksum covers."""

_HELD_BLOCKS = 4


@contextmanager
def naming(path: Path) -> Generator[None, None, None]:
    """Let an error of the system that happens inside name the path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_full(error: BaseException) -> bool:
    """Whether an error says that a drive has no room; torch's writer does not say why it failed."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("PytorchStreamWriter", "inline_container")
    )


def bytes_of(paths: Iterable[Path]) -> int:
    """Return the bytes that files take on their drive; those that are gone take none."""
    total = 0
    for path in paths:
        with suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


def sync(path: Path) -> None:
    """Make a file's content, or a folder's list of names, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_checksums(path: Path) -> dict[str, Any]:
    """Read a file and return its size and the CRC-32 of each of its blocks.

    Returns:
        `{"bytes": size, "crc32": [one number per block of BLOCK_BYTES]}`.
    """
    sums = _Sums()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            sums.add(block)
    return sums.entry()


def verify_file(path: Path, entry: Mapping[str, Any], block_bytes: int) -> str | None:
    """Compare a file with its entry in a manifest.

    Args:
        path: The file.
        entry: `{"bytes": size}`, and `"crc32"` where the manifest has checksums.
        block_bytes: Bytes of the file that one checksum covers.

    Returns:
        What is wrong with it, or None.
    """
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"has {size} bytes, {entry['bytes']} were written"
    with path.open("rb") as file:
        for index, expected in enumerate(entry.get("crc32", ())):
            if zlib.crc32(file.read(block_bytes)) != expected:
                return _damage(index, block_bytes, size)
    return None


def _damage(index: int, block_bytes: int, size: int) -> str:
    start = index * block_bytes
    return (
        f"has other bytes than were written, between {start} and {min(start + block_bytes, size)}"
    )


class _Sums:
    """CRC-32 of each block of what is added."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._current = 0
        self._size = 0

    def add(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._current = zlib.crc32(piece, self._current)
            self._size += len(piece)
            if self._size % BLOCK_BYTES == 0:
                self._done.append(self._current)
                self._current = 0
            view = view[len(piece) :]

    def entry(self) -> dict[str, Any]:
        rest = [self._current] if self._size % BLOCK_BYTES else []
        return {"bytes": self._size, "crc32": [*self._done, *rest]}


class SummingFileSystem(FileSystem):
    """Keeps the checksums of what torch's writer writes, from the bytes it was given.

    Attributes:
        entries: For each file written, by its name, what `file_checksums` would return.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; see the base class."""
        if "w" not in mode:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        summing: _SummingStream | None = None
        try:
            with naming(Path(path)), super().create_stream(path, mode) as stream:
                summing = _SummingStream(stream)
                yield summing
        except RuntimeError as error:
            # torch.save hides what the system said.
            if summing is None or summing.failure is None:
                raise
            said = summing.failure
            raise OSError(said.errno, said.strerror, str(path)) from error
        self.entries[Path(path).name] = summing.sums.entry()


class _SummingStream(io.RawIOBase):
    """Passes everything on to a file, in order."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self.sums = _Sums()
        self.failure: OSError | None = None
        self._file = file

    def write(self, data: Any) -> int:
        try:
            written: int = self._file.write(data)
        except OSError as error:
            self.failure = error
            raise
        self.sums.add(data)
        return written

    def tell(self) -> int:
        position: int = self._file.tell()
        return position

    def fileno(self) -> int:
        self._file.flush()  # who asks for the number is going to fsync
        number: int = self._file.fileno()
        return number

    def flush(self) -> None:
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        self._file.close()
        super().close()


class CheckedFileSystem(FileSystem):
    """Lets torch's reader see no byte that differs from what was written.

    Args:
        entries: A manifest's entries by file name; files without one are not checked.
        block_bytes: Bytes of a file that one checksum covers.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]], block_bytes: int) -> None:
        self._entries = entries
        self._block_bytes = block_bytes

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; see the base class.

        Raises:
            CheckpointError: While it is read, when a block differs from its checksum.
        """
        sums = self._entries.get(Path(path).name, {}).get("crc32")
        if "w" in mode or sums is None:
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with open(path, "rb", buffering=0) as file:
            yield _CheckedStream(Path(path), file, sums, self._block_bytes)


class _CheckedStream(io.RawIOBase):
    """Reads a file block by block and checks each block before its bytes are given out."""

    def __init__(self, path: Path, file: Any, sums: Sequence[int], block_bytes: int) -> None:
        super().__init__()
        self._path = path
        self._file: BinaryIO = file
        self._sums = sums
        self._block_bytes = block_bytes
        self._size = os.fstat(file.fileno()).st_size
        self._position = 0
        self._held: dict[int, bytearray] = {}  # by number; the one used last comes last

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        view = view[: max(0, self._size - self._position)]
        wanted = len(view)
        while len(view):
            index, inside = divmod(self._position, self._block_bytes)
            length = self._length(index)
            if inside == 0 and len(view) >= length:
                self._read_block(index, view[:length])  # no copy of what is read as a whole
                taken = length
            else:
                block = self._block(index, length)
                taken = min(length - inside, len(view))
                view[:taken] = block[inside : inside + taken]
            self._position += taken
            view = view[taken:]
        return wanted

    def _length(self, index: int) -> int:
        return min(self._block_bytes, self._size - index * self._block_bytes)

    def _block(self, index: int, length: int) -> memoryview:
        block = self._held.pop(index, None)
        if block is None:
            # An item's end is read before its beginning, and blocks are shared with neighbours.
            full = len(self._held) >= _HELD_BLOCKS
            block = self._held.pop(next(iter(self._held))) if full else bytearray(self._block_bytes)
            self._read_block(index, memoryview(block)[:length])
        self._held[index] = block
        return memoryview(block)[:length]

    def _read_block(self, index: int, target: memoryview) -> None:
        self._file.seek(index * self._block_bytes)
        done = 0
        readinto = cast(Callable[[memoryview], int], self._file.readinto)  # type: ignore[attr-defined]
        while done < len(target):
            count = readinto(target[done:])
            if not count:
                raise CheckpointError(f"{self._path} is damaged: it ends too early.")
            done += count
        if index >= len(self._sums) or zlib.crc32(target) != self._sums[index]:
            damage = _damage(index, self._block_bytes, self._size)
            raise CheckpointError(f"{self._path.parent} is damaged: {self._path.name} {damage}.")
