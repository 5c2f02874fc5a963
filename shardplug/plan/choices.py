"""Every stage and tier as a choice: what it holds where, whether it fits, how it compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from shardplug.config import Tier, ZeroConfig
from shardplug.core.stage import STAGES
from shardplug.errors import ConfigError
from shardplug.plan.simulate import simulate_step
from shardplug.plan.sizes.layout import Layout
from shardplug.plan.sizes.tier_sizes import tier_sizes
from shardplug.plan.sizes.unit_sizes import unit_sizes
from shardplug.plan.step_time import Machine, StepTime
from shardplug.plan.timeline import RESIDENT_KINDS, MemoryTimeline, Setup
from shardplug.plan.trace.segments import Segments

__all__ = ["Choice", "MemoryBudget", "Setting", "evaluate", "gib", "rank", "tiers_of"]

GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What a plan chooses."""

    stage: Literal[1, 2, 3]
    offload_optimizer: Tier
    offload_params: Tier
    activation_checkpointing: bool
    offload_activations: Literal["none", "cpu"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Setting):
    """One setting and what it takes."""

    timeline: MemoryTimeline
    """The predicted curve of one rank."""
    slack: int
    """Bytes that the caching allocator is taken to hold beside the tensors."""
    host: int
    """Bytes of host memory per node; 0 on CPU ranks, where it is counted as the device's."""
    disk: int
    """Bytes of files per node."""
    time: StepTime
    fits: bool
    over: int
    """Bytes by which it does not fit where it misses most, or 0."""
    unavailable: str
    """Why this version cannot run it, or nothing."""
    short_of: str = ""
    """What `over` counts: nothing for the device's memory, else the node's memory or disks."""
    reason: str = ""
    """Why it is, or is not, the one to take."""

    @property
    def name(self) -> str:
        """The setting in a few words."""
        words = [f"zero{self.stage}"]
        if self.offload_params == "nvme":
            words = [f"zero{self.stage}_infinity"]
        elif self.offload_optimizer != "none":
            words = [f"zero{self.stage}_{self.offload_optimizer}"]
        if self.offload_params == "cpu":
            words.append("offload_params=cpu")
        words += ["checkpointing"] * self.activation_checkpointing
        words += ["activations_cpu"] * (self.offload_activations != "none")
        return " ".join(words)

    @property
    def misses_by(self) -> str:
        """How much there is too little of what it misses most, and of what."""
        size = f"{self.over / GIB:.1f} GiB"
        if self.over < GIB // 10:
            size = f"{max(self.over / 2**20, 0.1):.1f} MiB"
        return f"{size} {self.short_of}".rstrip()

    @property
    def device(self) -> int:
        """Peak bytes of one device, slack included."""
        return self.timeline.peak.total + self.slack


def tiers_of(stage: int) -> Iterator[tuple[Tier, Tier]]:
    """Yield (optimizer, parameters): the tiers a stage is offered with."""
    yield "none", "none"
    yield "cpu", "none"
    yield "nvme", "none"
    if stage == 3:
        yield "cpu", "cpu"
        yield "nvme", "cpu"
        yield "nvme", "nvme"


def evaluate(
    layout: Layout,
    segments: Segments,
    setup: Setup,
    setting: Setting,
    *,
    flops: int,
    room: MemoryBudget,
    machine: Machine,
    devices: int,
) -> Choice:
    """Work out what a setting takes.

    Args:
        layout: The model's units.
        segments: The trace with the setting's checkpointing and place of activations.
        setup: Ranks, accumulation, optimizer; stage and tiers are filled in.
        setting: The setting.
        flops: Operations of one micro-batch.
        room: What may be used.
        machine: Speeds.
        devices: Devices of a node.
    """
    setup = replace(
        setup,
        stage=STAGES[setting.stage],
        state_tier=setting.offload_optimizer,
        params_tier=setting.offload_params,
    )
    found = simulate_step(layout, segments, setup)
    on_gpu = setup.device != "cpu"
    host, disk, host_traffic, disk_traffic = _outside(layout, setup)
    slack = int(room.slack_share * _passing(found)) if on_gpu else 0
    host, disk = (host + found.activations_host) * devices, disk * devices
    missing = {"": found.peak.total + slack - int((room.device_gib - room.reserve_gib) * GIB)}
    if room.host_gib is not None:
        missing["of a node's memory"] = host - int(room.host_gib * GIB)
    if room.nvme_gib is not None:
        missing["of a node's disks"] = disk - int(room.nvme_gib * GIB)
    short_of, over = max(missing.items(), key=lambda each: each[1])
    time = StepTime.of(
        machine,
        flops=flops * setup.accumulate,
        moved=found.moved,
        host_bytes=host_traffic,
        disk_bytes=disk_traffic,
        crosses_nodes=setup.shards > devices,
        devices=devices,
        activation_bytes=2 * found.activations_out * on_gpu,
    )
    return Choice(
        **{field.name: getattr(setting, field.name) for field in fields(Setting)},
        timeline=found,
        slack=slack,
        host=host,
        disk=disk,
        time=time,
        fits=over <= 0,
        over=max(0, over),
        short_of=short_of if over > 0 else "",
        unavailable=_unavailable(setting),
    )


