"""Say which settings will fit, before anything is launched.

MODEL is the path of a config.json or of a folder that has one, or a hub id, of which only the
configuration is downloaded. Every stage and tier is listed, the fastest that fits first.
Exit code 0: something fits. 1: nothing does; what would is said. 2: bad use.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Literal

from shardplug.errors import ConfigError, ShardplugError
from shardplug.memory import (
    OPTIMIZERS,
    Choice,
    Lora,
    Machine,
    Plan,
    accelerate_yaml,
    as_dict,
    as_text,
    draw_plan,
    lightning_line,
    plan,
)

__all__ = ["add_arguments", "run"]

_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="config.json, folder or hub id")
    add("--devices", type=int, required=True, help="devices of one node")
    add("--nodes", type=int, default=1, help="nodes (default 1)")
    add("--device-memory", type=float, required=True, metavar="GIB", help="of one device")
    add("--host-memory", type=float, metavar="GIB", help="of one node")
    add("--nvme", type=float, metavar="GIB", help="room on one node's disks")
    add("--offload-cpu", type=float, metavar="GIB", help="CPU memory a rank fills before files")
    add(
        "--seq-length",
        type=int,
        help="tokens of a sequence (default the model's positions, at most 4096)",
    )
    add("--micro-batch", type=int, default=1, help="samples per device (default 1)")
    add("--accumulate", type=int, help="micro-batches per optimizer step (default 1)")
    add("--global-batch", type=int, help="samples per optimizer step, instead of --accumulate")
    add("--precision", default="bf16-mixed", help="as in Lightning (default bf16-mixed)")
    add("--lora", type=int, metavar="RANK", help="train adapters of this rank, freeze the model")
    add(
        "--lora-targets",
        metavar="NAMES",
        help="layers that get one: all-linear, or names like q_proj,v_proj (default PEFT's)",
    )
    add("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (default adamw)")
    add(
        "--checkpointing",
        choices=("on", "off", "both"),
        default="both",
        help="activation checkpointing (default both)",
    )
    add(
        "--offload-activations",
        choices=("on", "off", "both"),
        default="off",
        help="activations in CPU memory between forward and backward (default off)",
    )
    add("--stage", type=int, choices=(1, 2, 3), help="look at one stage only")
    add("--replicate-size", type=int, default=1, help="replicas of HSDP (default 1)")
    add("--loop", choices=("lightning", "accelerate", "pytorch"), default="lightning")
    add("--cpu", action="store_true", help="plan for CPU ranks")
    for field, meaning in (
        ("tflops", "10^12 operations per second and device that training reaches"),
        ("link_gb_s", "GB per second from a device to others of its node"),
        ("node_link_gb_s", "GB per second from a device to other nodes"),
        ("host_gb_s", "GB per second between a device and its host"),
        ("nvme_gb_s", "GB per second between a node and its disks"),
    ):
        default = getattr(Machine(), field)
        add(
            f"--{field.replace('_', '-')}",
            type=float,
            default=default,
            help=f"{meaning} (default {default:g})",
        )
    add("--json", action="store_true", help="print JSON")
    add("--auto", action="store_true", help="print the configuration of the best choice")
    add("--picture", type=Path, metavar="PNG", help="draw the predicted curve")


def run(arguments: argparse.Namespace) -> int:
    """Print, and return the exit code."""
    try:
        found = _plan(arguments)
    except ShardplugError as error:
        print(f"shardplug: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    if arguments.picture is not None:
        draw_plan(found, arguments.picture)
    if arguments.json:
        print(json.dumps(as_dict(found), indent=1))
    elif not arguments.auto or found.best is None:
        print(as_text(found))
    if arguments.auto and found.best is not None:
        _print_configuration(found, found.best)
    return 0 if found.fits else 1


def _print_configuration(found: Plan, best: Choice) -> None:
    """Print what to paste, and what it takes: the table is not there to say so."""
    room = found.request.room
    takes = [f"{best.device / _GIB:.2f} GiB of each device"]
    for size, given, what, option in (
        (best.host, room.host_gib, "memory", "--host-memory"),
        (best.disk, room.nvme_gib, "disks", "--nvme"),
    ):
        if size:
            unknown = "" if given is not None else f", of which {option} says nothing"
            takes.append(f"{size / _GIB:.2f} GiB of a node's {what}{unknown}")
    print(f"# {best.name}: {'; '.join(takes)}\n")
    if found.request.lora is not None:
        code = found.request.lora.code
        print(f"# The model\nimport peft\n\nmodel = peft.get_peft_model(model, {code})\n")
    print("# Lightning\nimport lightning as L\n\nimport shardplug\n")
    print(f"trainer = L.{lightning_line(found, best)}\n")
    print(
        f"# Accelerate: a file for accelerate launch --config_file\n{accelerate_yaml(found, best)}"
    )


def _plan(arguments: argparse.Namespace) -> Plan:
    checkpointing = {"on": True, "off": False, "both": None}[arguments.checkpointing]
    places: dict[str, Literal["none", "cpu"] | None]
    places = {"on": "cpu", "off": "none", "both": None}
    machine = Machine(
        tflops=arguments.tflops,
        link_gb_s=arguments.link_gb_s,
        node_link_gb_s=arguments.node_link_gb_s,
        host_gb_s=arguments.host_gb_s,
        nvme_gb_s=arguments.nvme_gb_s,
    )
    return plan(
        arguments.model,
        devices=arguments.devices,
        nodes=arguments.nodes,
        device_memory_gib=arguments.device_memory,
        host_memory_gib=arguments.host_memory,
        nvme_gib=arguments.nvme,
        offload_cpu_gib=arguments.offload_cpu,
        seq_length=arguments.seq_length,
        micro_batch=arguments.micro_batch,
        accumulate=arguments.accumulate,
        global_batch=arguments.global_batch,
        precision=arguments.precision,
        lora=_lora(arguments.lora, arguments.lora_targets),
        optimizer=arguments.optimizer,
        activation_checkpointing=checkpointing,
        offload_activations=places[arguments.offload_activations],
        stage=arguments.stage,
        replicate_size=arguments.replicate_size,
        device="cpu" if arguments.cpu else "cuda",
        loop=arguments.loop,
        machine=machine,
    )


def _lora(rank: int | None, targets: str | None) -> Lora | None:
    if rank is None:
        if targets is not None:
            raise ConfigError("Expected --lora RANK with --lora-targets, got no rank: add it.")
        return None
    if targets is None or targets == "all-linear":
        return Lora(rank=rank, target_modules=targets)
    return Lora(rank=rank, target_modules=tuple(name.strip() for name in targets.split(",")))
