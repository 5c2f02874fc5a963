"""A budget of CPU memory before files: who goes where, bytes, errors that leave nothing behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.errors import StorageError
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.host import HostTier
from shardplug.tiers.protocol import ALIGNMENT, Region
from shardplug.tiers.split import SplitTier
from shardplug.tiers.staging import Staging
from shardplug.tiers.swap import SwapFolder

BUFFER = 4 * ALIGNMENT


@pytest.fixture
def split(tmp_path: Path) -> Iterator[SplitTier]:
    far = DiskTier(SwapFolder(tmp_path, "run", 0), Staging(3 * BUFFER, BUFFER))
    tier = SplitTier(HostTier(), far, 3 * BUFFER)
    yield tier
    tier.close()
    tier.close()
    assert not list(tmp_path.iterdir())


def fill(tier: SplitTier, region: Region, value: int) -> None:
    tier.get(region, fresh=True).fill_(value)
    tier.put_back(region, changed=True)


def read(tier: SplitTier, region: Region) -> torch.Tensor:
    value = tier.get(region).clone()
    tier.put_back(region, changed=False)
    return value


def places(tier: SplitTier, regions: list[Region]) -> list[str]:
    return [tier.tier_of(region) for region in regions]


def test_memory_is_filled_first_and_never_beyond_the_budget(split: SplitTier) -> None:
    assert split.block_bytes == BUFFER  # the smaller of the two
    assert (split.name, split.can_fail) == ("nvme", True)
    regions = split.allocate([BUFFER] * 2 + [BUFFER - 1, BUFFER, 0, BUFFER])
    assert places(split, regions) == ["cpu"] * 3 + ["nvme"] * 3
    assert split.near_bytes == 3 * BUFFER
    assert len(set(regions)) == len(regions)
    for region in regions:
        assert not read(split, region).any(), "never written: zeros"
    for index, region in enumerate(regions):
        fill(split, region, index + 1)
    split.flush()
    for index, region in enumerate(regions):
        assert split.read_ahead(region)
        assert (read(split, region) == index + 1).all()


def test_only_what_is_in_files_is_traffic_and_staging(split: SplitTier) -> None:
    regions = split.allocate([BUFFER] * 5)
    for region in regions:
        fill(split, region, 9)
    split.flush()
    assert split.traffic.bytes_written == 2 * BUFFER
    for region in regions:
        read(split, region)
    assert split.traffic.bytes_read == 2 * BUFFER
    assert 0 < split.staging_bytes <= 3 * BUFFER


def test_a_region_that_does_not_fit_leaves_the_room_to_a_smaller_one(split: SplitTier) -> None:
    first = split.allocate([BUFFER, BUFFER, BUFFER // 2])
    rest = split.allocate([BUFFER, BUFFER // 2, ALIGNMENT])
    assert places(split, first + rest) == ["cpu"] * 3 + ["nvme", "cpu", "nvme"]


def test_freed_memory_is_filled_again(split: SplitTier) -> None:
    regions = split.allocate([BUFFER] * 4)
    split.free(regions[1:2])
    split.free(regions[1:2])  # known to be free already
    assert split.near_bytes == 2 * BUFFER
    again = split.allocate([BUFFER, BUFFER])
    assert places(split, again) == ["cpu", "nvme"]
    assert not read(split, again[0]).any()


def test_pinned_memory_is_counted_as_torch_rounds_it() -> None:
    tier = HostTier(pinned=True)
    assert tier.cost_bytes(3 * ALIGNMENT) == 4 * ALIGNMENT
    assert HostTier().cost_bytes(3 * ALIGNMENT - 1) == 3 * ALIGNMENT


def test_a_full_drive_leaves_no_memory_reserved(
    split: SplitTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match=f"room for {BUFFER} bytes .* bytes free: No space"):
            split.allocate([BUFFER] * 4)
    assert split.near_bytes == 0
    assert places(split, split.allocate([BUFFER] * 4)) == ["cpu"] * 3 + ["nvme"]


def test_faults_of_the_file_are_its_own(split: SplitTier) -> None:
    near, *_, far = split.allocate([BUFFER] * 4)
    fill(split, near, 1)
    fill(split, far, 2)
    split.flush()
    split.get(near)
    split.get(far)
    split.drop()
    assert (read(split, far) == 2).all() and (read(split, near) == 1).all()
    split.check()
    split.far.path.unlink()
    with pytest.raises(StorageError, match="gone or another"):
        split.check()
    assert (read(split, near) == 1).all()
