"""The fastest configuration that fits, found before a model is sharded: zero_auto."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardplug._messages import show_messages
from shardplug.config import ZeroConfig
from shardplug.errors import ConfigError
from shardplug.plan.choices import GIB, Choice, MemoryBudget, gib
from shardplug.plan.plan import Plan
from shardplug.plan.request import Loop
from shardplug.plan.run.observed import Call, Running, settings_of
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind
from shardplug.plan.sizes.optimizer_probe import likely_kind
from shardplug.plan.source import make_batch
from shardplug.plan.trace.meta_copy import meta_copy, shapes_of
from shardplug.process.limits import ControlGroup, headroom
from shardplug.tiers.filesystem import free_bytes
from shardplug.tiers.placement import PATH_VARIABLE

__all__ = ["AUTO", "MEMORY_VARIABLE", "AutoBudget", "auto_config", "split_auto"]

AUTO = "zero_auto"
"""The string that stands for a decision by the plan."""

_LOG = logging.getLogger("shardplug")

MEMORY_VARIABLE = "SHARDPLUG_DEVICE_MEMORY_GIB"
"""Memory of one rank in GiB, where an `AutoBudget` does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoBudget:
    """What zero_auto may use, and what it plans for.

    Raises:
        ConfigError: For a number that is not above 0.
    """

    device_memory_gib: float | None = None
    """Memory of one rank, GiB (2^30 bytes). None: a GPU's own memory; on CPU ranks what
    SHARDPLUG_DEVICE_MEMORY_GIB says, since ranks share the host's memory."""

    host_memory_gib: float | None = None
    """Memory of one node for state outside GPUs; None: what the host has left."""

    nvme_path: str | None = None
    """Folder for swap files; None: what SHARDPLUG_NVME_PATH says. Without a folder no state is put
    in files."""

    example_batch: Any = None
    """One rank's micro-batch, where there is no data loader to take one from."""

    seq_length: int | None = None
    """Tokens of a sequence, to make a batch for a Hugging Face model without any data."""

    micro_batch: int = 1
    """Samples of that batch."""

    def __post_init__(self) -> None:
        for name in ("device_memory_gib", "host_memory_gib", "seq_length", "micro_batch"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"Expected {name} of zero_auto above 0, got {value!r}.")


