"""An out-of-memory error that explains itself: what was held, where, and what to change."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch
from torch import nn

from shardplug.core._torch import gathered_units
from shardplug.memory.choices import GIB, Choice
from shardplug.memory.meter import read_total
from shardplug.memory.plan import Plan
from shardplug.memory.report import lightning_line
from shardplug.memory.row import BOOK_KINDS

__all__ = ["explained_oom", "is_out_of_memory", "oom_report"]

_REMEDIES = {
    "activations and other": (
        "activation_checkpointing=True: activations are computed again in the backward, which "
        "takes about a third more time",
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
    "master_shards": ("more devices: each holds a smaller share",),
}


class HeldEngine(Protocol):
    """The part of `shardplug.ZeroEngine` that a report needs."""

    @property
    def device(self) -> torch.device:
        """Device of the model."""

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def models(self) -> list[nn.Module]:
        """The sharded models."""

    def memory(self) -> dict[str, int]:
        """Bytes held on this rank, by kind."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        "out of memory" in text or "can't allocate memory" in text
    )


@contextmanager
def explained_oom(
    engine: HeldEngine,
    folder: str | os.PathLike[str] = ".",
    *,
    plan: Plan | None = None,
    running: Choice | None = None,
) -> Iterator[None]:
    """Explain an out-of-memory error of the training inside, and let it through.

        with explained_oom(engine, "runs", plan=found, running=found.best):
            train()

    The report goes into `out_of_memory.txt` of the folder, and to stderr: once, from the first
    rank that runs out, where the ranks share the folder. A process that the system kills for its
    memory (a cgroup's limit) raises nothing, so there is no report.

    Args:
        engine: The engine.
        folder: Folder of the report.
        plan: What was planned, for settings that free memory, with their cost.
        running: The choice of the plan that runs.
    """
    path = Path(folder) / "out_of_memory.txt"
    if engine.rank == 0:
        path.unlink(missing_ok=True)
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            _publish(engine, error, path, plan, running)
        raise


def _publish(
    engine: HeldEngine,
    error: BaseException,
    path: Path,
    plan: Plan | None,
    running: Choice | None,
) -> None:
    held = _on_the_device(engine)
    phase, module = _place(error.__traceback__, engine.models)
    names = [name for model in engine.models for name in gathered_units(model)]
    text = oom_report(
        error,
        rank=engine.rank,
        phase=phase,
        module=module,
        gathered=names,
        held=held,
        total=read_total(engine.device),
        plan=plan,
        running=running,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text + "\n" + "".join(traceback.format_exception(error)))
    except FileExistsError:
        return  # another rank was first
    except OSError as failure:
        text += f"\n(The report could not be written to {path}: {failure})"
    print(text, file=sys.stderr, flush=True)


def _on_the_device(engine: HeldEngine) -> dict[str, int]:
    """Leave out what is in files, and on a GPU what is in the host's memory."""
    held = engine.memory()
    if engine.device.type == "cpu":
        return {kind: size for kind, size in held.items() if not kind.endswith("_nvme")}
    return {kind: held[kind] for kind in BOOK_KINDS}


def _place(trace: TracebackType | None, models: list[nn.Module]) -> tuple[str, str]:
    """Read the phase, and the innermost module whose code was running, from a traceback."""
    names = {module: name for model in models for name, module in model.named_modules()}
    phase, found = "", ""
    while trace is not None:
        code, owner = trace.tb_frame.f_code, trace.tb_frame.f_locals.get("self")
        if code.co_name == "backward" and "autograd" in Path(code.co_filename).parts:
            phase = phase or "the backward"
        elif isinstance(owner, torch.optim.Optimizer):
            phase = phase or "the optimizer's step"
        elif isinstance(owner, nn.Module) and owner in names:
            phase = phase or "the forward"
            found = names[owner] or type(owner).__name__
        trace = trace.tb_next
    return phase or "training", found


def oom_report(
    error: BaseException,
    *,
    rank: int,
    phase: str,
    module: str,
    gathered: list[str],
    held: Mapping[str, int],
    total: int | None,
    plan: Plan | None = None,
    running: Choice | None = None,
) -> str:
    """Write the report of an out-of-memory error.

    Args:
        error: The error.
        rank: Rank that ran out.
        phase: What it was doing, for example "the forward".
        module: Module whose code was running, or nothing.
        gathered: Units that were whole.
        held: Model states by kind, the engine's books.
        total: Bytes that the device's allocator or the process held, where that is known.
        plan: What was planned.
        running: The choice that runs.
    """
    kinds = {kind: size for kind, size in held.items() if size}
    if total is not None:
        kinds["activations and other"] = max(0, total - sum(held.values()))
    where = f" in {module}" if module else ""
    lines = [
        f"shardplug: rank {rank} ran out of memory during {phase}{where}.",
        f"  {type(error).__name__}: {str(error).partition(chr(10))[0]}",
        f"  whole units: {', '.join(gathered[:4]) or 'none'}"
        + (f" and {len(gathered) - 4} more" if len(gathered) > 4 else ""),
        "  held:",
    ]
    planned = running.walk.peak.held if running is not None else {}
    for kind, size in sorted(kinds.items(), key=lambda item: -item[1]):
        beside = f"   (planned at the peak: {planned[kind] / GIB:.3g})" if kind in planned else ""
        lines.append(f"    {kind:24s} {size / GIB:9.3g} GiB{beside}")
    if running is not None:
        lines.append(
            f"  planned peak: {running.walk.peak.total / GIB:.3g} GiB during "
            f"{running.walk.peak.phase} {running.walk.peak.unit}".rstrip()
        )
    largest = max(kinds, key=kinds.__getitem__, default="")
    lines.append(f"  the largest kind is {largest or 'unknown'}. What frees most:")
    lines += [f"  {n}. {line}" for n, line in enumerate(_remedies(kinds, plan, running), 1)]
    return "\n".join(lines)


def _remedies(kinds: Mapping[str, int], plan: Plan | None, running: Choice | None) -> list[str]:
    if plan is not None and running is not None:
        less = [c for c in plan.choices if not c.unavailable and c.device < running.device]
        less.sort(key=lambda c: c.device)
        return [
            f"{c.name}: {(running.device - c.device) / GIB:.3g} GiB less, a step takes "
            f"{c.time.total / running.time.total:.2f} times as long: {lightning_line(plan, c)}"
            for c in less[:3]
        ] or ["more devices, or a smaller micro-batch: no other setting of the plan holds less"]
    order = sorted(kinds, key=lambda kind: -kinds[kind])
    found = [line for kind in order for line in _REMEDIES.get(kind, ())]
    return list(dict.fromkeys(found))[:3]
