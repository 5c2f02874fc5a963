"""Puts Accelerate into its FSDP type, on CPU ranks and single processes too.

Accelerate switches FSDP on only for accelerator ranks. On CPU ranks the same settings start DDP,
or, when nothing asks for the CPU, one unconnected training per rank, without an error. The process
group, the rank arithmetic and the data loaders of those modes are right; only the type is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, InitProcessGroupKwargs

from shardplug.errors import ConfigError

__all__ = [
    "process_group_handler",
    "refuse_lone_tasks",
    "refuse_too_many_ranks",
    "switch_to_fsdp",
    "wants_cpu",
]


def wants_cpu(cpu: bool, environment: Mapping[str, str]) -> bool:
    """Whether ranks compute on the CPU: asked for, or because there is nothing else."""
    asked = environment.get("ACCELERATE_USE_CPU", "false").lower() in ("1", "true", "yes", "on")
    return cpu or asked or not torch.accelerator.is_available()


def refuse_too_many_ranks(cpu: bool, environment: Mapping[str, str]) -> None:
    """Refuse more ranks on this machine than it has accelerator devices.

    Raises:
        ConfigError: On every rank, with both numbers.
    """
    if cpu:
        return
    ranks = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    devices = torch.accelerator.device_count()
    if ranks > devices:
        raise ConfigError(
            f"Expected at most one rank per device, got {ranks} ranks on {devices} devices. Use "
            f"--num_processes {devices}, or set ACCELERATE_USE_CPU=true to train on the CPU."
        )


def refuse_lone_tasks(num_processes: int, environment: Mapping[str, str]) -> None:
    """Refuse tasks of one srun that each train by themselves: Accelerate does not look at SLURM.

    Args:
        num_processes: Ranks that Accelerate found.
        environment: The process environment.

    Raises:
        ConfigError: On every task, with both numbers.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))
    shell = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    launched = "LOCAL_RANK" in environment or "WORLD_SIZE" in environment
    if num_processes == 1 and tasks > 1 and not shell and not launched:
        raise ConfigError(
            f"Expected one training of {tasks} ranks, as srun started {tasks} tasks, got {tasks} "
            "trainings of 1 rank: Accelerate does not read SLURM's variables. Start one task per "
            "node, which starts its ranks: srun --ntasks-per-node=1 accelerate launch ... or "
            "torchrun ... (for trainings apart on purpose set WORLD_SIZE=1)."
        )


def process_group_handler(
    handlers: list[Any] | None, cpu: bool, environment: Mapping[str, str]
) -> list[Any] | None:
    """Ask for a gloo group beside the GPU's, unless the user set up the group himself.

    State dicts and checkpoints move CPU tensors between ranks, which NCCL alone cannot.
    """
    own = any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers or ())
    launched = int(environment.get("LOCAL_RANK", "-1")) >= 0
    if cpu or own or not launched or not torch.cuda.is_available() or dist.is_initialized():
        return handlers
    return [*(handlers or ()), InitProcessGroupKwargs(backend="cuda:nccl,cpu:gloo")]


def switch_to_fsdp(state: AcceleratorState, plugin: Any, environment: Mapping[str, str]) -> None:
    """Give Accelerate's state the FSDP type and the plugin its other parts read.

    Raises:
        ConfigError: When Accelerate was set up for another mode before, on every rank.
    """
    refuse_lone_tasks(state.num_processes, environment)
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if state.num_processes != world_size:
        raise ConfigError(
            f"Expected {world_size} ranks, as the launcher set WORLD_SIZE, but Accelerate was set "
            f"up for {state.num_processes}: something created PartialState before the shardplug "
            "Accelerator and saw no accelerator device. Create the Accelerator first, or run the "
            "script with `-m shardplug.run`, or set ACCELERATE_USE_CPU=true."
        )
    allowed = (
        DistributedType.NO,
        DistributedType.MULTI_CPU,
        DistributedType.MULTI_GPU,
        DistributedType.FSDP,
    )
    if state.distributed_type not in allowed:
        raise ConfigError(
            f"Expected distributed_type FSDP or CPU ranks, got {state.distributed_type}. "
            "Use distributed_type: FSDP in the YAML."
        )
    if not dist.is_initialized():
        _start_single_process_group(state.device)
    if state.distributed_type != DistributedType.FSDP:
        state.fsdp_plugin = plugin
        state.distributed_type = DistributedType.FSDP
        PartialState().distributed_type = DistributedType.FSDP


def _start_single_process_group(device: torch.device) -> None:
    """One process without a launcher: the same code runs over a group of one."""
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
