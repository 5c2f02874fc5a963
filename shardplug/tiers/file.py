"""A file whose blocks are read and written past the page cache, where the filesystem can do it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from shardplug.tiers.protocol import ALIGNMENT
from shardplug.tiers.staging import Buffer

__all__ = ["SwapFile"]


class SwapFile:
    """One open swap file. Reading and writing may be called from several threads.

    Args:
        path: File to make.

    Raises:
        OSError: When it cannot be made, or written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._file = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
            self.direct = hasattr(os, "O_DIRECT")
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._file = os.open(path, flags, 0o600)
            self.direct = False
        if self.direct and not self._takes_blocks():
            os.close(self._file)
            self._file = os.open(path, flags, 0o600)
            self.direct = False
        self._identity = os.fstat(self._file)

    def _takes_blocks(self) -> bool:
        """Whether direct I/O works: some filesystems only say so when it comes to it."""
        trial = Buffer(ALIGNMENT, pinned=False)
        try:
            os.pwritev(self._file, [trial.bytes], 0)
            os.preadv(self._file, [trial.bytes], 0)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            os.close(self._file)
            raise
        os.ftruncate(self._file, 0)
        return True

    def extend(self, num_bytes: int) -> int:
        """Reserve room at the end, which reads as zeros; return where it begins.

        Raises:
            OSError: When there is none; the file is as before then.
        """
        begin = self.num_bytes
        try:
            os.posix_fallocate(self._file, begin, num_bytes)
        except OSError:
            os.ftruncate(self._file, begin)  # gives back the part that was reserved
            raise
        self.num_bytes += num_bytes
        return begin

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on.

        Raises:
            OSError: When that many bytes cannot be read.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, f"the file ends after {offset + done} bytes")
            done += count

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write all of `buffer` to `offset`.

        Raises:
            OSError: When not all of it can be written.
        """
        done = 0
        while done < len(buffer):
            count = os.pwritev(self._file, [buffer[done:]], offset + done)
            if count <= 0:
                raise OSError(errno.EIO, "nothing more could be written")
            done += count

    def is_there(self) -> bool:
        """Whether the path still leads to this very file."""
        try:
            return os.path.samestat(os.stat(self.path), self._identity)
        except OSError:
            return False

    def close(self) -> None:
        """Close and remove the file; may be called twice."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        self.path.unlink(missing_ok=True)
