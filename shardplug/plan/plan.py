"""The plan before the launch: what each stage and tier would hold, and which one to take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from shardplug.core.precision import Precision
from shardplug.core.stage import STAGES
from shardplug.errors import ConfigError
from shardplug.plan.advice import advice, notes
from shardplug.plan.choices import Choice, Setting, evaluate, rank, tiers_of
from shardplug.plan.lora import Lora, with_adapters
from shardplug.plan.request import (
    PRECISIONS,
    Loop,
    Request,
    accumulation,
    check_ranks,
    cpu_budget,
    room_of,
)
from shardplug.plan.sizes.layout import Layout, place
from shardplug.plan.sizes.model_states import paper_bytes
from shardplug.plan.sizes.optimizer_kinds import OptimizerKind, optimizer_kind
from shardplug.plan.source import build_from_config, make_batch, sequence_length
from shardplug.plan.step_time import Machine
from shardplug.plan.timeline import Setup
from shardplug.plan.trace.attention import describe
from shardplug.plan.trace.segments import cut
from shardplug.plan.trace.trace import TraceSettings
from shardplug.plan.trace_cache import TraceCache

__all__ = ["Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """Every choice, the fastest that fits first."""

    request: Request
    layout: Layout
    choices: tuple[Choice, ...]
    attention: str
    """Attention kernels that the trace used, in words."""
    traced: bool
    """False where activations are a formula's."""
    notes: tuple[str, ...]
    """What the reader should know about the figures."""
    paper: dict[int, float]
    """Bytes per rank by stage as the ZeRO paper counts model states; 0 is plain data parallel."""
    advice: tuple[str, ...]
    """Where nothing fits: what would."""

    @property
    def best(self) -> Choice | None:
        """The choice to take, or None where none fits or can be run."""
        first = self.choices[0] if self.choices else None
        return first if first is not None and first.fits and not first.unavailable else None

    @property
    def fits(self) -> bool:
        """Whether there is a choice that fits and can be run."""
        return self.best is not None


