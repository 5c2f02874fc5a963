"""Small messages between ranks that keep their schedules and gradients in agreement."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from shardplug.core._torch import (
    BackwardWatch,
    all_gather_flat,
    managed_parameters,
    watch_collectives,
)
from shardplug.errors import ScheduleError

__all__ = ["Agreement", "control_group"]


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
    - Ranks that gather or reduce different units would exchange the wrong bytes, or wait for
      each other for ever. With `check_order` each collective is preceded by a message of 8 bytes
      a rank; without it the order is compared once per window, before the optimizer can step.

    Args:
        root: The sharded model.
        replicated: Parameters that every rank holds whole.
        group: The CPU-side group over all ranks.
        check_order: Compare before every collective.
        on_backward: Called when a backward reaches a unit.
    """

    def __init__(
        self,
        root: nn.Module,
        replicated: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        check_order: bool,
        on_backward: Callable[[], None],
    ) -> None:
        self._group = group
        self._world_size = dist.get_world_size(group)
        self._parameters = managed_parameters(root)
        self._replicated = [p for p in replicated if p.is_floating_point()]
        self._watch = BackwardWatch(root, on_backward)
        self._order = 0
        self._check_order = check_order and self._world_size > 1
        self._without_grad: list[nn.Parameter] | None = None
        names = {module: name or "the root" for name, module in root.named_modules()}
        self._units: list[str] = []
        if self._world_size > 1:
            watch_collectives(root, self._before_collective, self._units, names)

    def _before_collective(self, kind: str, unit: int) -> None:
        code = unit * 2 + (kind == "reduce")
        # A running checksum, kept below 2**31 so that the sum over ranks stays exact.
        self._order = zlib.crc32(code.to_bytes(4, "little"), self._order) & 0x7FFFFFFF
        if self._check_order:
            self._compare(code)

    def _compare(self, code: int) -> None:
        mine = torch.tensor([code], dtype=torch.int64)
        everyone = torch.empty(self._world_size, dtype=torch.int64)
        all_gather_flat(everyone, mine, group=self._group)
        if bool((everyone == code).all()):
            return
        raise ScheduleError(self._diverged(everyone.tolist()))

    def _diverged(self, codes: list[int]) -> str:
        def describe(code: int) -> str:
            if code < 0:
                return "had finished its backward"
            verb = "reduces the gradients of" if code % 2 else "gathers"
            return f"{verb} {self._units[code // 2]}"

        rows = "; ".join(f"rank {rank} {describe(code)}" for rank, code in enumerate(codes))
        return (
            f"Expected every rank to use the same units in the same order, but {rows}. A branch "
            "that only some ranks take must not be a unit of its own: leave its class out of "
            "`units`, or run it on every rank (for example with an empty input times zero)."
        )

    def window_opens(self) -> None:
        """Remember which parameters have no gradient before the window's first forward."""
        if self._without_grad is None:
            self._without_grad = [p for p in self._parameters if p.grad is None]

    def window_closes(self) -> None:
        """Bring the gradients of the window to their final values. Collective.

        Raises:
            ScheduleError: On every rank, when the ranks' schedules differed.
        """
        self._average_replicated()
        fresh = self._without_grad or []
        self._without_grad = None
        if self._world_size > 1:
            if self._check_order:
                self._compare(-1)
            used = self._agree_on_used()
        else:
            used = self._watch.used
        for parameter in fresh:
            if id(parameter) not in used:
                parameter.grad = None
        self._watch.used.clear()
        self._order = 0

    def _agree_on_used(self) -> set[int]:
        message = torch.zeros(1 + len(self._parameters), dtype=torch.int64)
        message[0] = self._order
        for index, parameter in enumerate(self._parameters):
            message[1 + index] = id(parameter) in self._watch.used
        dist.all_reduce(message, group=self._group)
        if int(message[0]) != self._order * self._world_size:
            raise ScheduleError(
                "Expected every rank to gather and reduce the same units in the same order in "
                "this window, but the ranks' orders differ: gradients of different units may "
                "have been mixed. A branch that only some ranks take must not be a unit of its "
                "own: leave its class out of `units`."
            )
        flags = message[1:].tolist()
        return {id(p) for p, count in zip(self._parameters, flags, strict=True) if count}

    def _average_replicated(self) -> None:
        trained = [p for p in self._replicated if p.requires_grad]
        if not trained or self._world_size == 1:
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
        self._without_grad = None
        self._watch.used.clear()
        self._order = 0

