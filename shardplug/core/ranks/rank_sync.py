"""Small messages between ranks that keep their schedules and gradients in agreement."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardplug.core._torch.collectives import announce_collectives, set_collectives, set_replica_sum
from shardplug.core._torch.gradients import (
    BackwardWatch,
    after_root_backward,
    may_reduce_late,
    wait_for_reductions,
)
from shardplug.core._torch.groups import (
    managed_parameters,
    named_managed_parameters,
    refresh_dtypes,
    replaced_parameters,
    replicas_of,
    unit_groups,
)
from shardplug.core.gathered.outside_use import note_names
from shardplug.core.gathered.whole_parameters import WholeParameters
from shardplug.core.gradient_hooks import GradientHooks, HooksBefore
from shardplug.core.ranks.collective_order import CollectiveOrder
from shardplug.core.ranks.peer import InFlight, PeerGather, PeerReduce, ReplicaSum
from shardplug.core.ranks.shared_buffers import SharedBuffers
from shardplug.core.weights.late import LateParameters
from shardplug.errors import ModelError

__all__ = ["RankSync", "control_group", "drain_gloo_at_exit"]


@functools.cache
def drain_gloo_at_exit() -> None:
    """Let gloo's threads finish before the interpreter goes. Once per process.

    A thread of gloo lets go of the last collective's tensors a moment after the collective has
    returned, for which it needs the interpreter; one that asks during its end is ended by force,
    and takes the process down ("terminate called without an active exception", SIGABRT).
    """

    def settle() -> None:
        for _ in range(20):
            time.sleep(0.01)  # gives the interpreter away each time

    atexit.register(settle)


def control_group(device: torch.device) -> dist.ProcessGroup:
    """Return a group over all ranks whose messages live on the CPU.

    Collective: on an accelerator it makes a new group.
    """
    if device.type == "cpu":
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    return group


class RankSync:
    """Keeps one model's ranks in step.

    - After the last backward of a window, gradients of parameters that FSDP2 does not shard are
      averaged, and parameters that no rank used lose the zero gradient they were given.
    - Ranks must gather and reduce the same units in the same order; where they part, every rank
      gets an error (see `CollectiveOrder`). On CPU ranks the collectives are direct messages
      (see `peer`).
    - Buffers that training changes are rank 0's on every rank (see `SharedBuffers`): after each
      backward, and before the first evaluation after training.

    Args:
        root: The sharded model.
        replicated: Parameters that every rank holds whole.
        group: The CPU-side group over all ranks.
        mesh: That the model is sharded over, of one axis or two (replicas, shards).
        index: Number of the model within the engine.
        on_backward: Called when a backward reaches a unit.
        direct: Whether the collectives are direct messages between CPU ranks, each of which is
            compared, or torch's own, compared once per window. None means what the device needs.
        hooks_before: Hooks that the parameters had before the model was sharded, by name.
    """

    def __init__(
        self,
        root: nn.Module,
        replicated: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        mesh: DeviceMesh,
        index: int,
        on_backward: Callable[[], None],
        direct: bool | None = None,
        hooks_before: HooksBefore | None = None,
    ) -> None:
        self._root = root
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._parameters = managed_parameters(root)
        self._replicated = [p for p in replicated if p.is_floating_point() or p.is_complex()]
        self._late = LateParameters(root, replicated)
        self._watch = BackwardWatch(root, on_backward)
        self._on_backward = on_backward
        note_names(root)
        self._hooks = GradientHooks(
            named_managed_parameters(root),
            hooks_before or {},
            self._gradient_comes,
            torch.device(mesh.device_type),
        )
        self.whole = WholeParameters(root, self._watch)
        """Whole parameters with gradients, in contexts that the engine opens."""
        self._without_grad: list[nn.Parameter] = []
        self._hook_counts: list[int] = []
        direct = mesh.device_type == "cpu" if direct is None else direct
        self._order = CollectiveOrder(
            group,
            compare=direct,
            first_code=index << 16,
            parts=[mesh.get_group(axis) for axis in range(mesh.ndim)],
        )
        self._in_flight = InFlight()
        self._buffers = SharedBuffers(root, group)
        if self._world_size > 1:
            for unit, (name, parameters) in enumerate(unit_groups(root)):
                self._order.units.append(name)
                if direct:
                    self._exchange_directly(unit, parameters)
                else:
                    announce = functools.partial(self._order.announce, unit=unit)
                    announce_collectives(parameters, announce)
            after_root_backward(root, self._in_flight.complete)

    def _exchange_directly(self, unit: int, parameters: Any) -> None:
        may_wait = functools.partial(may_reduce_late, parameters)
        replicas = replicas_of(parameters)
        now_or_later = may_wait if replicas is None else lambda _: False
        set_collectives(
            parameters,
            PeerGather(self._order, unit),
            PeerReduce(self._order, unit, self._in_flight, now_or_later),
        )
        if replicas is not None:
            total = ReplicaSum(self._order, unit, replicas, self._in_flight, may_wait)
            set_replica_sum(parameters, total)

    def window_opens(self) -> None:
        """Look at the parameters before the window's first backward.

        Raises:
            ModelError: When a parameter was added, replaced, or unfrozen in a low dtype, after
                sharding.
        """
        if not self._watch.ran:
            if replaced := replaced_parameters(self._root):
                raise ModelError(
                    f"Expected {', '.join(replaced[:4])} to be the parameter that was sharded, but "
                    "it was replaced. Tie, replace or resize weights before engine.shard(model)."
                )
            self._late.require_none()
            if lacking := refresh_dtypes(self._root):
                raise ModelError(
                    f"Expected {', '.join(lacking[:4])} to stay frozen: frozen when the model was "
                    "sharded, they were kept in their low dtype, without the fp32 master weights "
                    "of mixed precision. Load the model in fp32, or freeze after engine.shard()."
                )
            self.note_missing_gradients()

    def note_missing_gradients(self) -> None:
        """Remember which parameters have no gradient, as long as no backward has run."""
        if not self._watch.ran:
            self._without_grad = [p for p in self._parameters if p.grad is None]

    def window_closes(self) -> None:
        """Bring the gradients of the window to their final values. Collective.

        Raises:
            ScheduleError: On every rank, when the ranks' schedules differed.
        """
        fresh, self._without_grad = self._without_grad, []
        if self._world_size > 1:
            # Before any other message, which could be taken for one of a rank that is not through.
            used = self._agree_on_used()
            self._average_replicated()
        else:
            used, self._hook_counts = self._watch.used, self._hooks.counts
        for parameter in fresh:
            if id(parameter) not in used:
                parameter.grad = None
        self._hooks.call(self._hook_counts, self._group)
        self._watch.restart()
        self._order.restart()

    def backward_ends(self) -> None:
        """Give every rank rank 0's buffers after a backward. Collective.

        Raises:
            ScheduleError: On every rank, when some have more to do.
        """
        if self._buffers:
            self._order.require_end()
            self._buffers.share()

    def evaluation_begins(self) -> None:
        """Give every rank rank 0's buffers before the first evaluation after training. Collective.

        Raises:
            ScheduleError: On every rank, when some begin no evaluation.
        """
        if self._buffers:
            self._order.evaluation_begins()
            self._buffers.share()

    def call_ends(self) -> None:
        """Compare that every rank is through with an evaluation step's gathers (CPU ranks).

        Raises:
            ScheduleError: On every rank, when some have more to do.
        """
        if self._world_size > 1:
            self._order.require_end()

    def _agree_on_used(self) -> set[int]:
        # One number for both counts of a parameter, neither of which is above the world size.
        base = self._world_size + 1
        pairs = zip(self._parameters, self._hooks.counts, strict=True)
        seen = [int(id(p) in self._watch.used) + base * hooks for p, hooks in pairs]
        total = self._order.end(torch.tensor([self._order.checksum, *seen])).tolist()
        self._order.require_same(total[0])
        flags = [count % base for count in total[1:]]
        self._hook_counts = [count // base for count in total[1:]]
        return {id(p) for p, count in zip(self._parameters, flags, strict=True) if count}

    def _gradient_comes(self, parameter: nn.Parameter) -> None:
        """A loss was made of the shard itself: autograd is about to add to its gradient."""
        self._in_flight.complete()
        wait_for_reductions(self._root)
        self._watch.used.add(id(parameter))
        self._watch.ran = True
        self._on_backward()

    def _average_replicated(self) -> None:
        trained = [p for p in self._replicated if p.requires_grad]
        if not trained:
            return
        device = trained[0].device
        pieces: list[torch.Tensor] = [
            torch.zeros(_real_size(p), device=device)
            if p.grad is None
            else _as_real(p.grad).float()
            for p in trained
        ]
        has_grad = torch.tensor([float(p.grad is not None) for p in trained], device=device)
        flat = torch.cat([*pieces, has_grad])
        dist.all_reduce(flat)
        flat[: -len(trained)].div_(self._world_size)
        counts = flat[-len(trained) :].tolist()
        offset = 0
        for parameter, count in zip(trained, counts, strict=True):
            size = _real_size(parameter)
            if count:
                average = flat[offset : offset + size]
                if parameter.is_complex():
                    average = torch.view_as_complex(average.view(-1, 2))
                average = average.view_as(parameter).to(parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = average.clone()
                else:
                    parameter.grad.copy_(average)
            offset += size

    def reset(self) -> None:
        """Forget a window that was not completed."""
        self._without_grad = []
        if self._order.parted is not None:
            self._in_flight.drop()
        self._in_flight.complete()
        self.whole.reset()
        self._watch.restart()
        self._order.restart()


def _real_size(tensor: torch.Tensor) -> int:
    return tensor.numel() * (2 if tensor.is_complex() else 1)


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
