"""Measure memory and drive, and say what state outside the device costs here.

Prints whether files can be read and written past the page cache (O_DIRECT), whether memory can be
pinned and locked, the bandwidths of both, and what an optimizer step takes for a number of
parameters. Exit code 1: the optimizer state of that many has no room in the folder.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

from shardplug.errors import ConfigError
from shardplug.tiers import PATH_VARIABLE
from shardplug.tiers.probe import (
    STATE_BYTES,
    DiskProbe,
    MemoryProbe,
    probe_disk,
    probe_memory,
    step_seconds,
)
from shardplug.tiers.staging import STAGING_BYTES

__all__ = ["add_arguments", "run"]

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_GIB, _MIB = 2**30, 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument(
        "--nvme-path",
        help=f"folder for swap files to measure; by default what {PATH_VARIABLE} names",
    )
    parser.add_argument(
        "--parameters",
        default="1b",
        help="size of the model the costs are given for, like 350m or 7b (default: 1b)",
    )
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share it (default: 1)")
    parser.add_argument(
        "--mib", type=int, default=256, help="size of the test file in MiB (default: 256)"
    )


def run(args: argparse.Namespace) -> int:
    """Measure and print.

    Returns:
        0, or 1 when the optimizer state has no room in the folder.

    Raises:
        ConfigError: For arguments that make no sense, or a folder that cannot be used.
    """
    own = _parse_count(args.parameters) / args.ranks if args.ranks > 0 else 0
    if not own or args.mib < 1:
        raise ConfigError(
            f"Expected --ranks and --mib of at least 1, got {args.ranks} and {args.mib}."
        )
    path = args.nvme_path or os.environ.get(PATH_VARIABLE)
    memory = probe_memory()
    disk = probe_disk(path, args.mib * _MIB) if path else None
    for line in _about_memory(memory):
        print(line)
    for line in _about_disk(path, disk):
        print(line)
    print(f"An Adam step, {args.parameters} parameters on {args.ranks} ranks, fp32 masters:")
    for line in _about_step(own, disk, memory):
        print(line)
    missing = STATE_BYTES * own - disk.free_bytes if disk is not None else 0
    if missing > 0:
        print(f"  too little room: {missing / _GIB:.2f} GiB more are needed in {path}")
    return int(missing > 0)


def _about_memory(memory: MemoryProbe) -> Iterator[str]:
    limit = memory.lock_limit_bytes
    allowed = "unlimited" if limit is None else f"{limit / _MIB:.1f} MiB"
    can = "can" if memory.locks else "cannot"
    yield "Memory:"
    yield f"  copy: {_rate(memory.copy_bytes_per_second)}, {memory.num_threads} threads"
    yield f"  pinned: {'yes' if memory.pinned else 'no, and without a GPU none is needed'}"
    yield f"  locked: {allowed} allowed, one buffer {can} be locked"


def _about_disk(path: str | None, disk: DiskProbe | None) -> Iterator[str]:
    yield "Drive:"
    if disk is None:
        yield f"  not measured; give --nvme-path, or set {PATH_VARIABLE}"
        return
    yield f"  folder: {path} on {disk.filesystem.kind}, {disk.free_bytes / _GIB:.1f} GiB free"
    if disk.filesystem.in_memory:
        yield "  notice: files there are kept in memory, so they save none"
    if disk.filesystem.over_network:
        yield "  notice: files there are on another machine"
    how = "O_DIRECT, past the page cache" if disk.direct else "page cache, no O_DIRECT here"
    yield f"  way: {how}; threads of Python, nothing is compiled"
    yield f"  read: {_rate(disk.read_bytes_per_second)}"
    yield f"  written: {_rate(disk.write_bytes_per_second)}"


def _about_step(own: float, disk: DiskProbe | None, memory: MemoryProbe) -> Iterator[str]:
    held = f"{STATE_BYTES * own / _GIB:.2f} GiB"
    seconds = step_seconds(own, None, memory)
    yield f'  "cpu": {held} of CPU memory a rank; about {seconds:.2f} s on CPU ranks'
    if disk is not None:
        seconds = step_seconds(own, disk, memory)
        yield f'  "nvme": {held} of files a rank, all of it read and written in each step'
        yield f"    about {seconds:.2f} s alone on the drive; {STAGING_BYTES // _MIB} MiB buffers"


def _parse_count(text: str) -> float:
    match = _COUNT.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"Expected a number of parameters like 350m or 7b, got {text!r}.")
    return float(match[1]) * _FACTORS[match[2].lower()]


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.2f} GB/s"
