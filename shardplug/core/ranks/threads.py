"""Says when the ranks of a machine take one core of many, or all take the same ones.

Updates of state outside the device, and everything on CPU ranks, run on the CPU. Launchers get
its share wrong in both directions: torchrun gives a rank one thread where OMP_NUM_THREADS is not
set, SLURM gives a task one core where --cpus-per-task is not set, and a rank that nothing limits
takes every core.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

__all__ = ["Cores", "complaint", "local_place", "warn_of_cores"]

_WORTH_SAYING = 4
"""Cores left idle, or shared, per core in use."""


@dataclass(frozen=True, slots=True)
class Cores:
    """What the ranks of one machine compute with."""

    of_machine: int
    allowed: int
    """Cores that this rank may run on."""
    threads: int
    """Threads that torch computes with on this rank."""
    ranks: int
    """Ranks on this machine."""

    @property
    def share(self) -> int:
        """Cores per rank."""
        return max(1, self.of_machine // self.ranks)


def complaint(cores: Cores) -> str | None:
    """Say what is wrong with the CPU's share of each rank, and what to set; None if nothing is."""
    share = cores.share
    if cores.allowed == 1 and share >= _WORTH_SAYING:
        return (
            f"This rank may run on 1 of {cores.of_machine} cores, with {cores.ranks} ranks on this "
            f"machine. Give each about {share}: --cpus-per-task={share} with SLURM (sbatch and "
            f"srun), and OMP_NUM_THREADS={share}."
        )
    own = min(cores.allowed, share)
    if cores.threads == 1 and own >= _WORTH_SAYING:
        return (
            f"torch computes with 1 thread on this rank, which may have {own} cores (torchrun sets "
            f"OMP_NUM_THREADS=1 where it is not set). Set OMP_NUM_THREADS={own}."
        )
    if cores.ranks > 1 and cores.allowed > share and cores.threads > share:
        return (
            f"Each of {cores.ranks} ranks on this machine computes with {cores.threads} threads, "
            f"on the same {cores.of_machine} cores. Set OMP_NUM_THREADS={share}."
        )
    return None


def local_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Read this rank's number on its machine, and how many there are, from a launcher's variables.

    Args:
        environment: The process environment, of torchrun, `accelerate launch` or SLURM's srun.

    Returns:
        None where no launcher says.
    """
    if "TORCHELASTIC_RUN_ID" in environment and "LOCAL_WORLD_SIZE" in environment:
        return int(environment["LOCAL_RANK"]), int(environment["LOCAL_WORLD_SIZE"])
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE"))
    if tasks is None or "SLURM_LOCALID" not in environment or "LOCAL_RANK" in environment:
        return None
    nodes = tasks.split(",")  # "8(x2),4": two nodes of 8 tasks, and one of 4
    count = max(int(node.partition("(")[0]) for node in nodes)
    return int(environment["SLURM_LOCALID"]), count


def warn_of_cores(environment: Mapping[str, str]) -> None:
    """Warn, on one rank of each machine, where ranks get one core of many or all the same ones."""
    place = local_place(environment)
    if place is None or place[0] != 0:
        return
    machine = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else machine
    found = complaint(Cores(machine, allowed, torch.get_num_threads(), place[1]))
    if found is not None:
        warnings.warn(found, UserWarning, stacklevel=3)
