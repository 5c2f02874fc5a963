"""Every stage and tier as a choice: what it holds where, whether it fits, how it compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from shardplug.config import Tier, ZeroConfig
from shardplug.core.stage import STAGES
from shardplug.errors import ConfigError
from shardplug.memory.costs import Machine, StepTime
from shardplug.memory.curve import Setup, Walk
from shardplug.memory.layout import Layout
from shardplug.memory.segments import Segments
from shardplug.memory.walk import walk

__all__ = ["Choice", "Room", "evaluate", "rank", "tiers_of"]

GIB = 2**30
_STAGING = 2  # units read ahead and written back at a time, by design of the tiers


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Memory that may be used, in GiB (2^30 bytes)."""

    device_gib: float
    """Memory of one device."""

    host_gib: float | None = None
    """Memory of one node; None leaves it unchecked."""

    nvme_gib: float | None = None
    """Room on one node's disks; None leaves it unchecked."""

    reserve_gib: float = 1.0
    """What is gone before the first tensor: the driver's context, the collectives' library."""

    slack_share: float = 0.05
    """Share of what comes and goes within a step that the caching allocator holds on top."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One setting and what it takes."""

    stage: Literal[1, 2, 3]
    offload_optimizer: Tier
    offload_params: Tier
    activation_checkpointing: bool
    walk: Walk
    """The predicted curve of one rank."""
    slack: int
    """Bytes that the caching allocator is taken to hold beside the tensors."""
    host: int
    """Bytes of host memory per node."""
    disk: int
    """Bytes on disk per node."""
    time: StepTime
    fits: bool
    over: int
    """Bytes by which it does not fit where it misses most, or 0."""
    unavailable: str
    """Why this version cannot run it, or nothing."""
    reason: str = ""
    """Why it is, or is not, the one to take."""

    @property
    def name(self) -> str:
        """The setting in a few words."""
        words = [f"zero{self.stage}"]
        if self.offload_params != "none":
            words = [f"zero{self.stage}_infinity"]
        elif self.offload_optimizer != "none":
            words = [f"zero{self.stage}_{self.offload_optimizer}"]
        return " ".join([*words, "checkpointing"] if self.activation_checkpointing else words)

    @property
    def device(self) -> int:
        """Peak bytes of one device, slack included."""
        return self.walk.peak.total + self.slack


def tiers_of(stage: int) -> Iterator[tuple[Tier, Tier]]:
    """Yield (optimizer, parameters): the tiers a stage is offered with."""
    yield "none", "none"
    yield "cpu", "none"
    if stage == 3:
        yield "nvme", "nvme"


def evaluate(
    layout: Layout,
    segments: Segments,
    setup: Setup,
    *,
    stage: int,
    tiers: tuple[Tier, Tier],
    checkpointing: bool,
    flops: int,
    room: Room,
    machine: Machine,
    devices: int,
    nodes: int,
) -> Choice:
    """Work one choice out.

    Args:
        layout: The model's units.
        segments: The trace with or without checkpointing.
        setup: Ranks, accumulation, optimizer; stage and tiers are filled in.
        stage: 1, 2 or 3.
        tiers: Where optimizer state and parameters live.
        checkpointing: Whether activations are recomputed.
        flops: Operations of one micro-batch.
        room: What may be used.
        machine: Speeds.
        devices: Devices of a node.
        nodes: Nodes.
    """
    optimizer, parameters = tiers
    setup = replace(
        setup,
        stage=STAGES[stage],
        state_away=optimizer != "none",
        masters_away=parameters != "none",
    )
    found = walk(layout, segments, setup)
    state, gradients, masters = _away(layout, setup)
    staging = _STAGING * _largest_unit(layout, setup)
    offloads = optimizer != "none"
    host = disk = 0
    host_traffic = disk_traffic = 0
    if offloads:
        # Gradients go out; the step reads state, gradients and masters, and writes all but those.
        step = 2 * state + 2 * gradients + 2 * masters
        host, host_traffic = state + gradients + staging, gradients + 2 * masters
        if optimizer == "nvme":
            host, disk = 2 * staging, state + gradients
            disk_traffic = step - 2 * masters
        if parameters == "nvme":
            disk += masters
            uses = setup.accumulate * (2 if stage == 3 else 1)
            disk_traffic += (uses + 2) * masters
    share = found.peak.held
    rests = ("master_shards", "optimizer_state", "buffers")
    passing = sum(n for kind, n in share.items() if kind not in rests)
    slack = int(room.slack_share * passing) if setup.device != "cpu" else 0
    host, disk = host * devices, disk * devices
    missing = [found.peak.total + slack - int((room.device_gib - room.reserve_gib) * GIB)]
    if room.host_gib is not None:
        missing.append(host - int(room.host_gib * GIB))
    if room.nvme_gib is not None:
        missing.append(disk - int(room.nvme_gib * GIB))
    time = StepTime.of(
        machine,
        flops=flops * setup.accumulate,
        moved=found.moved,
        host_bytes=host_traffic,
        disk_bytes=disk_traffic,
        crosses_nodes=setup.shards > devices,
        devices=devices,
    )
    return Choice(
        stage=cast(Literal[1, 2, 3], stage),
        offload_optimizer=optimizer,
        offload_params=parameters,
        activation_checkpointing=checkpointing,
        walk=found,
        slack=slack,
        host=host,
        disk=disk,
        time=time,
        fits=max(missing) <= 0,
        over=max(0, *missing),
        unavailable=_unavailable(stage, optimizer, parameters),
    )


