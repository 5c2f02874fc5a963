"""Files as a tier: blocks move between an NVMe drive and a few reused buffers."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from shardplug.errors import StorageError
from shardplug.tiers.file import SwapFile
from shardplug.tiers.filesystem import FULL, room_at
from shardplug.tiers.protocol import Region, Traffic, aligned
from shardplug.tiers.staging import Buffer, Staging
from shardplug.tiers.swap import SwapFolder

__all__ = ["DiskTier"]

NUM_THREADS = 4  # reach the drive's bandwidth with direct I/O; each call lets go of the GIL


class DiskTier:
    """Keeps regions in one swap file.

    Regions are read ahead and written behind by a few threads, straight into and out of the
    staging buffers, past the page cache. Memory is bounded by the staging's limit: where no
    buffer is free, `read_ahead` does nothing and `get` waits for a write to end.

    Args:
        folder: Where the file is made.
        staging: The buffers.

    Raises:
        StorageError: When the file cannot be made.
    """

    name = "nvme"
    can_fail = True

    def __init__(self, folder: SwapFolder, staging: Staging) -> None:
        self.traffic = Traffic()
        self._folder = folder  # held as long as the file is used
        self._staging = staging
        path = folder.path / "state.swap"
        try:
            self._file = SwapFile(path)
        except OSError as error:
            room = f", with {room_at(path)}" if error.errno in FULL else ""
            raise StorageError(
                f"Expected to make the swap file {path}, got: {error.strerror or error}{room}."
            ) from error
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="shardplug-disk")
        self._reads: dict[Region, tuple[Buffer, Future[None]]] = {}
        self._used: dict[Region, Buffer] = {}
        self._free: dict[int, list[Region]] = {}
        self._writes: deque[tuple[Region, Buffer, Future[None]]] = deque()
        self._close = weakref.finalize(self, _close, self._threads, self._file, os.getpid())

    @property
    def path(self) -> Path:
        """The swap file."""
        return self._file.path

    @property
    def direct(self) -> bool:
        """Whether the file is read and written past the page cache (O_DIRECT)."""
        return self._file.direct

    @property
    def notice(self) -> str | None:
        """What the user should know about the file, if anything."""
        if self.direct:
            return None
        return (
            f"{self.path.parent.parent} has no direct I/O (O_DIRECT): blocks go through the page "
            "cache, which takes free memory and is slower. Name a folder on a local drive."
        )

    @property
    def block_bytes(self) -> int:
        """Size of one buffer."""
        return self._staging.buffer_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory of the buffers made so far."""
        return self._staging.held_bytes

    def tier_of(self, region: Region) -> str:
        """Return where a region is."""
        return self.name

    def uses(self, other: object) -> bool:
        """Return whether `other` is this tier; see `Tier.uses`."""
        return other is self

    def allocate(self, sizes: Sequence[int]) -> list[Region]:
        """Reserve regions on the drive; see `Tier.allocate`."""
        rounded = [aligned(max(size, 1)) for size in sizes]  # an empty one has a place too
        reused: dict[int, Region] = {}
        for index, size in enumerate(rounded):
            if self._free.get(size):
                reused[index] = self._free[size].pop()
        total = sum(size for index, size in enumerate(rounded) if index not in reused)
        try:
            offset = self._file.extend(total) if total else self._file.num_bytes
        except OSError as error:
            self.free(list(reused.values()))
            folder = self.path.parent
            raise StorageError(
                f"Expected room for {total} bytes in swap files in {folder}, which has "
                f"{room_at(folder)}: {error.strerror or error}. Free some, name another "
                "nvme_path, or use more ranks."
            ) from error
        regions: list[Region] = []
        for index, size in enumerate(rounded):
            if index in reused:
                regions.append(reused[index])
                continue
            regions.append(Region(offset, size))
            offset += size
        return regions

    def free(self, regions: Sequence[Region]) -> None:
        """Keep the room for later regions of the same size."""
        for region in regions:
            self._free.setdefault(region.num_bytes, []).append(region)

    def read_ahead(self, region: Region) -> bool:
        """Begin to read a region, if a buffer is free."""
        if region in self._reads or region in self._used:
            return True
        self._settle(region)
        self._reap()
        buffer = self._staging.take()
        if buffer is None:
            return False
        self._begin_read(region, buffer)
        return True

    def get(self, region: Region, *, fresh: bool = False) -> torch.Tensor:
        """Return the region's bytes in a staging buffer."""
        begun = self._reads.pop(region, None)
        if begun is None:
            buffer = self._wait_for_buffer()
            if not fresh:
                self._settle(region)
                self._begin_read(region, buffer)
                begun = self._reads.pop(region)
        if begun is not None:
            buffer, future = begun
            error = self._wait(future)
            if error is not None:
                self._staging.give(buffer)
                raise self._failed("Reading", region, error) from error
            self.traffic.bytes_read += region.num_bytes
        self._used[region] = buffer
        return buffer.tensor[: region.num_bytes]

    def begin(self, region: Region, deliver: Callable[[], None]) -> Future[None]:
        """Let one of the threads read a region into memory of the caller's own.

        Args:
            region: A region that is not in use.
            deliver: Reads it, by `file`.
        """
        self._settle(region)
        return self._threads.submit(deliver)

    def end(self, region: Region, future: Future[None]) -> None:
        """Wait for what `begin` has begun.

        Raises:
            StorageError: When the region could not be read.
        """
        error = self._wait(future)
        if error is not None:
            raise self._failed("Reading", region, error) from error
        self.traffic.bytes_read += region.num_bytes

    @property
    def file(self) -> SwapFile:
        """The open swap file."""
        return self._file

    def put_back(self, region: Region, *, changed: bool) -> None:
        """Begin to write the region, if it was changed, and free its buffer after that."""
        buffer = self._used.pop(region)
        if not changed:
            self._staging.give(buffer)
            return
        view = buffer.bytes[: region.num_bytes]
        future = self._threads.submit(self._file.write, view, region.offset)
        self._writes.append((region, buffer, future))

    def flush(self) -> None:
        """Wait for all writes; see `Tier.flush`."""
        while self._writes:
            self._end_write(self._writes[0])

    def drop(self) -> None:
        """Give all buffers back, whatever became of the reads and writes under way."""
        for buffer, future in self._reads.values():
            self._wait(future)
            self._staging.give(buffer)
        for buffer in self._used.values():
            self._staging.give(buffer)
        for _, buffer, future in self._writes:
            self._wait(future)
            self._staging.give(buffer)
        self._reads.clear()
        self._used.clear()
        self._writes.clear()

    def check(self) -> None:
        """Look whether the swap file is still where it was made."""
        if not self._file.is_there():
            raise StorageError(
                f"Expected the swap file {self.path} of {self._file.num_bytes} bytes, but it is "
                "gone or another: something removed it under a run that lives. Nothing is lost "
                "yet: save a checkpoint, and start again from it."
            )

    def remove_files(self) -> None:
        """Remove the folder of a process that is about to end, whatever is under way."""
        self._folder.close()

    def close(self) -> None:
        """Remove the swap file and its folder."""
        self._close()
        self._folder.close()

    def _begin_read(self, region: Region, buffer: Buffer) -> None:
        view = buffer.bytes[: region.num_bytes]
        future = self._threads.submit(self._file.read, view, region.offset)
        self._reads[region] = (buffer, future)

    def _wait_for_buffer(self) -> Buffer:
        buffer = self._staging.take()
        while buffer is None:
            if self._writes:
                self._end_write(self._writes[0])
            elif self._reads:  # read ahead for later, and in the way now
                _, (last, future) = self._reads.popitem()
                self._wait(future)
                self._staging.give(last)
            else:
                limit, each = self._staging.limit_bytes, self._staging.buffer_bytes
                raise StorageError(
                    f"Expected a free staging buffer of {each} bytes, but all {limit} bytes that "
                    f"{self.path} may be moved through are in use at once."
                )
            buffer = self._staging.take()
        return buffer

    def _settle(self, region: Region) -> None:
        """Wait for a write of this very region, whose bytes are wanted again."""
        while any(region == written for written, _, _ in self._writes):
            self._end_write(self._writes[0])

    def _reap(self) -> None:
        """Take back the buffers of writes that have ended."""
        while self._writes and self._writes[0][2].done():
            self._end_write(self._writes[0])

    def _end_write(self, write: tuple[Region, Buffer, Future[None]]) -> None:
        region, buffer, future = write
        error = self._wait(future)
        self._writes.popleft()
        self._staging.give(buffer)
        if error is not None:
            raise self._failed("Writing", region, error) from error
        self.traffic.bytes_written += region.num_bytes

    def _wait(self, future: Future[None]) -> BaseException | None:
        begin = time.perf_counter()
        error = future.exception()
        self.traffic.waited_seconds += time.perf_counter() - begin
        return error

    def _failed(self, doing: str, region: Region, error: BaseException) -> StorageError:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        where = f"{region.num_bytes} bytes at byte {region.offset} of {self.path}"
        full = isinstance(error, OSError) and error.errno in FULL
        room = f" {self.path.parent} has {room_at(self.path)}." if full else ""
        return StorageError(f"{doing} {where} failed: {why}.{room}")


def _close(threads: ThreadPoolExecutor, file: SwapFile, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child: the file is its parent's
    threads.shutdown(wait=True)
    file.close()
