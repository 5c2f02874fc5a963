"""What the reader of a plan should know, and what would fit where nothing does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardplug.plan.choices import GIB, Choice, evaluate
from shardplug.plan.request import Request
from shardplug.plan.sizes.optimizer_kinds import fused_kind
from shardplug.plan.step_time import Machine
from shardplug.plan.trace.segments import Segments
from shardplug.plan.trace_cache import TraceCache

__all__ = ["advice", "notes"]


def notes(request: Request, work: TraceCache, choices: Sequence[Choice]) -> Iterable[str]:
    if work.failure:
        yield (
            "The model could not be traced, so activations are a formula's and may be off by a "
            f"factor of 2 ({work.failure})."
        )
    if not work.settings.keep_outputs:
        yield (
            "The model's outputs are taken to go before the backward; a loop that keeps them "
            "holds the logits longer (keep_outputs)."
        )
    if work.failure and any(choice.offload_activations != "none" for choice in choices):
        yield "Nothing is known of what offload_activations would move."
    unchecked = []
    if request.room.host_gib is None and any(choice.host for choice in choices):
        unchecked.append("host memory")
    if request.room.nvme_gib is None and any(choice.disk for choice in choices):
        unchecked.append("room on disks")
    if unchecked:
        yield (
            f"State outside the device is not checked against {' and '.join(unchecked)}, which "
            "were not given (host_memory_gib, nvme_gib)."
        )
    if request.device == "cpu":
        yield (
            "On CPU ranks the device is CPU memory: state in CPU memory is counted there and saves "
            "nothing; state in files does."
        )
    if request.device == "cuda":
        yield (
            f"{request.room.reserve_gib:g} GiB of each device are set aside for the driver and the "
            f"collectives, and {request.room.slack_share:.0%} of what comes and goes in a step for "
            "the caching allocator."
        )


def advice(
    request: Request,
    work: TraceCache,
    ranked: Sequence[Choice],
    pieces: Mapping[tuple[bool, bool], Segments],
    machine: Machine,
) -> Iterable[str]:
    """Say what would fit, the least change first."""
    usable = [choice for choice in ranked if not choice.unavailable]
    if not usable:
        return
    least = min(usable, key=lambda choice: (choice.over, choice.device))
    need = f"{least.device / GIB + request.room.reserve_gib:.1f} GiB per device"
    for size, where in ((least.host, "memory"), (least.disk, "disks")):
        need += f", {size / GIB:.1f} GiB of a node's {where}" if size else ""
    yield (
        f"The least that this version can do is {least.name}: {need}; it misses by "
        f"{least.misses_by}."
    )
    tiered = next((c for c in ranked if c.fits and c.unavailable), None)
    if tiered is not None:
        yield f"{tiered.name} would fit: {tiered.unavailable}."
    work_bytes = least.timeline.peak.held["optimizer_work"]
    fused = fused_kind(work.setup.optimizer)
    if work_bytes > GIB // 10 and fused is not None:
        yield (
            f"The optimizer's step needs {work_bytes / GIB:.1f} GiB for a moment: a fused one "
            f"(fused=True in the optimizer; plan with --optimizer {fused.name}) "
            "does without."
        )
    if request.micro_batch > 1:
        yield f"A smaller micro-batch than {request.micro_batch} holds less; accumulate instead."
    nodes, found = _more_nodes(request, work, least, pieces, machine)
    if found.fits:
        yield f"{nodes * request.devices} devices of this size would do, with {least.name}."
    elif found.short_of:
        yield f"More nodes do not help: {nodes} of them miss {found.misses_by}."
    else:
        yield "More devices do not help: a shorter sequence would, or devices with more memory."


def _more_nodes(
    request: Request,
    work: TraceCache,
    least: Choice,
    pieces: Mapping[tuple[bool, bool], Segments],
    machine: Machine,
) -> tuple[int, Choice]:
    """Double the nodes until the smallest choice fits; where none do, the last that was tried."""
    nodes, found = request.nodes, least
    for _ in range(8):
        nodes *= 2
        setup = replace(work.setup, shards=work.setup.shards * nodes // request.nodes)
        found = evaluate(
            work.placed.layout,
            pieces[least.activation_checkpointing, least.offload_activations != "none"],
            setup,
            least,
            flops=0,
            room=request.room,
            machine=machine,
            devices=request.devices,
        )
        if found.fits:
            break
    return nodes, found
