"""What runs when an optimizer's `step` is called."""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardplug.core._torch.tensors import laid_out_like, local_tensor
from shardplug.optim.classes import Runner, is_elementwise, is_like

__all__ = ["replace_step", "step_is_replaced", "step_on_shards"]


def step_is_replaced(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` was replaced on the object, other than by a learning-rate scheduler."""
    own = vars(optimizer).get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def replace_step(
    optimizer: torch.optim.Optimizer,
    run: Callable[[torch.optim.Optimizer], None],
    entering: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Put a method in the place of the class's `step`, with torch's hooks and profiler range.

    Args:
        optimizer: The optimizer; schedulers made before or after keep counting its steps.
        run: Updates the parameters from their gradients.
        entering: Makes a context around the hooks and `run`.
    """

    def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        run(optimizer)
        return loss

    hooked = torch.optim.Optimizer.profile_hook_step(step)
    scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")  # by a scheduler made before

    def enter(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if scheduled:
            optimizer._opt_called = True  # type: ignore[attr-defined]
        with entering():
            return hooked(optimizer, *args, **kwargs)

    if scheduled:
        enter._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = types.MethodType(enter, optimizer)  # type: ignore[method-assign]


def step_on_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Let an optimizer step this rank's rows as plain tensors, where that is the same. In place.

    The class's own arithmetic runs on the local part of each parameter, gradient and state. That
    needs no rule of DTensor for the operations (fused kernels have none), and costs no dispatch.
    What the state holds are DTensors as before.

    Args:
        optimizer: The user's optimizer, over sharded parameters.

    Returns:
        Whether it is: False for a class whose update is not known to treat each element alone.
    """
    if not is_elementwise(type(optimizer)) or step_is_replaced(optimizer):
        return False
    runner = Runner(optimizer)
    replace_step(optimizer, lambda optimizer: _run_on_shards(runner, optimizer))
    return True


@torch.no_grad()
def _run_on_shards(runner: Runner, optimizer: torch.optim.Optimizer) -> None:
    parts: dict[torch.Tensor, torch.Tensor] = {}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        own = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            part = local_tensor(parameter).detach()
            part.grad = local_tensor(parameter.grad)
            parts[part] = parameter
            own.append(part)
            if parameter in optimizer.state:
                states[part] = {
                    key: local_tensor(value) if isinstance(value, torch.Tensor) else value
                    for key, value in optimizer.state[parameter].items()
                }
        groups.append({**group, "params": own})
    for part, made in runner.run(optimizer, groups, states).items():
        state = optimizer.state[parts[part]]
        before = states.get(part, {})
        for key, value in made.items():
            if key not in before or value is not before[key]:
                state[key] = laid_out_like(value, parts[part]) if is_like(value, part) else value
