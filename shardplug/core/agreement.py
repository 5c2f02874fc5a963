"""Small messages between ranks that keep their schedules and gradients in agreement."""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardplug.core import _torch
from shardplug.core.late import LateParameters
from shardplug.core.order import Order
from shardplug.core.peer import InFlight, PeerGather, PeerReduce
from shardplug.errors import ModelError

__all__ = ["Agreement", "control_group", "settle_at_exit"]


@functools.cache
def settle_at_exit() -> None:
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


class Agreement:
    """Keeps one model's ranks in step.

    - After the last backward of a window, gradients of parameters that FSDP2 does not shard are
      averaged, and parameters that no rank used lose the zero gradient they were given.
    - Ranks must gather and reduce the same units in the same order; where they part, every rank
      gets an error (see `Order`). On CPU ranks the collectives are direct messages (see `peer`).

    Args:
        root: The sharded model.
        replicated: Parameters that every rank holds whole.
        group: The CPU-side group over all ranks.
        device: Where the model is.
        index: Number of the model within the engine.
        on_backward: Called when a backward reaches a unit.
    """

    def __init__(
        self,
        root: nn.Module,
        replicated: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        device: torch.device,
        index: int,
        on_backward: Callable[[], None],
    ) -> None:
        self._root = root
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._parameters = _torch.managed_parameters(root)
        self._replicated = [p for p in replicated if p.is_floating_point()]
        self._late = LateParameters(root, replicated)
        self._watch = _torch.BackwardWatch(root, on_backward)
        self._without_grad: list[nn.Parameter] = []
        self._order = Order(group, compare=device.type == "cpu", first_code=index << 16)
        self._in_flight = InFlight()
        if self._world_size > 1:
            self._direct_collectives(root, device)

    def _direct_collectives(self, root: nn.Module, device: torch.device) -> None:
        for unit, (name, group) in enumerate(_torch.unit_groups(root)):
            self._order.units.append(name)
            if device.type == "cpu":
                may_wait = functools.partial(_torch.may_reduce_late, group)
                _torch.set_collectives(
                    group,
                    PeerGather(self._order, unit),
                    PeerReduce(self._order, unit, self._in_flight, may_wait),
                )
            else:
                _torch.announce_collectives(
                    group, functools.partial(self._order.announce, unit=unit)
                )
        _torch.after_root_backward(root, self._in_flight.complete)

    def window_opens(self) -> None:
        """Look at the parameters before the window's first backward.

        Raises:
            ModelError: When a parameter was added, replaced, or unfrozen in a low dtype, after
                sharding.
        """
        if not self._watch.ran:
            if replaced := _torch.replaced_parameters(self._root):
                raise ModelError(
                    f"Expected {', '.join(replaced[:4])} to be the parameter that was sharded, but "
                    "it was replaced. Tie, replace or resize weights before engine.shard(model)."
                )
            self._late.require_none()
            if lacking := _torch.refresh_dtypes(self._root):
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
            self._order.end()  # before any other message, which would meet one of another rank's
            self._average_replicated()
            used = self._agree_on_used()
        else:
            used = self._watch.used
        for parameter in fresh:
            if id(parameter) not in used:
                parameter.grad = None
        self._watch.restart()
        self._order.restart()

    def call_ends(self) -> None:
        """Compare that every rank is through with an evaluation step's gathers (CPU ranks).

        Raises:
            ScheduleError: On every rank, when some have more to do.
        """
        if self._world_size > 1:
            self._order.end()

    def _agree_on_used(self) -> set[int]:
        message = torch.zeros(1 + len(self._parameters), dtype=torch.int64)
        message[0] = self._order.checksum
        for index, parameter in enumerate(self._parameters):
            message[1 + index] = id(parameter) in self._watch.used
        dist.all_reduce(message, group=self._group)
        self._order.require_same(int(message[0]))
        flags = message[1:].tolist()
        return {id(p) for p, count in zip(self._parameters, flags, strict=True) if count}

    def _average_replicated(self) -> None:
        trained = [p for p in self._replicated if p.requires_grad]
        if not trained:
            return
        device = trained[0].device
        pieces: list[torch.Tensor] = [
            torch.zeros(p.numel(), device=device) if p.grad is None else p.grad.reshape(-1).float()
            for p in trained
        ]
        has_grad = torch.tensor([float(p.grad is not None) for p in trained], device=device)
        flat = torch.cat([*pieces, has_grad])
        dist.all_reduce(flat)
        flat[: -len(trained)].div_(self._world_size)
        counts = flat[-len(trained) :].tolist()
        offset = 0
        for parameter, count in zip(trained, counts, strict=True):
            size = parameter.numel()
            if count:
                average = flat[offset : offset + size].view_as(parameter).to(parameter.dtype)
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
        self._watch.restart()
        self._order.restart()
