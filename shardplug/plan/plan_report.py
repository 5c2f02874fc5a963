"""A plan as a table for people, as plain data for programs, and as lines of configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from shardplug.plan.choices import GIB, Choice
from shardplug.plan.lora import described
from shardplug.plan.plan import Plan
from shardplug.plan.timeline import PLAN_KINDS, RESIDENT_KINDS

__all__ = ["accelerate_yaml", "as_dict", "as_text", "lightning_line"]

_HEADS = {
    "master_shards": "masters",
    "gathered": "gathered",
    "gradients": "gradients",
    "optimizer_state": "optimizer",
    "activations": "activations",
    "logits_and_loss": "logits",
    "communication": "buffers",
    "optimizer_work": "step",
}
_OUTSIDE = "tier"
_SWAP_FOLDER = "/mnt/nvme"  # to be replaced: a folder on a local drive
_PRECISIONS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


def as_text(plan: Plan) -> str:
    """Lay a plan out as a table, in GiB per device at the peak."""
    request, layout = plan.request, plan.layout
    batch = f"micro-batch {request.micro_batch}"
    if request.seq_length is not None:
        batch += f" x {request.seq_length} tokens"
        batch += " (seq_length was not given)" if request.length_assumed else ""
    kind = "" if request.model_class == request.model else f" ({request.model_class})"
    lines = [
        f"{request.model}{kind}: {layout.num_parameters / 1e9:.3g} billion parameters"
        + (
            f", {layout.num_trainable / 1e9:.3g} trainable"
            if layout.num_trainable != layout.num_parameters
            else ""
        ),
        f"{request.nodes} x {request.devices} devices of {request.room.device_gib:g} GiB, "
        f"{batch}, {request.accumulate} per step, {request.precision}, {request.optimizer}",
        *_lora_line(plan),
        f"attention: {plan.attention}",
        "",
        "GiB per device at the peak; host and disk per node; seconds are for ranking only.",
        "",
    ]
    visible = any(_gib(_outside(choice)) != _gib(0) for choice in plan.choices)
    heads = [_OUTSIDE] if visible else []
    heads = [*_HEADS.values(), *heads, "slack", "total", "host", "disk", "s/step", "peak in", ""]
    rows = [["", *heads]]
    rows += [_row(choice, outside=_OUTSIDE in heads) for choice in plan.choices]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    text = {0, len(rows[0]) - 2, len(rows[0]) - 1}
    for row in rows:
        cells = [
            cell.ljust(width) if index in text else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines += ["", _paper_line(plan), "", *plan.notes]
    if plan.advice:
        lines += ["", "Nothing fits. What would:", *(f"- {line}" for line in plan.advice)]
    return "\n".join(lines)


def _lora_line(plan: Plan) -> list[str]:
    if plan.request.lora is None:
        return []
    frozen = Counter[torch.dtype]()
    for parameter in plan.layout.parameters:
        if not parameter.trainable:
            frozen[parameter.master] += parameter.numel
    base = str(frozen.most_common(1)[0][0]).removeprefix("torch.")
    return [f"adapters: {plan.request.lora.code}; the base is frozen, in {base}"]


def _outside(choice: Choice) -> int:
    """Memory of the device at the peak that is there because state is in a tier."""
    held = choice.timeline.peak.held
    return sum(held[kind] for kind in RESIDENT_KINDS if kind.endswith("_cpu")) + held["staging"]


def _row(choice: Choice, *, outside: bool) -> list[str]:
    held, peak = choice.timeline.peak.held, choice.timeline.peak
    where = " ".join(part for part in (peak.phase, peak.unit) if part)
    return [
        ("* " if choice.reason.startswith("the fastest") else "  ") + choice.name,
        *(_gib(held[kind]) for kind in _HEADS),
        *([_gib(_outside(choice))] if outside else []),
        _gib(choice.slack),
        _gib(choice.device),
        _gib(choice.host) if choice.host else "",
        _gib(choice.disk) if choice.disk else "",
        f"{choice.time.total:.3g}",
        where,
        choice.reason,
    ]


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _paper_line(plan: Plan) -> str:
    figures = " / ".join(f"{plan.paper[stage] / 1e9:.4g}" for stage in (0, 1, 2, 3))
    frozen = plan.layout.num_trainable != plan.layout.num_parameters
    return (
        "The ZeRO paper counts model states of fp16 training with Adam"
        f"{', were all parameters trained' if frozen else ''}: "
        f"{figures} GB (10^9 bytes) per rank, replicated / stage 1 / 2 / 3."
    )


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data, in bytes and seconds; the best choice comes first."""
    request = plan.request
    return {
        "model": request.model,
        "model_class": request.model_class,
        "parameters": plan.layout.num_parameters,
        "trainable_parameters": plan.layout.num_trainable,
        "devices": request.devices,
        "nodes": request.nodes,
        "device": request.device,
        "device_memory_gib": request.room.device_gib,
        "host_memory_gib": request.room.host_gib,
        "nvme_gib": request.room.nvme_gib,
        "reserve_gib": request.room.reserve_gib,
        "seq_length": request.seq_length,
        "seq_length_assumed": request.length_assumed,
        "micro_batch": request.micro_batch,
        "accumulate": request.accumulate,
        "precision": request.precision,
        "lora": described(request.lora),
        "optimizer": request.optimizer,
        "loop": request.loop,
        "attention": plan.attention,
        "traced": plan.traced,
        "fits": plan.fits,
        "choices": [_choice_dict(choice) for choice in plan.choices],
        "paper_bytes": {str(stage): size for stage, size in plan.paper.items()},
        "notes": list(plan.notes),
        "advice": list(plan.advice),
    }


