"""Process group, ranks and small collectives, the same for Trainer and Fabric."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardplug.core.ranks.every_rank import on_every_rank
from shardplug.errors import CheckpointError, ConfigError

__all__ = [
    "Environment",
    "Meeting",
    "assign_ranks",
    "barrier",
    "broadcast",
    "connect",
    "reduce",
]

T = TypeVar("T")


class Environment(Protocol):
    """The part of Lightning's ClusterEnvironment that is used here."""

    @property
    def main_address(self) -> str: ...

    @property
    def main_port(self) -> int: ...

    def world_size(self) -> int: ...

    def set_world_size(self, size: int) -> None: ...

    def global_rank(self) -> int: ...

    def set_global_rank(self, rank: int) -> None: ...


def assign_ranks(
    environment: Environment, *, node_rank: int, local_rank: int, num_nodes: int, num_processes: int
) -> int:
    """Tell the environment its place in the world; launchers that decide themselves ignore it.

    Args:
        environment: The cluster environment.
        node_rank: Index of this machine.
        local_rank: Index of this process on its machine.
        num_nodes: Number of machines.
        num_processes: Number of processes on each machine.

    Returns:
        The global rank.
    """
    environment.set_global_rank(node_rank * num_processes + local_rank)
    environment.set_world_size(num_nodes * num_processes)
    return environment.global_rank()


def connect(
    environment: Environment, *, device: torch.device, backend: str | None, timeout: timedelta
) -> None:
    """Set the default process group up, or accept the one that is up already.

    A group that was up before is left alone afterwards; so is one made here, because a second
    fit uses it again. It is closed before the interpreter ends: the threads of NCCL and gloo do
    not survive that.

    Args:
        environment: Where the other ranks are found.
        device: Device of this rank.
        backend: torch backend, or None for the usual one of the device.
        timeout: How long a collective may wait for a rank.

    Raises:
        ConfigError: When a group is up that does not match the environment.
    """
    rank, size = environment.global_rank(), environment.world_size()
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, size):
            raise ConfigError(
                f"Expected the process group that is up to be rank {rank} of {size}, as the "
                f"launcher says, got rank {found[0]} of {found[1]}; give the Trainer the number of "
                "devices and nodes that the group has."
            )
        return
    os.environ["MASTER_ADDR"] = environment.main_address
    os.environ["MASTER_PORT"] = str(environment.main_port)
    chosen = backend or dist.get_default_backend_for_device(device)
    dist.init_process_group(
        chosen,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=None if device.type == "cpu" else device,
    )
    atexit.register(_close)


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier(device: torch.device) -> None:
    """Wait for all ranks."""
    if not dist.is_initialized():
        return
    with on_every_rank("A barrier"):
        if device.type == "cuda":
            dist.barrier(device_ids=[device.index])
        else:
            dist.barrier()


def broadcast(obj: T, src: int = 0) -> T:
    """Return rank `src`'s object on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return obj
    box = [obj]
    with on_every_rank("A broadcast"):
        dist.broadcast_object_list(box, src)
    return box[0]


def reduce(value: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
    """Reduce a tensor over the ranks, in place where it can be.

    Args:
        value: A tensor; anything else is returned as it is.
        group: Process group, or None for all ranks.
        reduce_op: "mean", "avg", "sum", "max", ... or a torch ReduceOp.

    Returns:
        The reduced tensor, the same on every rank.
    """
    if not isinstance(value, torch.Tensor) or not dist.is_initialized():
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    operation = reduce_op.lower() if isinstance(reduce_op, str) else reduce_op
    # Mean as sum and division: gloo has no AVG.
    is_mean = operation in ("mean", "avg", dist.ReduceOp.AVG)
    if is_mean or operation is None:
        operation = dist.ReduceOp.SUM
    elif isinstance(operation, str):
        operation = getattr(dist.ReduceOp, operation.upper())
    with on_every_rank("A reduction, for example of a metric logged with sync_dist=True,"):
        dist.all_reduce(value, op=operation, group=group)
    if is_mean:
        # copy_ keeps the dtype of integer tensors, as DDP's reduction does.
        value.copy_(value / dist.get_world_size(group))
    return value


class Meeting:
    """A place where all ranks come together, and where those that do not come are named.

    Args:
        timeout: How long to wait for the others.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None

    def prepare(self) -> None:
        """Make the group to wait on, once; collective. Only gloo can tell who is missing."""
        if self._group is None and dist.get_world_size() > 1:
            own = dist.get_backend() == "gloo"
            world = dist.group.WORLD
            self._group = world if own else dist.new_group(backend="gloo", timeout=self._timeout)

    def wait(self, call: str) -> None:
        """Wait until every rank has come to `call`.

        Raises:
            CheckpointError: When a rank did not come in time.
        """
        if self._group is None:
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise CheckpointError(
                f"Expected every rank to call {call}, but not all came within "
                f"{self._timeout.total_seconds():.0f} s ({str(error).splitlines()[0]}). Each rank "
                "holds its own shards: call it on all ranks, not under `if rank == 0`."
            ) from error