def plan(
    model: Any,
    *,
    devices: int,
    nodes: int = 1,
    device_memory_gib: float,
    host_memory_gib: float | None = None,
    nvme_gib: float | None = None,
    seq_length: int | None = None,
    micro_batch: int = 1,
    accumulate: int | None = None,
    global_batch: int | None = None,
    precision: str = "bf16-mixed",
    lora: Lora | None = None,
    reduce_dtype: torch.dtype | None = None,
    optimizer: str | OptimizerKind = "adamw",
    activation_checkpointing: bool | None = None,
    offload_activations: Literal["none", "cpu"] | None = "none",
    stage: Literal[1, 2, 3] | None = None,
    offload: bool = True,
    offload_cpu_gib: float | None = None,
    replicate_size: int = 1,
    prefetch: int = 1,
    units: Literal["auto"] | tuple[str, ...] = "auto",
    device: Literal["cuda", "cpu"] = "cuda",
    loop: Loop = "lightning",
    keep_outputs: bool = False,
    batch: Any = None,
    loss: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    reserve_gib: float | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Predict the memory of every stage and tier, before anything is launched.

    No weights are loaded and no memory is used: the model is traced on tensors without data.
    A module that is passed is left as it was.

    Args:
        model: Any `torch.nn.Module`, on meta or not; a Hugging Face config; the path of a
            config.json or of a folder that has one; or a hub id, of which only the
            configuration is downloaded.
        devices: Devices of one node.
        nodes: Nodes.
        device_memory_gib: Memory of one device, GiB (2^30 bytes).
        host_memory_gib: Memory of one node, to check offloading against.
        nvme_gib: Room on one node's disks, to check offloading against.
        seq_length: Tokens of a sequence, for models of tokens; by default as many as the model has
            positions, at most 4096.
        micro_batch: Samples per device in one forward.
        accumulate: Micro-batches per optimizer step; 1 unless `global_batch` says otherwise.
        global_batch: Samples of one optimizer step over all devices, instead of `accumulate`.
        precision: As in Lightning: "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true".
        lora: Freeze the model, which keeps its dtype (a Hugging Face config names it), and train
            new low-rank adapters. A model that has adapters already is planned as it is.
        reduce_dtype: dtype that gradients are reduced in, as in `ZeroConfig`.
        optimizer: A name out of `shardplug.memory.OPTIMIZERS`, or an `OptimizerKind`.
        activation_checkpointing: On, off, or None to look at both.
        offload_activations: "none", "cpu", or None to look at both.
        stage: 1, 2 or 3, or None to look at all.
        offload: Whether to look at the host and NVMe tiers too.
        offload_cpu_gib: CPU memory per rank that is filled before files, as in `ZeroConfig`.
        replicate_size: Replicas (HSDP), as in `ZeroConfig`.
        prefetch: Units gathered ahead, as in `ZeroConfig`.
        units: What is gathered together, as in `ZeroConfig`.
        device: "cuda" or "cpu": which attention kernels run, and how collectives use memory.
        loop: Who drives the steps. Lightning and Accelerate run mixed precision under autocast;
            Lightning clears gradients between forward and backward.
        keep_outputs: Whether the loop holds the model's outputs (logits) through the backward,
            as `outputs = model(**batch); outputs.loss.backward()` does.
        batch: What the model is called with for one micro-batch; needed where the model is not
            Hugging Face's. Shapes count, and values of small integer tensors.
        loss: Computes the loss from (model, batch); by default the output's `loss`.
        reserve_gib: Device memory that is gone before the first tensor; 1 on a GPU.
        machine: Speeds, to rank the choices by.

    Returns:
        The choices with reasons, the fastest that fits first.

    Raises:
        ConfigError: For values that are impossible, or a model that cannot be found.
        ModelError: For a model that cannot be sharded.
    """
    world = check_ranks(devices, nodes, replicate_size)
    accumulate = accumulation(world, micro_batch, accumulate, global_batch)
    reserve = (1.0 if device == "cuda" else 0.0) if reserve_gib is None else reserve_gib
    room = room_of(device_memory_gib, host_memory_gib, nvme_gib, reserve)
    if precision not in PRECISIONS:
        raise ConfigError(
            f"Expected a precision out of {', '.join(PRECISIONS)}, got {precision!r}."
        )
    low, whole = PRECISIONS[precision]
    name = model if isinstance(model, str) else type(model).__name__
    if not isinstance(model, nn.Module):
        # A frozen base has no master weights: it rests in the dtype that it is loaded in.
        model = build_from_config(model, whole or (None if lora else torch.float32))
    given = seq_length
    if batch is None:
        seq_length = sequence_length(model, seq_length)
        batch = make_batch(model, micro_batch, seq_length)
    kind = type(model).__name__
    if lora is not None:
        model = with_adapters(model, lora)
    kinds = Precision(low, reduce_dtype or (torch.float32 if low else None))
    placed = place(model, units, kinds, whole)
    if world > placed.layout.num_parameters:
        raise ConfigError(
            f"Expected at most as many ranks as parameters ({placed.layout.num_parameters}), got "
            f"{world}: each rank would hold nothing. Use fewer devices."
        )
    work = TraceCache(
        model=model,
        placed=placed,
        batch=batch,
        loss=loss,
        settings=TraceSettings(
            device=device,
            checkpointing=False,
            autocast=low if loop != "pytorch" else None,
            cast_inputs=low if loop == "pytorch" else None,
            outputs_in_fp32=loop == "accelerate" and low is not None,
            keep_outputs=keep_outputs,
            prefetch=prefetch,
        ),
        setup=Setup(
            stage=STAGES[3],
            shards=world // replicate_size,
            replicas=replicate_size,
            accumulate=accumulate,
            prefetch=prefetch,
            device=device,
            optimizer=optimizer_kind(optimizer),
            grads_kept_through_forward=loop == "lightning",
            state_cpu_bytes=cpu_budget(offload_cpu_gib),
        ),
    )
    request = Request(
        model=name,
        model_class=kind,
        devices=devices,
        nodes=nodes,
        device=device,
        room=room,
        seq_length=seq_length,
        length_assumed=given is None and seq_length is not None,
        micro_batch=micro_batch,
        accumulate=accumulate,
        precision=precision,
        lora=lora,
        optimizer=work.setup.optimizer.name,
        loop=loop,
        replicate_size=replicate_size,
        prefetch=prefetch,
        offload_cpu_gib=offload_cpu_gib,
    )
    both = (False, True)
    modes = both if activation_checkpointing is None else (activation_checkpointing,)
    if activation_checkpointing is None and not placed.layout.blocks:
        modes = (False,)
    away = _places(offload_activations, work)
    traced = [(mode, moved) for mode in modes for moved in away]
    return _decide(request, work, machine or Machine(), traced, stage, offload)


def _places(offload_activations: str | None, work: TraceCache) -> tuple[bool, ...]:
    """Whether to look at activations in CPU memory, on the device, or both."""
    if offload_activations not in ("none", "cpu", None):
        raise ConfigError(
            f'Expected offload_activations "none", "cpu" or None, got {offload_activations!r}.'
        )
    if offload_activations is None:
        return (False, True) if work.placed.layout.blocks else (False,)
    return (offload_activations == "cpu",)


def _decide(
    request: Request,
    work: TraceCache,
    machine: Machine,
    modes: Sequence[tuple[bool, bool]],
    stage: Literal[1, 2, 3] | None,
    offload: bool,
) -> Plan:
    layout, on_cpu = work.placed.layout, request.device == "cpu"
    traces = {mode: work.trace(*mode) for mode in modes}
    pieces = {mode: cut(trace, layout, on_cpu=on_cpu) for mode, trace in traces.items()}
    choices = [
        evaluate(
            layout,
            pieces[mode],
            work.setup,
            setting,
            flops=traces[mode].flops,
            room=request.room,
            machine=machine,
            devices=request.devices,
        )
        for mode, setting in _settings(modes, stage, offload)
    ]
    ranked = rank(choices)
    kernels = {kernel for trace in traces.values() for kernel in trace.kernels}
    best = ranked[0].fits and not ranked[0].unavailable
    return Plan(
        request=request,
        layout=layout,
        choices=ranked,
        attention=describe(kernels),
        traced=not work.failure,
        notes=tuple(notes(request, work, ranked)),
        paper={s: paper_bytes(s, layout.num_parameters, work.setup.shards) for s in (0, 1, 2, 3)},
        advice=() if best else tuple(advice(request, work, ranked, pieces, machine)),
    )


def _settings(
    modes: Sequence[tuple[bool, bool]], stage: Literal[1, 2, 3] | None, offload: bool
) -> Iterator[tuple[tuple[bool, bool], Setting]]:
    """Yield each setting to look at, with the mode of its trace."""
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3) if stage is None else (stage,)
    for each in stages:
        for optimizer, params in tiers_of(each) if offload else [("none", "none")]:
            for checkpointing, away in modes:
                yield (
                    (checkpointing, away),
                    Setting(
                        stage=each,
                        offload_optimizer=optimizer,  # type: ignore[arg-type]
                        offload_params=params,  # type: ignore[arg-type]
                        activation_checkpointing=checkpointing,
                        offload_activations="cpu" if away else "none",
                    ),
                )