def split_auto(text: str) -> tuple[str, AutoBudget | None]:
    """Take zero_auto and its options out of a configuration written in one line.

    Args:
        text: For example "zero_auto,device_memory_gib=24,seq_length=2048,replicate_size=2".

    Returns:
        What is left, for `ZeroConfig.parse`, and the budget; None where it is not zero_auto.

    Raises:
        ConfigError: For an impossible value.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or parts[0].lower() != AUTO:
        return text, None
    kinds = {
        "device_memory_gib": float,
        "host_memory_gib": float,
        "nvme_path": str,
        "seq_length": int,
        "micro_batch": int,
    }
    fields: dict[str, Any] = {}
    rest = []
    for part in parts[1:]:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in kinds:
            rest.append(part)
            continue
        try:
            fields[name] = kinds[name](value)
        except ValueError as error:
            raise ConfigError(f"Expected {name} to be a number, got {value!r}.") from error
    return ",".join(["stage=3", *rest]), AutoBudget(**fields)


def auto_config(
    model: nn.Module,
    budget: AutoBudget | None = None,
    *,
    batch: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    accumulate: int = 1,
    base: ZeroConfig | None = None,
    loop: Loop = "pytorch",
    method: str = "forward",
    device: torch.device | None = None,
) -> ZeroConfig:
    """Choose stage, tiers and checkpointing as `shardplug plan --auto` would. Collective.

        engine = ZeroEngine(auto_config(model, AutoBudget(device_memory_gib=24), batch=batch))

    Rank 0 decides, and logs what it takes and why each faster choice fell.

    Args:
        model: The model before it is sharded; it is left as it was.
        budget: What may be used.
        batch: What the model is called with for one micro-batch: a mapping is passed by name, a
            tuple in order. Left out, the budget's.
        optimizer: The optimizer; left out, one that keeps as Adam does is planned for.
        accumulate: Micro-batches per optimizer step.
        base: The fields that are not chosen: units, dtypes, replicas, the place of activations;
            checkpointing where it is on.
        loop: Who drives the steps.
        method: Method of the model that is called with the batch.
        device: Device of this rank; left out, the current one.

    Raises:
        ConfigError: On every rank, when nothing fits, with what would; or when the budget or the
            batch is missing.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    outcome: list[Any] = [None, ""]
    if rank == 0:
        try:
            found, config = _decide(
                model,
                budget or AutoBudget(),
                batch,
                optimizer,
                accumulate,
                base or ZeroConfig(),
                loop,
                method,
                device,
            )
            outcome = [dataclasses.asdict(config), ""]
            show_messages()
            _LOG.info(_explained(found, config))
        except Exception as error:
            # Anything, so that no rank waits: it is raised on all of them below.
            outcome = [None, str(error) if isinstance(error, ConfigError) else repr(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is None:
        raise ConfigError(f"zero_auto found no configuration: {outcome[1]}")
    return ZeroConfig(**outcome[0])


def _decide(
    model: nn.Module,
    budget: AutoBudget,
    batch: Any,
    optimizer: torch.optim.Optimizer | None,
    accumulate: int,
    base: ZeroConfig,
    loop: Loop,
    method: str,
    device: torch.device | None,
) -> tuple[Plan, ZeroConfig]:
    kind = device.type if device is not None else _current_type()
    path = budget.nvme_path or os.environ.get(PATH_VARIABLE)
    meta_model = meta_copy(model)
    if batch is None:
        batch = budget.example_batch
    if batch is None:
        batch = _made_up(meta_model, budget)
    size = dist.get_world_size() if dist.is_initialized() else 1
    local = min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    run = Running(
        config=base,
        meta_model=meta_model,
        call=_call(method, batch),
        devices=local,
        nodes=max(1, size // local),
        device=kind,
        optimizer=OptimizerKind() if optimizer is None else likely_kind(optimizer),
        accumulate=accumulate,
        loop=loop,
    )
    found = run.plan(room=_room(budget, kind, path, device))
    for choice in found.choices:
        in_files = "nvme" in (choice.offload_optimizer, choice.offload_params)
        if choice.fits and not choice.unavailable and (path or not in_files):
            return found, dataclasses.replace(
                base,
                stage=choice.stage,
                offload_optimizer=choice.offload_optimizer,
                offload_params=choice.offload_params,
                activation_checkpointing=choice.activation_checkpointing,
                nvme_path=path if in_files else None,
            )
    raise ConfigError(" ".join(["nothing fits.", *_why_not(found, path)]))


def _current_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _made_up(meta_model: nn.Module, budget: AutoBudget) -> Any:
    if budget.seq_length is None and not _takes_pictures(meta_model):
        raise ConfigError(
            "Expected a batch to plan for, found none: pass AutoBudget(example_batch=...), or "
            "seq_length and micro_batch for a Hugging Face model."
        )
    return make_batch(meta_model, budget.micro_batch, budget.seq_length)


def _takes_pictures(meta_model: nn.Module) -> bool:
    return getattr(meta_model, "main_input_name", "") == "pixel_values"


def _call(method: str, batch: Any) -> Call:
    shapes = shapes_of(batch)
    if method != "forward":  # a step of a LightningModule: (batch, number)
        return Call(method, (shapes, 0), {})
    if isinstance(shapes, Mapping):
        return Call(method, (), dict(shapes))
    return Call(method, shapes if isinstance(shapes, tuple) else (shapes,), {})


def _room(
    budget: AutoBudget, kind: str, path: str | None, device: torch.device | None
) -> MemoryBudget:
    memory = budget.device_memory_gib
    if memory is None:
        text = os.environ.get(MEMORY_VARIABLE)
        try:
            memory = None if text is None else float(text)
        except ValueError as error:
            raise ConfigError(f"Expected {MEMORY_VARIABLE} in GiB, got {text!r}.") from error
    if memory is None and kind != "cpu":
        memory = torch.cuda.get_device_properties(device or 0).total_memory / GIB
    if memory is None:
        raise ConfigError(
            "Expected a memory budget, since CPU ranks share the host's memory: set "
            f"{MEMORY_VARIABLE} to the GiB that one rank may use, or pass device_memory_gib."
        )
    host = budget.host_memory_gib
    if host is None and kind != "cpu":
        left = headroom(ControlGroup())
        host = None if left is None else max(left.free, 1) / GIB
    return MemoryBudget(
        device_gib=memory,
        host_gib=host,
        nvme_gib=None if path is None else max(free_bytes(path), 1) / GIB,
        reserve_gib=0.0 if kind == "cpu" else 1.0,
    )


def _why_not(found: Plan, path: str | None) -> list[str]:
    words = list(found.advice)
    if path is None and any(c.fits and c.offload_optimizer == "nvme" for c in found.choices):
        words.append(f"State in files would fit: set {PATH_VARIABLE} to a folder on a local drive.")
    return words


def _explained(found: Plan, config: ZeroConfig) -> str:
    """Say what was taken, and why each faster choice was not."""

    def is_taken(choice: Choice) -> bool:
        return settings_of(choice) == settings_of(config)

    taken = next(choice for choice in found.choices if is_taken(choice))
    room = found.request.room
    lines = [
        f"zero_auto takes {taken.name}: {gib(taken.device)} of the "
        f"{room.device_gib - room.reserve_gib:.3g} GiB of a device at its peak"
    ]
    if not found.traced:
        lines.append("  activations are a formula's: the model could not be traced")
    faster = [c for c in found.choices if c.time.total < taken.time.total and not is_taken(c)]
    for choice in sorted(faster, key=lambda choice: choice.time.total):
        why = choice.unavailable or f"{choice.misses_by} too much"
        if not choice.unavailable and choice.fits:
            why = f"no folder for its files ({PATH_VARIABLE})"
        lines.append(f"  faster, but not taken: {choice.name}: {why}")
    return "\n".join(lines)
