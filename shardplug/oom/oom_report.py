"""An out-of-memory error that explains itself: what was held, where, and what to change."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from shardplug.errors import StorageError
from shardplug.oom.remedies import Remedy, in_words
from shardplug.plan.choices import Choice, gib
from shardplug.plan.timeline import RESIDENT_KINDS, Point
from shardplug.process.overhead import Used

__all__ = ["OutOfMemory", "is_out_of_memory", "oom_report", "place_of"]

_OTHER = "everything else"
_SETTING_UP = "the set-up of the shards"
_SET_UP_REMEDIES = (
    'a model built without weights (with torch.device("meta"), or shardplug.hf.from_pretrained): '
    "each unit gets its values just before it is sharded",
    "more devices: each holds a smaller share",
    'stage=3 with offload_params="nvme" and offload_optimizer="nvme": each unit leaves memory as '
    "soon as it is sharded",
)
_OF_MEMORY = ("in CPU memory", "for a staging buffer", os.strerror(errno.ENOMEM))
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_REMEDIES = {
    _OTHER: (
        "activation_checkpointing=True: activations are computed again in the backward, which "
        "takes about a third more time",
        'offload_activations="cpu" on a GPU: activations wait for the backward in CPU memory',
        "a smaller micro-batch with more accumulation: the same bytes are moved more often",
    ),
    "gathered": ("stage=3: units are gathered one by one, and once more in the backward",),
    "gradients": ("stage=2 instead of 1 where gradients accumulate: they are reduced each time",),
    "optimizer_state": (
        'offload_optimizer="nvme", or on a GPU "cpu": the state leaves the device, and each step '
        "waits for it",
        "more devices: each holds a smaller share",
    ),
    "optimizer_state_cpu": ('offload_optimizer="nvme": the state is in files',),
    "optimizer_state_nvme": ("another nvme_path, or files removed from this one",),
    "master_shards": ("more devices: each holds a smaller share",),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there was no room on a device or on the host.

    A full drive is another thing, which its own error says all about.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    if isinstance(error, StorageError):
        return any(words in text for words in _OF_MEMORY)
    text = text.lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )


@dataclass(kw_only=True)
class OutOfMemory:
    """What is known of one failure; sizes in bytes."""

    error: BaseException | None
    """None where a limit is near and nothing has failed."""
    rank: int
    phase: str
    """What the rank was doing, for example "the forward"."""
    module: str = ""
    """Module whose code was running, or nothing."""
    gathered: list[str] = field(default_factory=list)
    """Units that were whole."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Model states by kind, the engine's accounting: those in the memory that ran out."""
    elsewhere: Mapping[str, int] = field(default_factory=dict)
    """The others: in files, and on a GPU in the host's memory."""
    total: int | None = None
    """All that the device's allocator or the process held for training, where that is known."""
    limit: str = ""
    """Which limit, in words."""
    used: Used | None = None
    """On CPU ranks: what the limit counts."""
    overhead: int | None = None
    """On CPU ranks: what the process holds besides the plan, for any setting."""
    running: Choice | None = None
    """The choice of a plan that runs."""
    remedies: list[Remedy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the reader should know about the figures."""

    @property
    def requested(self) -> int:
        """Bytes that could not be allocated, as the error says, or 0."""
        pattern = r"(?:[Tt]ried to allocate|room for) (\d+(?:\.\d+)?) (bytes|[KMGT]iB)"
        found = re.search(pattern, str(self.error))
        return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0

    @property
    def planned_here(self) -> Point | None:
        """What the plan says of the moment: the unit of the module that ran, or the phase."""
        inside, points = self._planned_points()
        return max(inside or points, key=lambda point: point.total, default=None)

    @property
    def beyond_states(self) -> int:
        """The least that the plan has at this moment besides model states, without what failed."""
        inside, points = self._planned_points()
        most = max(map(_beyond, inside or points), default=0)
        # Where the module is known, it may have failed as it began.
        least = min(map(_beyond, inside), default=most)
        return max(0, min(least, most - self.requested))

    def _planned_points(self) -> tuple[list[Point], list[Point]]:
        """Points of the plan in the unit of the module that ran, and in the phase."""
        if self.running is None:
            return [], []
        short = {"the forward": "forward", "the backward": "backward"}.get(self.phase, "step")
        points = [point for point in self.running.timeline.points if point.phase == short]
        inside = [
            point
            for point in points
            if point.unit and (self.module + ".").startswith(point.unit + ".")
        ]
        return inside, points

    def rows(self) -> list[tuple[str, int | None, int | None, int | None]]:
        """Return (kind, held, planned at this moment, planned at the peak), the largest first."""
        here = self.planned_here.held if self.planned_here is not None else {}
        peak = self.running.timeline.peak.held if self.running is not None else {}
        kinds: dict[str, int | None] = dict.fromkeys([*self.held, *peak])
        kinds.update(self.held)
        if self.total is not None:
            kinds[_OTHER] = max(0, self.total - sum(self.held.values()))
        rows = [(kind, size, here.get(kind), peak.get(kind)) for kind, size in kinds.items()]
        return sorted((row for row in rows if any(row[1:])), key=_size, reverse=True)

    @property
    def largest(self) -> str:
        """The kind that is largest, held or at the planned peak; "" where nothing is known."""
        if isinstance(self.error, StorageError) and self.elsewhere:
            return max(self.elsewhere, key=lambda kind: self.elsewhere[kind])
        rows = self.rows()
        if self.running is not None:  # the plan says what everything else is
            rows = [row for row in rows if row[0] != _OTHER]
        return rows[0][0] if rows else ""


def _beyond(point: Point) -> int:
    """Bytes of what the engine does not account for."""
    return point.total - sum(point.held[kind] for kind in RESIDENT_KINDS)


def _size(row: tuple[str, int | None, int | None, int | None]) -> int:
    """How large a kind counts: at the planned peak, unless clearly more was held before it."""
    held, here, peak = (size or 0 for size in row[1:])
    return held if held > 1.1 * peak else max(peak, 0 if peak else here)


def oom_report(failure: OutOfMemory) -> str:
    """Write the report of an out-of-memory error.

    Args:
        failure: What is known of it.
    """
    where = f" in {failure.module}" if failure.module else ""
    if failure.error is None:
        lines = [f"shardplug: rank {failure.rank} is close to running out of memory."]
    else:
        text = str(failure.error).partition(chr(10))[0]
        lines = [
            f"shardplug: rank {failure.rank} ran out of memory during {failure.phase}{where}.",
            f"  {type(failure.error).__name__}: {text}",
        ]
    if failure.limit:
        lines.append(f"  limit: {failure.limit}")
    names = failure.gathered
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    lines.append(f"  whole units: {', '.join(n or 'the root' for n in names[:4]) or 'none'}{more}")
    lines += _table(failure)
    largest = failure.largest
    lines.append(f"  the largest kind is {largest or 'unknown'}. What frees most:")
    lines += _advice(failure, largest)
    lines += [f"  ({note})" for note in failure.notes]
    return "\n".join(lines)


def _table(failure: OutOfMemory) -> Iterator[str]:
    planned = failure.running is not None
    heads = ["held", *(["planned here", "planned at the peak"] if planned else [])]
    yield "  " + f"{'':24s}" + "".join(f"{head:>21s}" for head in heads)
    for kind, *sizes in failure.rows():
        cells = ["" if size is None else gib(size) for size in (sizes if planned else sizes[:1])]
        yield "  " + f"{kind:24s}" + "".join(f"{cell:>21s}" for cell in cells)
    if failure.total is not None or planned:
        here, sums = failure.planned_here, ["" if failure.total is None else gib(failure.total)]
        if failure.running is not None:
            sums += ["" if here is None else gib(here.total), gib(failure.running.device)]
        yield "  " + f"{'all':24s}" + "".join(f"{cell:>21s}" for cell in sums)
    if failure.requested:
        yield f"  asked for when it failed: {gib(failure.requested)}"
    if failure.overhead is not None:
        yield (
            f"  besides the plan: {gib(failure.overhead)} (the interpreter, libraries, "
            "collectives and the like), which every setting below has to live with"
        )
    if failure.used is not None and failure.used.kept:
        yield f"  freed, and kept by the C allocator: {gib(failure.used.kept)}"
    for kind, size in failure.elsewhere.items():
        yield f"  elsewhere: {kind} {gib(size)}"
    if failure.running is not None:
        peak = failure.running.timeline.peak
        place = " ".join(part for part in (peak.phase, peak.unit) if part)
        yield f"  the planned peak is in: {place}"


def _advice(failure: OutOfMemory, largest: str) -> Iterator[str]:
    for number, remedy in enumerate(failure.remedies, 1):
        yield f"  {number}. {in_words(remedy)}"
        yield from (f"       {line}" for line in remedy.lines)
    if failure.remedies:
        return
    order = [largest, *(kind for kind, *_ in failure.rows())]
    found = dict.fromkeys(line for kind in order for line in _REMEDIES.get(kind, ()))
    if failure.phase == _SETTING_UP:
        found = dict.fromkeys(_SET_UP_REMEDIES)
    if not found:
        yield "  more devices, or a smaller micro-batch"
    yield from (f"  {number}. {line}" for number, line in enumerate(list(found)[:3], 1))


def place_of(trace: TracebackType | None, models: list[nn.Module]) -> tuple[str, str]:
    """Read the phase, and the innermost module whose code was running, from a traceback."""
    names = {module: name for model in models for name, module in model.named_modules()}
    phase, found = "", ""
    while trace is not None:
        code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_name == "shard_model":
            phase = phase or _SETTING_UP
        elif code.co_name == "backward" and "autograd" in Path(code.co_filename).parts:
            phase = phase or "the backward"
        elif isinstance(owner, torch.optim.Optimizer):
            phase = phase or "the optimizer's step"
        elif isinstance(owner, nn.Module) and owner in names:
            phase = phase or "the forward"
            found = names[owner] or type(owner).__name__
        trace = trace.tb_next
    return phase or "training", found
