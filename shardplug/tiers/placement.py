"""Opens the tier that a configuration names."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from typing import Any

import torch.distributed as dist

from shardplug.collective import raise_together
from shardplug.errors import ConfigError, StorageError
from shardplug.tiers.disk import DiskTier
from shardplug.tiers.host import HostTier
from shardplug.tiers.protocol import Tier
from shardplug.tiers.split import SplitTier
from shardplug.tiers.staging import Staging
from shardplug.tiers.swap import SwapFolder

__all__ = ["PATH_VARIABLE", "open_tier"]

PATH_VARIABLE = "SHARDPLUG_NVME_PATH"
"""Names the folder for swap files where the configuration does not."""


def open_tier(
    name: str,
    path: str | None,
    group: dist.ProcessGroup,
    *,
    pinned: bool,
    what: str,
    cpu_bytes: int = 0,
) -> Tier:
    """Open a tier on this rank. Collective.

    Args:
        name: "cpu" or "nvme".
        path: Folder for swap files, or None for what the environment says.
        group: All ranks, with messages on the CPU.
        pinned: Whether a GPU copies from and to the memory.
        what: Option that asks for the tier, named in messages.
        cpu_bytes: With "nvme", CPU memory of this rank that is filled before the files.

    Raises:
        ConfigError: On every rank, when the folder of one is missing or cannot be written to.
    """
    if name == "cpu":
        return HostTier(pinned=pinned)
    opened: list[DiskTier] = []
    error: Exception | None = None
    run: list[Any] = [f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(run, src=0, group=group)
    try:
        opened.append(_open_disk(path, run[0], dist.get_rank(), pinned, what))
    except (ConfigError, StorageError) as failure:
        error = failure
    try:
        raise_together(error, ConfigError, "Opening the nvme tier", group)
    except ConfigError:
        for tier in opened:
            tier.close()
        raise
    if not cpu_bytes:
        return opened[0]
    near = HostTier(pinned=pinned, block_bytes=opened[0].block_bytes)
    return SplitTier(near, opened[0], cpu_bytes)


def _open_disk(path: str | None, run: str, rank: int, pinned: bool, what: str) -> DiskTier:
    path = path or os.environ.get(PATH_VARIABLE)
    if not path:
        raise ConfigError(
            f'Expected a folder for swap files with {what}="nvme", got none: set nvme_path, or '
            f"the environment variable {PATH_VARIABLE}."
        )
    folder = SwapFolder(path, run, rank)
    tier = DiskTier(folder, Staging(pinned=pinned))
    if rank == 0:
        for notice in (folder.notice, tier.notice):
            if notice is not None:
                warnings.warn(notice, UserWarning, stacklevel=6)
    return tier
