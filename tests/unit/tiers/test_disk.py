"""The disk tier: sizes, zeros, the hard limit, fallbacks, errors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.errors import StorageError
from shardplug.tiers import file as file_module
from shardplug.tiers import staging as staging_module
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.host import HostTier
from shardplug.tiers.protocol import ALIGNMENT, Region, Tier, aligned
from shardplug.tiers.staging import Staging
from shardplug.tiers.swap import SwapFolder

BUFFER = 4 * ALIGNMENT


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(SwapFolder(tmp_path, "run", 0), Staging(3 * BUFFER, BUFFER))
    yield tier
    tier.close()
    assert not list(tmp_path.iterdir())


def fill(tier: Tier, region: Region, value: int) -> None:
    tier.get(region, fresh=True).fill_(value)
    tier.put_back(region, changed=True)


def read(tier: Tier, region: Region) -> torch.Tensor:
    value = tier.get(region).clone()
    tier.put_back(region, changed=False)
    return value


@pytest.mark.parametrize("kind", ("disk", "host"))
def test_round_trip_of_awkward_sizes(kind: str, disk: DiskTier) -> None:
    tier: Tier = disk if kind == "disk" else HostTier(block_bytes=BUFFER)
    sizes = [0, 1, 511 * 4, 513 * 4, ALIGNMENT, ALIGNMENT + 1, BUFFER]
    regions = tier.allocate(sizes)
    assert [r.num_bytes for r in regions] == [aligned(max(size, 1)) for size in sizes]
    assert len({r.offset for r in regions}) == len(sizes)
    for region in regions:
        assert not read(tier, region).any(), "never written: zeros"
    for index, region in enumerate(regions):
        fill(tier, region, index + 1)
    tier.flush()
    for index, region in enumerate(regions):
        assert (read(tier, region) == index + 1).all()
    tier.free(regions[:1])
    assert read(tier, tier.allocate([3])[0]).shape == (ALIGNMENT,)
    later = tier.allocate([5])[0]
    assert later.offset >= regions[-1].offset + regions[-1].num_bytes
    assert not read(tier, later).any()


def test_traffic_is_counted(disk: DiskTier) -> None:
    regions = disk.allocate([BUFFER, 1])
    for region in regions:
        fill(disk, region, 7)
    disk.flush()
    assert (disk.traffic.bytes_read, disk.traffic.bytes_written) == (0, BUFFER + ALIGNMENT)
    before = disk.traffic.copy()
    assert disk.read_ahead(regions[0]) and disk.read_ahead(regions[0])
    read(disk, regions[0])
    after = disk.traffic.since(before)
    assert (after.bytes_read, after.bytes_written) == (BUFFER, 0)
    assert disk.traffic.waited_seconds > 0


def test_buffers_that_the_system_refuses(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        raise RuntimeError("cannot pin")

    region = disk.allocate([BUFFER])[0]
    with monkeypatch.context() as patch:
        patch.setattr(staging_module, "page_aligned", refuses)
        with pytest.raises(StorageError, match=f"{BUFFER} bytes of memory .*: cannot pin"):
            disk.get(region)
        with pytest.raises(StorageError, match="bytes of pinned memory for a staging buffer"):
            Staging(3 * BUFFER, BUFFER, pinned=True).take()
    fill(disk, region, 3)
    assert (read(disk, region) == 3).all()


def test_memory_never_exceeds_the_limit(disk: DiskTier) -> None:
    regions = disk.allocate([BUFFER] * 6)
    for index, region in enumerate(regions):
        fill(disk, region, index)  # waits for a write where no buffer is free
        assert disk.staging_bytes <= 3 * BUFFER
    disk.flush()
    assert [disk.read_ahead(region) for region in regions] == [True] * 3 + [False] * 3
    assert disk.staging_bytes == 3 * BUFFER
    assert (disk.get(regions[5]) == 5).all(), "what is needed now goes before what was read ahead"
    held = [disk.get(region) for region in regions[:2]]
    assert [int(h[0]) for h in held] == [0, 1]
    with pytest.raises(StorageError, match=f"all {3 * BUFFER} bytes"):
        disk.get(regions[3])
    disk.drop()
    assert [disk.read_ahead(region) for region in regions[:3]] == [True] * 3
    disk.drop()


def test_full_disk_is_found_when_room_is_reserved(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = disk.allocate([BUFFER])[0]
    size = disk.path.stat().st_size
    spare = disk.allocate([ALIGNMENT])[0]
    disk.free([spare])
    size = disk.path.stat().st_size

    def full(file: int, offset: int, count: int) -> None:
        os.ftruncate(file, offset + count // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    message = (
        rf"room for {aligned(9000)} bytes .* in {disk.path.parent}.* has \d+ bytes free: No sp"
    )
    with pytest.raises(StorageError, match=message):
        disk.allocate([10, 9000])  # the first fits where another was
    assert disk.allocate([10]) == [spare]
    assert disk.path.stat().st_size == size
    fill(disk, region, 3)
    disk.flush()
    assert (read(disk, region) == 3).all()


def test_space_is_reserved_and_not_only_promised(disk: DiskTier) -> None:
    disk.allocate([BUFFER] * 10)
    assert disk.path.stat().st_blocks * 512 >= 10 * BUFFER


@pytest.mark.parametrize("at", ("open", "trial"))
def test_filesystem_without_direct_io(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any) -> Any:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    if at == "open":
        original = os.open

        def opens(path: Any, flags: int, *rest: Any, **kwargs: Any) -> int:
            return refuses() if flags & os.O_DIRECT else original(path, flags, *rest, **kwargs)

        monkeypatch.setattr(file_module.os, "open", opens)
    else:
        monkeypatch.setattr(file_module.os, "pwritev", refuses)
    tier = DiskTier(SwapFolder(tmp_path, "run", 0), Staging(3 * BUFFER, BUFFER))
    monkeypatch.undo()
    assert not tier.direct and "O_DIRECT" in str(tier.notice)
    region = tier.allocate([BUFFER])[0]
    fill(tier, region, 9)
    tier.flush()
    assert (read(tier, region) == 9).all()
    tier.close()


def test_direct_io_is_used_where_it_is(disk: DiskTier) -> None:
    try:
        probe = os.open(disk.path, os.O_RDWR | os.O_DIRECT)
    except OSError:
        pytest.skip("this filesystem has no direct I/O")
    os.close(probe)
    assert disk.direct and disk.notice is None


@pytest.mark.parametrize("code", (errno.EIO, errno.ENOSPC))
def test_errors_name_path_and_bytes(
    code: int, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = disk.allocate([BUFFER])[0]

    def fails(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(file_module.os, "pwritev", fails)
    fill(disk, region, 1)
    with pytest.raises(StorageError, match=rf"Writing {BUFFER} bytes at byte 0 of {disk.path}"):
        disk.flush()
    monkeypatch.undo()
    monkeypatch.setattr(file_module.os, "preadv", fails)
    with pytest.raises(StorageError, match=rf"Reading {BUFFER} .* failed: {os.strerror(code)}"):
        disk.get(region)
    monkeypatch.undo()
    fill(disk, region, 2)  # no buffer was lost on the way
    disk.flush()
    assert (read(disk, region) == 2).all()


def test_short_reads_and_writes_go_on(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    region = disk.allocate([BUFFER])[0]
    write, read_some = os.pwritev, os.preadv
    monkeypatch.setattr(file_module.os, "pwritev", lambda f, b, o: write(f, [b[0][:ALIGNMENT]], o))
    monkeypatch.setattr(
        file_module.os, "preadv", lambda f, b, o: read_some(f, [b[0][:ALIGNMENT]], o)
    )
    fill(disk, region, 5)
    disk.flush()
    assert (read(disk, region) == 5).all()


def test_truncated_file_is_an_error(disk: DiskTier) -> None:
    region = disk.allocate([BUFFER])[0]
    os.truncate(disk.path, ALIGNMENT)
    with pytest.raises(StorageError, match=f"the file ends after {ALIGNMENT} bytes"):
        disk.get(region)


def test_vanished_file_is_noticed(disk: DiskTier) -> None:
    disk.check()
    disk.path.rename(disk.path.with_name("elsewhere"))
    with pytest.raises(StorageError, match=f"swap file {disk.path} of .* gone"):
        disk.check()
    disk.path.write_text("another")
    with pytest.raises(StorageError, match="gone or another"):
        disk.check()
    disk.path.with_name("elsewhere").unlink()  # what is not of the run is left, and its folder


def test_no_room_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardplug.tiers import host

    tier = HostTier()
    made = []

    def refuses(num_bytes: int, *, pinned: bool) -> torch.Tensor:
        made.append(num_bytes)
        if len(made) > 1:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return torch.zeros(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(host, "page_aligned", refuses)
    with pytest.raises(StorageError, match=f"room for {3 * ALIGNMENT} bytes .*refused {ALIGNMENT}"):
        tier.allocate([1, 2, 3])
    assert not tier._memory