def _away(layout: Layout, setup: Setup) -> tuple[int, int, int]:
    """Bytes of a rank's optimizer state, gradient shards and master shards."""
    trained = [p for p in layout.parameters if p.trainable]
    state = sum(
        setup.optimizer.state_bytes(p.own(setup.shards, setup.shard), p.master) for p in trained
    )
    gradients = sum(p.padded(setup.shards) * p.master.itemsize for p in trained)
    masters = sum(p.padded(setup.shards) * p.master.itemsize for p in layout.parameters)
    return state, gradients, masters


def _largest_unit(layout: Layout, setup: Setup) -> int:
    sizes = [
        sum(
            p.padded(setup.shards) * p.master.itemsize * (2 + setup.optimizer.tensors)
            for p in (layout.parameters[index] for index in unit.parameters)
        )
        for unit in layout.units
    ]
    return max(sizes, default=0)


def _unavailable(stage: int, optimizer: Tier, parameters: Tier) -> str:
    """Ask the configuration itself, so that a tier is offered as soon as it can be run."""
    uses_disk = "nvme" in (optimizer, parameters)
    try:
        ZeroConfig(
            stage=cast(Literal[1, 2, 3], stage),
            offload_optimizer=optimizer,
            offload_params=parameters,
            nvme_path="swap" if uses_disk else None,
        )
    except ConfigError:
        tier = "nvme" if uses_disk else optimizer
        return f'the "{tier}" tier is not available in this version'
    return ""


def rank(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Sort choices, the fastest that fits and can be run first, and say why for each."""

    def key(choice: Choice) -> tuple[bool, bool, float, int, int]:
        speed = choice.time.total if choice.fits else float(choice.over)
        return (
            not choice.fits,
            bool(choice.unavailable),
            round(speed, 9),
            choice.stage,
            choice.device,
        )

    ordered = sorted(choices, key=key)
    best = ordered[0] if ordered and ordered[0].fits and not ordered[0].unavailable else None
    return tuple(replace(choice, reason=_reason(choice, best)) for choice in ordered)


def _reason(choice: Choice, best: Choice | None) -> str:
    if choice is best:
        return "the fastest that fits"
    words = []
    if not choice.fits:
        words.append(f"{choice.over / GIB:.1f} GiB too much")
    elif best is not None:
        ratio = choice.time.total / best.time.total if best.time.total else 1.0
        more = choice.device / best.device
        if ratio > 1.005:
            words.append(f"a step takes {ratio:.2f} times as long")
        else:
            words.append(f"as fast, with {more:.2f} times the memory")
    else:
        words.append("would fit")
    if choice.unavailable:
        words.append(choice.unavailable)
    return "; ".join(words)
