"""Hooks on parameters, and gradients that autograd itself brings to shards.

FSDP2 writes a shard's gradient by itself, so that autograd calls no hook of
`Tensor.register_hook`. They are called here when a window closes, once, with the reduced gradient,
whole, as one process would see it; each rank keeps its own rows of what comes back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardplug.core._torch.gradients import UserHooks, follow_hooks, take_over_hooks
from shardplug.core._torch.tensors import laid_out_like, local_tensor, share_memory, version_of
from shardplug.core.gathered.outside_use import note_own_gradient
from shardplug.core.tier_tensor import in_tier
from shardplug.errors import ModelError, ScheduleError

__all__ = ["GradientHooks", "HooksBefore"]

HooksBefore = Mapping[str, tuple[dict[int, Any], dict[int, Any]]]
"""By a parameter's name, its hooks on the gradient and those for after its accumulation."""


class GradientHooks:
    """The hooks on one model's sharded parameters.

    Args:
        named: The sharded parameters, by name.
        before: Hooks that the parameters had before they were sharded, by name, as `hooks_on`
            returns them.
        on_gradient: Called with a shard before autograd itself adds to its gradient.
        device: Where gradients are reduced.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        before: HooksBefore,
        on_gradient: Callable[[nn.Parameter], None],
        device: torch.device,
    ) -> None:
        self._device = device
        self._on_gradient = on_gradient
        self._hooks: list[tuple[str, nn.Parameter, UserHooks]] = []
        for name, parameter in named:
            on_gradients, after = before.get(name, ({}, {}))
            # Weak: Python's collector does not see what a parameter's hook refers to.
            own = functools.partial(_arrives, weakref.ref(self), len(self._hooks))
            self._hooks.append((name, parameter, follow_hooks(parameter, own, on_gradients)))
            take_over_hooks(parameter, after)

    @property
    def counts(self) -> list[int]:
        """Per parameter, 1 where this rank has hooks and 0 where it has none."""
        return [int(bool(hooks.users)) for _, _, hooks in self._hooks]

    def call(self, counts: Sequence[int], group: dist.ProcessGroup) -> None:
        """Call the hooks on final gradients. Collective.

        Args:
            counts: Of each parameter, the ranks that have hooks on it.
            group: All ranks, with messages on the CPU.

        Raises:
            ScheduleError: On every rank, when a gradient is changed by some ranks' hooks only.
        """
        for (name, parameter, hooks), count in zip(self._hooks, counts, strict=True):
            if not count or parameter.grad is None:
                continue
            whole = self._whole(parameter)
            new = whole
            version = version_of(whole)
            for hook in tuple(hooks.users.values()):
                result = hook(new)
                new = new if result is None else result
            changed = new is not whole or version_of(whole) != version
            if count < dist.get_world_size(group):
                some = torch.tensor(int(changed))
                dist.all_reduce(some, group=group)
                if int(some):
                    raise ScheduleError(
                        f"Expected the hooks on {name} that change its gradient on every rank, "
                        f"found hooks on {count} of {dist.get_world_size(group)} ranks. Register "
                        "them on all ranks; on some only a hook may look, and return None."
                    )
            elif changed:
                self._keep(name, parameter, new)

    def _whole(self, parameter: nn.Parameter) -> torch.Tensor:
        assert parameter.grad is not None
        local = local_tensor(parameter.grad).to(self._device)
        whole = laid_out_like(local, parameter)
        if isinstance(whole, DTensor):
            whole = whole.full_tensor()
        return whole.clone() if share_memory(whole, local) else whole

    def _keep(self, name: str, parameter: nn.Parameter, new: torch.Tensor) -> None:
        if new.shape != parameter.shape:
            raise ModelError(
                f"Expected a hook on {name} to return a gradient of shape "
                f"{tuple(parameter.shape)}, got {tuple(new.shape)}."
            )
        assert parameter.grad is not None
        if isinstance(parameter, DTensor):
            new = distribute_tensor(
                new, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            local_tensor(parameter.grad).copy_(local_tensor(new))


def _arrives(
    owner: weakref.ref[GradientHooks], index: int, grad: torch.Tensor
) -> torch.Tensor | None:
    """Prepare for a gradient of a loss that was made of the shard itself, as a DTensor."""
    hooks = owner()
    if hooks is None:
        return None
    name, parameter, _ = hooks._hooks[index]
    if in_tier(local_tensor(parameter)) is not None:
        raise ModelError(
            f"Expected a loss of whole parameters, got one of the shard of {name}, which rests in "
            "files. Make it inside `with engine.gathered(model, grad=True):`."
        )
    note_own_gradient(parameter)
    hooks._on_gradient(parameter)
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
        if grad.placements != parameter.placements:
            return grad.redistribute(placements=parameter.placements)
    return None
