"""Measures what a machine's drive and memory can do for state outside the device."""

from __future__ import annotations

import ctypes
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from shardplug.errors import ConfigError
from shardplug.tiers.disk import NUM_THREADS
from shardplug.tiers.file import SwapFile
from shardplug.tiers.filesystem import Filesystem, filesystem_of, free_bytes
from shardplug.tiers.protocol import BLOCK_BYTES
from shardplug.tiers.staging import Buffer, page_aligned
from shardplug.tiers.swap import SwapFolder

__all__ = ["STATE_BYTES", "DiskProbe", "MemoryProbe", "probe_disk", "probe_memory", "step_seconds"]

STATE_BYTES = 8
"""Bytes of Adam's two moments for one fp32 parameter, each read and written once in a step."""

_UPDATE_BYTES = 28
"""Memory traffic of Adam's update for one: weight, gradient, moments in; weight, moments out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskProbe:
    """What was measured on the drive behind a folder."""

    filesystem: Filesystem
    free_bytes: int
    direct: bool
    """Whether files are read and written past the page cache (O_DIRECT)."""

    read_bytes_per_second: float
    write_bytes_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryProbe:
    """What was measured in the memory of this machine."""

    num_threads: int
    copy_bytes_per_second: float
    """Bytes read plus bytes written by a large copy, with torch's threads."""

    pinned: bool
    """Whether memory can be pinned for a GPU; always False without one."""

    lock_limit_bytes: int | None
    """Memory that this user may lock (RLIMIT_MEMLOCK); None: no limit."""

    locks: bool
    """Whether locking one staging buffer worked."""


def probe_disk(path: str | os.PathLike[str], num_bytes: int = 256 * 2**20) -> DiskProbe:
    """Write and read a file in a folder, as the nvme tier does; it is removed.

    Args:
        path: The folder.
        num_bytes: Size of the file, rounded up to whole blocks.

    Raises:
        ConfigError: When the folder is missing, cannot be written to or has too little room.
    """
    folder = SwapFolder(path, f"probe-{os.getpid()}", 0)
    try:
        return _measure(folder, -(-num_bytes // BLOCK_BYTES))
    except OSError as error:
        raise ConfigError(
            f"Expected to write {num_bytes} bytes into {folder.root}, which has "
            f"{free_bytes(folder.root)} bytes free: {error.strerror or error}. Name another folder."
        ) from error
    finally:
        folder.close()


def _measure(folder: SwapFolder, num_blocks: int) -> DiskProbe:
    file = SwapFile(folder.path / "probe.swap")
    try:
        file.extend(num_blocks * BLOCK_BYTES)
        buffers = [Buffer(BLOCK_BYTES, pinned=False) for _ in range(2 * NUM_THREADS)]
        for buffer in buffers:
            buffer.tensor.random_(0, 256)  # drives may store zeros without writing them
        rates = []
        for move in (file.write, file.read):
            with ThreadPoolExecutor(NUM_THREADS) as threads:
                begin = time.perf_counter()
                moves = [
                    threads.submit(move, buffers[i % len(buffers)].bytes, i * BLOCK_BYTES)
                    for i in range(num_blocks)
                ]
                for done in moves:
                    done.result()
            rates.append(num_blocks * BLOCK_BYTES / (time.perf_counter() - begin))
        return DiskProbe(
            filesystem=filesystem_of(folder.root),
            free_bytes=free_bytes(folder.root),
            direct=file.direct,
            read_bytes_per_second=rates[1],
            write_bytes_per_second=rates[0],
        )
    finally:
        file.close()


def probe_memory(num_bytes: int = 256 * 2**20) -> MemoryProbe:
    """Measure a large copy, and look at what may be pinned and locked."""
    source = torch.ones(num_bytes // 4)
    target = torch.empty_like(source)
    target.copy_(source)  # the first touch costs pages
    best = min(_seconds(lambda: target.copy_(source)) for _ in range(3))
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return MemoryProbe(
        num_threads=torch.get_num_threads(),
        copy_bytes_per_second=2 * source.nbytes / best,
        pinned=_can_pin(),
        lock_limit_bytes=None if soft == resource.RLIM_INFINITY else soft,
        locks=_can_lock(BLOCK_BYTES),
    )


def step_seconds(num_parameters: float, disk: DiskProbe | None, memory: MemoryProbe) -> float:
    """Estimate the time of one Adam step over a rank's own fp32 parameters.

    The drive's time where there is a drive, since the update runs beside it, else the update's
    memory traffic at the speed of a copy.

    Args:
        num_parameters: Parameters that the rank owns: all of them divided by the ranks.
        disk: The drive that the state is on; None: CPU memory.
        memory: The machine's memory.
    """
    update = num_parameters * _UPDATE_BYTES / memory.copy_bytes_per_second
    if disk is None:
        return update
    moved = num_parameters * STATE_BYTES
    drive = moved / disk.read_bytes_per_second + moved / disk.write_bytes_per_second
    return max(update, drive)


def _seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _can_pin() -> bool:
    if not torch.cuda.is_available():
        return False
    try:
        page_aligned(BLOCK_BYTES, pinned=True)
    except RuntimeError:
        return False
    return True


def _can_lock(num_bytes: int) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    memory = page_aligned(num_bytes)
    address = ctypes.c_void_p(memory.data_ptr())
    if libc.mlock(address, ctypes.c_size_t(num_bytes)) != 0:
        return False
    libc.munlock(address, ctypes.c_size_t(num_bytes))
    return True
