"""Bytes of optimizer state outside the device, block by block as the optimizer cuts it.

The layout is the optimizer's own (`shardplug.optim.blocks`), on tensors without data, for one
optimizer with one group that has the parameters in the model's order. Other orders and further
groups cut blocks elsewhere, which changes what rounding adds: less than 4 KiB for each region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardplug.memory.curve import Setup
from shardplug.memory.layout import Layout
from shardplug.optim.blocks import Block, Entry, lay_out
from shardplug.tiers.host import HOST_BLOCK_BYTES
from shardplug.tiers.protocol import BLOCK_BYTES, aligned
from shardplug.tiers.staging import STAGING_BYTES

__all__ = ["TierSizes", "tier_sizes"]


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of one rank."""

    state: int
    """In the tier: each block's region for each key of the state, rounded up to 4 KiB."""

    near: int
    """What of it is in CPU memory: all with "cpu", with "nvme" what a budget has room for."""

    pinned: int
    """Host memory of `near` where it is pinned: torch rounds each region to a power of 2."""

    resident: int
    """State that stays in memory: the counters, and all of parameters with no dimension."""

    buffers: int
    """Host memory that files are moved through: one buffer a region up to the staging's limit. A
    first step makes them all; where state was loaded before it, there may be fewer."""

    scratch: int
    """Memory on the device for one block's gradients, kept from the first step on."""

    work: int
    """Memory on the device that a step needs for a moment, beyond the first one."""


def tier_sizes(layout: Layout, setup: Setup) -> TierSizes:
    """Lay the optimizer state of a rank out.

    Args:
        layout: The model's units.
        setup: Ranks, optimizer, and the tier.
    """
    tensors = setup.optimizer.tensors
    resident, entries = 0, []
    for plan in layout.parameters:
        if not plan.trainable:
            continue
        own = plan.own(setup.shards, setup.shard)
        alone = not plan.shape  # its state is single numbers, which stay where they are
        resident += (
            setup.optimizer.state_bytes(own, plan.master) if alone else setup.optimizer.counters
        )
        local = torch.empty(() if alone else (own,), dtype=plan.master, device="meta")
        keys = {} if alone else {str(key): plan.master for key in range(tensors)}
        entries.append(Entry(local, keys))
    on_disk = setup.state_tier == "nvme"
    blocks = lay_out(entries, BLOCK_BYTES if on_disk else HOST_BLOCK_BYTES)
    regions = [
        aligned(max(block.region_bytes(key), 1))  # an empty one has a place too
        for block in blocks
        for key in block.keys_without_region()
    ]
    near = _within(regions, setup) if on_disk else regions
    num_far = len(regions) - len(near)
    return TierSizes(
        state=sum(regions),
        near=sum(near),
        pinned=sum(_power_of_2(size) for size in near),
        resident=resident,
        buffers=min(num_far * BLOCK_BYTES, STAGING_BYTES) if on_disk else 0,
        scratch=_scratch(blocks) if on_disk else 0,
        work=_work(blocks, setup),
    )


def _within(regions: Sequence[int], setup: Setup) -> list[int]:
    """Choose the regions that a budget of CPU memory has room for, as `SplitTier` does."""
    room, chosen = setup.state_cpu_bytes, []
    for size in regions:
        cost = size if setup.device == "cpu" else _power_of_2(size)
        if cost <= room:
            room -= cost
            chosen.append(size)
    return chosen


def _power_of_2(size: int) -> int:
    return int(1 << (size - 1).bit_length())


def _bytes(block: Block) -> int:
    return sum(p.num_elements * p.entry.parameter.element_size() for p in block.pieces)


def _scratch(blocks: Sequence[Block]) -> int:
    """One buffer for each dtype, as large as its largest block."""
    largest: dict[torch.dtype, int] = {}
    for block in blocks:
        dtype = block.pieces[0].entry.parameter.dtype
        largest[dtype] = max(largest.get(dtype, 0), _bytes(block))
    return sum(largest.values())


def _work(blocks: Sequence[Block], setup: Setup) -> int:
    """What the update of one block needs, tensor by tensor, and on a GPU the state's copies."""
    optimizer = setup.optimizer
    pieces = [p for block in blocks for p in block.pieces]
    each = max((p.num_elements * p.entry.parameter.element_size() for p in pieces), default=0)
    found = 0 if optimizer.fused else optimizer.work * each
    if setup.device != "cpu":  # the block before is let go of when the next one is done
        largest = max((_bytes(block) for block in blocks), default=0)
        found += min(len(blocks), 2) * optimizer.tensors * largest
    return found