def _choice_dict(choice: Choice) -> dict[str, Any]:
    peak, moved = choice.timeline.peak, choice.timeline.moved
    return {
        "name": choice.name,
        "stage": choice.stage,
        "offload_optimizer": choice.offload_optimizer,
        "offload_params": choice.offload_params,
        "activation_checkpointing": choice.activation_checkpointing,
        "offload_activations": choice.offload_activations,
        "available": not choice.unavailable,
        "fits": choice.fits,
        "over_bytes": choice.over,
        "reason": choice.reason,
        "device_bytes": choice.device,
        "slack_bytes": choice.slack,
        "host_bytes": choice.host,
        "disk_bytes": choice.disk,
        "peak": {"phase": peak.phase, "unit": peak.unit, "micro_batch": peak.micro_batch},
        "peak_bytes": {kind: peak.held[kind] for kind in PLAN_KINDS},
        "phase_bytes": {
            phase: {kind: held[kind] for kind in PLAN_KINDS}
            for phase, held in choice.timeline.phases.items()
        },
        "moved_bytes": {
            "gathers": moved.gathers,
            "reductions": moved.reductions,
            "replicas": moved.replicas,
        },
        "seconds": {
            "compute": choice.time.compute,
            "collectives": choice.time.collectives,
            "transfers": choice.time.transfers,
            "activations": choice.time.activations,
            "total": choice.time.total,
        },
    }


def _preset(choice: Choice) -> str:
    """Name the preset; state in files has none of its own, since a path comes with it."""
    if choice.offload_optimizer == "nvme" and choice.offload_params != "nvme":
        return f"zero{choice.stage}"
    return choice.name.split()[0]


def _options(plan: Plan, choice: Choice) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if choice.offload_optimizer == "nvme":
        options["nvme_path"] = _SWAP_FOLDER
        if plan.request.offload_cpu_gib is not None:
            options["offload_cpu_gib"] = plan.request.offload_cpu_gib
    if plan.request.replicate_size != 1:
        options["replicate_size"] = plan.request.replicate_size
    if choice.activation_checkpointing:
        options["activation_checkpointing"] = True
    if choice.offload_activations != "none":
        options["offload_activations"] = choice.offload_activations
    if plan.request.prefetch != 1:
        options["prefetch"] = plan.request.prefetch
    return options


def lightning_line(plan: Plan, choice: Choice) -> str:
    """Return the Trainer that runs a choice."""
    request, preset = plan.request, _preset(choice)
    options = _options(plan, choice)
    strategy = f'"{preset}"'
    if options or choice.offload_params == "cpu":
        fields = ", ".join(
            [
                f"stage={choice.stage}",
                *(
                    f'{tier}="{getattr(choice, tier)}"'
                    for tier in ("offload_optimizer", "offload_params")
                    if getattr(choice, tier) != "none"
                ),
                *(f"{name}={value!r}" for name, value in options.items()),
            ]
        )
        strategy = f"shardplug.lightning.ZeroStrategy({fields})"
    parts = [f"strategy={strategy}", f"devices={request.devices}"]
    if request.nodes > 1:
        parts.append(f"num_nodes={request.nodes}")
    if request.device == "cpu":
        parts.append('accelerator="cpu"')
    parts.append(f'precision="{request.precision}"')
    if request.accumulate > 1:
        parts.append(f"accumulate_grad_batches={request.accumulate}")
    return f"Trainer({', '.join(parts)})"


def accelerate_yaml(plan: Plan, choice: Choice) -> str:
    """Return the Accelerate configuration file that runs a choice."""
    request, preset = plan.request, _preset(choice)
    fields = _options(plan, choice)
    if choice.offload_params == "cpu":
        fields = {"offload_params": "cpu", **fields}
    if choice.offload_optimizer == "nvme" and choice.offload_params != "nvme":
        fields = {"offload_optimizer": "nvme", **fields}
    options = "".join(
        f",{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, value in fields.items()
    )
    return "\n".join(
        [
            "compute_environment: LOCAL_MACHINE",
            "distributed_type: FSDP",
            f'mixed_precision: "{_PRECISIONS.get(request.precision, "no")}"',
            f"num_machines: {request.nodes}",
            "machine_rank: 0",
            f"num_processes: {request.world_size}",
            f"gradient_accumulation_steps: {request.accumulate}",
            "fsdp_config:",
            "  fsdp_version: 2",
            f'  fsdp_sharding_strategy: "shardplug:{preset}{options}"',
            "  fsdp_state_dict_type: FULL_STATE_DICT",
            "  fsdp_cpu_ram_efficient_loading: false",
            "  fsdp_activation_checkpointing: false",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        ]
    )
