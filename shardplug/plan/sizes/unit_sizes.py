"""Bytes of each unit under a setup: at rest, gathered, and in the buffers around it."""

from __future__ import annotations

from dataclasses import dataclass

from shardplug.plan.sizes.layout import Layout
from shardplug.plan.timeline import Setup
from shardplug.tiers.protocol import aligned

__all__ = ["UnitSizes", "master_width", "unit_sizes"]


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of one unit."""

    masters: int
    master_trained: int
    gathered: int
    cast: int
    """The flat copy in the computation's dtype that a gather starts from, on the device."""
    lifted: int
    """The largest master shard that comes from the host's memory for a moment, to be cast."""
    read: int
    """Memory that the unit's padded shards are read into where they rest in files."""
    each: tuple[tuple[int, int], ...]
    """(cast, gathered) of each parameter, on one rank."""
    reduce_input: int
    reduce_width: int
    master_width: int


def master_width(layout: Layout, parameter: int) -> int:
    """Bytes of one element of a parameter at rest."""
    return layout.parameters[parameter].master.itemsize


def unit_sizes(layout: Layout, number: int, setup: Setup) -> UnitSizes:
    """Work out one unit's sizes."""
    shards = setup.shards
    plans = [layout.parameters[index] for index in layout.units[number].parameters]
    shard = [(plan, plan.padded(shards)) for plan in plans]
    trained = [(plan, n) for plan, n in shard if plan.trainable]
    reduce = layout.reduce or (trained[0][0].compute if trained else None)
    return UnitSizes(
        masters=sum(n * plan.master.itemsize for plan, n in shard),
        master_trained=sum(n * plan.master.itemsize for plan, n in trained),
        gathered=sum(n * shards * plan.compute.itemsize for plan, n in shard),
        cast=sum(
            n * plan.compute.itemsize
            for plan, n in shard
            if plan.compute != plan.master or setup.masters_on_host
        ),
        lifted=max(
            (n * plan.master.itemsize for plan, n in shard if plan.compute != plan.master),
            default=0,
        )
        if setup.masters_on_host
        else 0,
        read=sum(aligned(max(n, 1) * plan.compute.itemsize) for plan, n in shard),
        each=tuple(
            (
                n * plan.compute.itemsize
                if plan.compute != plan.master or setup.masters_on_host
                else 0,
                n * plan.compute.itemsize,
            )
            for plan, n in shard
        ),
        reduce_input=sum(n * shards for _, n in trained) * (reduce.itemsize if reduce else 0),
        reduce_width=reduce.itemsize if reduce else 1,
        master_width=trained[0][0].master.itemsize if trained else 1,
    )
