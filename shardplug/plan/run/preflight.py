"""What state outside the device will take, said before it is made."""

from __future__ import annotations

import logging
import os
import weakref

import torch

from shardplug._messages import hide_messages, show_messages
from shardplug.core._torch.tensors import local_tensor
from shardplug.core.ranks.threads import warn_of_cores
from shardplug.engine.engine import ZeroEngine
from shardplug.engine.listener import EngineListener
from shardplug.optim.blocks import Entry, lay_out
from shardplug.plan.choices import GIB
from shardplug.plan.sizes.optimizer_probe import likely_kind
from shardplug.process.limits import host_available
from shardplug.tiers.host import HOST_BLOCK_BYTES
from shardplug.tiers.protocol import BLOCK_BYTES, aligned

__all__ = ["StartupReport", "announce_state", "state_bytes"]

_LOG = logging.getLogger("shardplug")


_reporting: weakref.WeakSet[StartupReport] = weakref.WeakSet()
"""Those of engines that are open."""


class StartupReport(EngineListener):
    """Says at the start what offloaded state will take, and warns where ranks share cores."""

    def __init__(self) -> None:
        self._engine: weakref.ref[ZeroEngine] | None = None

    def opened(self, engine: ZeroEngine) -> None:
        """Show messages where logging is not configured; warn of cores, where the CPU computes."""
        self._engine = weakref.ref(engine)
        _reporting.add(self)
        show_messages()
        if engine.config.offload_optimizer != "none" or engine.device.type == "cpu":
            warn_of_cores(os.environ)

    def closed(self) -> None:
        """With the last engine, show messages no more."""
        _reporting.discard(self)
        if not _reporting:
            hide_messages()

    def optimizer_bound(self, optimizer: torch.optim.Optimizer) -> None:
        """Say what its state will take of a tier."""
        engine = None if self._engine is None else self._engine()
        if engine is not None and engine.config.offload_optimizer != "none":
            announce_state(engine, optimizer, engine.config.offload_optimizer)


def state_bytes(optimizer: torch.optim.Optimizer, tier: str, *, pinned: bool) -> int:
    """Return the bytes that an optimizer's state will take of a tier on this rank.

    Args:
        optimizer: An optimizer over sharded parameters, without state yet.
        tier: "cpu" or "nvme".
        pinned: Whether host memory is pinned, which torch rounds up to powers of 2.
    """
    tensors = likely_kind(optimizer).tensors
    entries = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not parameter.requires_grad or not parameter.ndim:
                continue
            shard = local_tensor(parameter)
            local = torch.empty(shard.shape, dtype=shard.dtype, device="meta")
            entries.append(Entry(local, {str(key): shard.dtype for key in range(tensors)}))
    blocks = lay_out(entries, BLOCK_BYTES if tier == "nvme" else HOST_BLOCK_BYTES)
    regions = [
        aligned(max(block.region_bytes(key), 1))
        for block in blocks
        for key in block.keys_without_region()
    ]
    if pinned and tier == "cpu":
        regions = [1 << (size - 1).bit_length() for size in regions]
    return sum(regions)


def announce_state(engine: ZeroEngine, optimizer: torch.optim.Optimizer, tier: str) -> None:
    """Log once, on rank 0, what the state will take of this node.

    Args:
        engine: The engine; rank 0 has the largest shards.
        optimizer: The optimizer that is being prepared.
        tier: "cpu" or "nvme".
    """
    if engine.rank != 0:
        return
    local = min(engine.world_size, int(os.environ.get("LOCAL_WORLD_SIZE", engine.world_size)))
    size = local * state_bytes(optimizer, tier, pinned=engine.device.type != "cpu")
    place = "in files" if tier == "nvme" else "in CPU memory"
    words = f"optimizer state {place}: about {size / GIB:.3g} GiB ({size} bytes) on "
    words += f"this node, of {local} ranks"
    available = host_available()
    if tier == "cpu" and available is not None:
        words += f"; {available / GIB:.3g} GiB of its memory are available"
        if size > available:
            words += '. That is too little: use offload_optimizer="nvme", or more nodes'
    if engine.config.offload_params == "nvme":
        states = engine.memory()
        beside = local * (2 * states["master_shards_nvme"] + states["compute_copies_nvme"])
        words += f"; parameters and gradients in files: about {beside / GIB:.3g} GiB"
    _LOG.info(words)
