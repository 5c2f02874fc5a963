"""Bytes of optimizer state outside the device, block by block as the optimizer cuts it.

The layout is the optimizer's own (`shardplug.optim.blocks`), on tensors without data, for one
optimizer with one group that has the parameters in the model's order. Other orders and further
groups cut blocks elsewhere, which changes what rounding adds: less than 4 KiB for each region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardplug.optim.blocks import Block, Entry, lay_out
from shardplug.plan.sizes.layout import Layout
from shardplug.plan.timeline import Setup
from shardplug.tiers.host import HOST_BLOCK_BYTES
from shardplug.tiers.protocol import BLOCK_BYTES, aligned
from shardplug.tiers.staging import STAGING_BYTES

__all__ = ["TierSizes", "tier_sizes"]

_CUT = 4096  # elements: parameters in files are cut at multiples of it
_WIDTH = 4  # bytes that an element of a piece in files is taken to have at least


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of one rank."""

    state: int
    """In the tier: each block's region for each key of the state, rounded up to 4 KiB."""

    near: int
    """What of it is in CPU memory: all with "cpu", with "nvme" what a budget has room for."""

    pinned: int
    """Host memory of `near` where it is pinned: torch rounds each region to a power of 2."""

    beside: int
    """The same of master shards and reduced gradients, where they are in a GPU's host's memory."""

    resident: int
    """State that stays in memory: the counters, and all of parameters with no dimension."""

    buffers: int
    """Host memory that files are moved through: one buffer a region up to the staging's limit. A
    first step makes them all; where state was loaded before it, there may be fewer."""

    scratch: int
    """Memory where the weights are, for one block's gradients, kept from the first step on."""

    work: int
    """Memory where the weights are that a step needs for a moment, beyond the first one."""

    masters: int = 0
    """Parameters in files: each piece's region, rounded up to 4 KiB."""

    copies: int = 0
    """The same in the dtype of the computation, of trained ones whose masters have another."""

    gradients: int = 0
    """Reduced gradients in files."""

    @property
    def files(self) -> int:
        """Bytes of the swap file, where state is in files."""
        return self.state + self.masters + self.copies + self.gradients


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
    blocks = lay_out(entries, _block_bytes(layout, setup))
    masters, copies, gradients = _parameter_regions(layout, setup)
    passing = len(masters) + len(copies) + len(gradients)
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
        beside=_shards_on_host(layout, setup),
        resident=resident,
        buffers=min((num_far + passing) * BLOCK_BYTES, STAGING_BYTES) if on_disk else 0,
        scratch=_scratch(blocks, setup) if on_disk else 0,
        work=_work(blocks, setup),
        masters=sum(masters),
        copies=sum(copies),
        gradients=sum(gradients),
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


def _shards_on_host(layout: Layout, setup: Setup) -> int:
    """Each parameter's shard is pinned by itself, and each gradient as it comes."""
    found = 0
    for plan in layout.parameters if setup.masters_on_host else ():
        if plan.sharded:
            size = plan.padded(setup.shards) * plan.master.itemsize
            found += _power_of_2(max(size, 1)) * (2 if plan.trainable else 1)
    return found


def _power_of_2(size: int) -> int:
    return int(1 << (size - 1).bit_length())


def _bytes(block: Block) -> int:
    return sum(p.num_elements * p.entry.parameter.element_size() for p in block.pieces)


def _block_bytes(layout: Layout, setup: Setup) -> int:
    if setup.state_tier != "nvme":
        return HOST_BLOCK_BYTES
    width = min((p.master.itemsize for p in layout.parameters if p.trainable), default=_WIDTH)
    # State beside weights in files is cut as they are, as if elements had 4 bytes or more.
    return BLOCK_BYTES * width // max(width, _WIDTH) if setup.params_on_nvme else BLOCK_BYTES


def _parameter_regions(layout: Layout, setup: Setup) -> tuple[list[int], list[int], list[int]]:
    """Regions of masters, of copies to compute with, and of gradients."""
    masters, copies, gradients = list[int](), list[int](), list[int]()
    for plan in layout.parameters if setup.params_on_nvme else ():
        if not plan.sharded:
            continue
        own = plan.own(setup.shards, setup.shard)
        most = BLOCK_BYTES // max(plan.master.itemsize, _WIDTH) // _CUT * _CUT
        pieces = [min(most, own - low) for low in range(0, own, most)]
        masters += [aligned(n * plan.master.itemsize) for n in pieces]
        if plan.trainable:
            gradients += [aligned(n * plan.master.itemsize) for n in pieces]
            if plan.compute != plan.master:
                copies += [aligned(n * plan.compute.itemsize) for n in pieces]
    return masters, copies, gradients


def _scratch(blocks: Sequence[Block], setup: Setup) -> int:
    """Buffers for each dtype, as large as its largest block: gradients, and weights from files."""
    largest: dict[tuple[torch.dtype, bool], int] = {}
    for block in blocks:
        parameter = block.pieces[0].entry.parameter
        kind = parameter.dtype, bool(parameter.shape) and setup.params_on_nvme
        largest[kind] = max(largest.get(kind, 0), _bytes(block))
    return sum(size * (2 if away else 1) for (_, away), size in largest.items())


def _work(blocks: Sequence[Block], setup: Setup) -> int:
    """What the update of one block needs, tensor by tensor, and on a GPU the state's copies."""
    optimizer = setup.optimizer
    pieces = [p for block in blocks for p in block.pieces]
    each = max((p.num_elements * p.entry.parameter.element_size() for p in pieces), default=0)
    found = 0 if optimizer.fused else optimizer.work * each
    if (
        setup.device != "cpu" and not setup.masters_on_host
    ):  # the block before is let go of when the next one is done
        largest = max((_bytes(block) for block in blocks), default=0)
        found += min(len(blocks), 2) * optimizer.tensors * largest
    return found