def _passing(found: MemoryTimeline) -> int:
    """Bytes at the peak that come and go within a step."""
    rests = (
        "master_shards",
        "optimizer_state",
        *(kind for kind in RESIDENT_KINDS if kind.endswith("_cpu")),
        "staging",
        "buffers",
    )
    return sum(n for kind, n in found.peak.held.items() if kind not in rests)


def _outside(layout: Layout, setup: Setup) -> tuple[int, int, int, int]:
    """Bytes of one rank outside the device, and moved in a step: host, disk, host, disk."""
    if setup.state_tier == "none":
        return 0, 0, 0, 0
    sizes, on_gpu = tier_sizes(layout, setup), setup.device != "cpu"
    on_disk = setup.state_tier == "nvme"
    host = sizes.buffers + sizes.pinned
    disk = sizes.files - sizes.near if on_disk else 0
    # All of the state comes and goes back in each step.
    far = sizes.state - sizes.near if on_disk else 0
    host_traffic, disk_traffic = 2 * sizes.state, 2 * far
    if setup.masters_on_host:
        host += sizes.beside + sizes.resident + sizes.scratch + sizes.work
        units = [unit_sizes(layout, n, setup) for n in range(len(layout.units))]
        weights = sum(unit.masters for unit in units)
        trained = sum(unit.master_trained for unit in units)
        # Each gather takes the masters to the device, where they are cast; each reduction brings
        # gradients back. The step goes through state, weights and gradients in the host's memory.
        gathers = setup.accumulate * (1 + setup.stage.reshard_after_forward)
        host_traffic += gathers * weights + setup.accumulate * trained + 3 * trained
    if setup.params_on_nvme:
        read = sum(unit_sizes(layout, n, setup).read for n in range(len(layout.units)))
        host += (setup.prefetch + 1) * max(
            (unit_sizes(layout, n, setup).read for n in range(len(layout.units))), default=0
        )
        gathers = setup.accumulate * (1 + setup.stage.reshard_after_forward) * read
        # Gradients are written by each micro-batch and read by all but the first and by the step,
        # which reads the weights, and writes them and the copies.
        moved = 2 * setup.accumulate * sizes.gradients + 2 * sizes.masters + sizes.copies
        host_traffic += gathers + moved
        disk_traffic += gathers + moved
    return host * on_gpu, disk, host_traffic * on_gpu, disk_traffic


def _unavailable(setting: Setting) -> str:
    """Ask the configuration itself, so that a tier is offered as soon as it can be run."""
    uses_disk = "nvme" in (setting.offload_optimizer, setting.offload_params)
    try:
        ZeroConfig(
            stage=setting.stage,
            offload_optimizer=setting.offload_optimizer,
            offload_params=setting.offload_params,
            nvme_path="swap" if uses_disk else None,
        )
    except ConfigError:
        if setting.offload_params != "none":
            return "parameters cannot leave the device in this version"
        return f'offload_optimizer="{setting.offload_optimizer}" is not available in this version'
    return ""


_AS_FAST = 1.005
"""Steps whose predicted times differ by less are as fast as each other."""


def rank(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Sort choices, the fastest that fits and can be run first, and say why for each.

    Of those that are as fast as the fastest the plainest comes first: without offloading and
    recomputation, then the lower stage.
    """
    runs = [c.time.total for c in choices if c.fits and not c.unavailable]
    fastest = min(runs, default=0.0)

    def key(choice: Choice) -> tuple[bool, bool, float, int, bool, int, int]:
        speed = choice.time.total if choice.fits else float(choice.over)
        if choice.fits and speed <= _AS_FAST * fastest:
            speed = fastest
        places = (choice.offload_optimizer, choice.offload_params, choice.offload_activations)
        return (
            not choice.fits,
            bool(choice.unavailable),
            round(speed, 9),
            sum(place != "none" for place in places),
            choice.activation_checkpointing,
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
        words.append(f"{choice.misses_by} too much")
    elif best is not None:
        ratio = choice.time.total / best.time.total if best.time.total else 1.0
        more = choice.device / best.device
        if ratio > _AS_FAST:
            words.append(f"a step takes {ratio:.2f} times as long")
        else:
            words.append(f"as fast, with {more:.2f} times the memory")
    else:
        words.append("would fit")
    if choice.unavailable:
        words.append(choice.unavailable)
    return "; ".join(words)


def gib(size: int) -> str:
    """Write a number of bytes in GiB, or in MiB where it is small."""
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
