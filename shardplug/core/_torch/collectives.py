"""FSDP2's gathers and reductions, and the process group's store."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "announce_collectives",
    "close_mesh",
    "default_tcp_store",
    "set_collectives",
    "set_replica_sum",
]


def set_collectives(group: Any, gather: Any, reduce: Any) -> None:
    """Give a parameter group its own all-gather and reduce-scatter."""
    group._all_gather_comm = gather
    group._reduce_scatter_comm = reduce


def set_replica_sum(group: Any, replicas: Any) -> None:
    """Let something else than a process group sum a parameter group's gradients over replicas.

    Args:
        group: A parameter group with replicas.
        replicas: Has a process group's `size` and `allreduce`, and as `error` what the latter has
            raised.
    """
    group.mesh_info.replicate_process_group = replicas
    group.post_backward = functools.partial(_raise_own, replicas, group.post_backward)


def _raise_own(replicas: Any, original: Callable[..., None], *unused: Any) -> None:
    try:
        original(*unused)
    except ValueError:
        if replicas.error is not None:
            raise replicas.error from None
        raise


def announce_collectives(group: Any, before: Callable[[str], object]) -> None:
    """Call `before("gather")` or `before("reduce")` ahead of a group's own collectives."""
    set_collectives(
        group,
        _Announced(group._all_gather_comm, functools.partial(before, "gather")),
        _Announced(group._reduce_scatter_comm, functools.partial(before, "reduce")),
    )


class _Announced:
    """A collective that says when it starts."""

    def __init__(self, comm: Any, before: Callable[[], object]) -> None:
        self._comm = comm
        self._before = before

    def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        buffer: torch.Tensor = self._comm.allocate(*args, **kwargs)
        return buffer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        return self._comm(*args, **kwargs)


def close_mesh(mesh: DeviceMesh) -> None:
    """Destroy the group of a mesh with one axis.

    DTensor's caches keep meshes, and a mesh keeps its group: without letting go of it the group's
    connections would stay open, and ranks that wait for this one would go on waiting.
    """
    dist.destroy_process_group(mesh.get_group())
    getattr(mesh, "_pg_registry", {}).clear()


def default_tcp_store() -> Any | None:
    """Return the store that the default process group met in; None unless it is a TCPStore."""
    module: Any = dist  # which does not declare that it exports the classes
    store = module.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, module.PrefixStore):
        inner = inner.underlying_store
    return store if isinstance(inner, module.TCPStore) else None
