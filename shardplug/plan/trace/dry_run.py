"""The trace of a run's own step, on a model that is already sharded and about to train.

The user's code runs once more than the run needs, on tensors without memory, so nothing that it
does may be seen afterwards: the model's attributes and their containers are put back, the random
numbers are left alone, no message is sent to other ranks, no real tensor is written to. What
cannot be kept to that ends the trace, and the plan goes on with a formula.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardplug.core.gathered.whole_parameters import traced
from shardplug.core.precision import PLAIN_FORWARD
from shardplug.plan.sizes.layout import Placed
from shardplug.plan.trace.dry_modes import Guard, Reads
from shardplug.plan.trace.repeated_blocks import trace_model
from shardplug.plan.trace.trace import Trace, TraceSettings

__all__ = ["DryRun", "dry_run"]

_MACHINERY = ("torch.distributed.", "shardplug.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST_ITEMS = 100_000
_DEEPEST = 4

Step = Callable[[nn.Module, Any], torch.Tensor]
"""Computes the loss of (model, batch)."""


class DryRun:
    """A trace, and what it says of the arithmetic."""

    def __init__(self, trace: Trace, recomputed_flops: int, made_up: int) -> None:
        self.trace = trace
        self.recomputed_flops = recomputed_flops
        """Operations of forwards that the backward computed again, in the blocks that were run."""
        self.made_up = made_up
        """Values that the step looked at outside of modules, to log them as a rule: each was 1."""


def dry_run(
    placed: Placed,
    model: nn.Module,
    batch: Any,
    step: Step,
    settings: TraceSettings,
    *,
    is_entry: bool,
    most_seconds: float,
) -> DryRun:
    """Trace one micro-batch of a sharded model.

    Args:
        placed: The units that the model has.
        model: The sharded model; it is left as it was.
        batch: What the step gets; shapes count, and values of small integer tensors.
        step: Computes the loss, as the run will.
        settings: Device and precision; recomputation is what the model does already.
        is_entry: Whether the step is a method of the model that gathers what `forward` would, as
            `training_step` does, and not a loop that calls the model.
        most_seconds: Give up after so long.

    Raises:
        Exception: Whatever the user's code raises on tensors without values.
    """
    guard = Guard(time.monotonic() + most_seconds)

    reads = Reads()

    def watched(module: nn.Module, inputs: Any) -> torch.Tensor:
        guard.in_backward, guard.recomputed_flops = False, 0
        with reads.following(inside=int(is_entry)), reads:
            loss = _as_forward(module, step, inputs) if is_entry else step(module, inputs)
        guard.in_backward = True
        return loss

    with _laid_open(model), _same_random_numbers(), guard:
        trace = trace_model(placed, model, batch, watched, settings)
    return DryRun(trace, guard.recomputed_flops, reads.made_up)


def _as_forward(model: nn.Module, step: Step, inputs: Any) -> torch.Tensor:
    """Run a step in the place of the model's forward, so that the hooks of the root meet it.

    The step may call the model itself; that is no second entry.
    """
    own = vars(model)

    def forward(batch: Any) -> torch.Tensor:
        put_back()
        hooks = {name: dict(own[name]) for name in _HOOKS}
        for name in hooks:
            own[name].clear()
        try:
            return step(model, batch)
        finally:
            for name, content in hooks.items():
                own[name].update(content)

    before = own.get("forward")

    def put_back() -> None:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before

    own["forward"] = forward
    loss: torch.Tensor = model(inputs)
    return loss


@contextmanager
def _laid_open(model: nn.Module) -> Iterator[None]:
    """The model as its author wrote it: without the hooks and wrappers that gather and reduce."""
    modules = list(model.modules())
    attributes = [(module, dict(vars(module))) for module in modules]
    containers = list(_containers([before for _, before in attributes]))
    token = traced.set(True)
    try:
        for module in modules:
            _strip(module)
        yield
    finally:
        traced.reset(token)
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)
        for container, content in containers:
            _refill(container, content)


def _strip(module: nn.Module) -> None:
    own = vars(module)
    for registry in (own[name] for name in _HOOKS if name in own):
        for key in [key for key, hook in registry.items() if _is_machinery(hook)]:
            del registry[key]
    if PLAIN_FORWARD in own:  # the trace has an autocast of its own
        plain = own[PLAIN_FORWARD]
        del own["forward"]
        if plain is not None:
            own["forward"] = plain
    for name, value in list(own.items()):
        if callable(value) and hasattr(type(module), name) and _gathers(value):
            del own[name]


def _is_machinery(hook: Any) -> bool:
    hook = getattr(hook, "func", hook)  # of a functools.partial
    made_by = getattr(hook, "__module__", None) or type(hook).__module__
    return str(made_by).startswith(_MACHINERY) and not _recomputes(hook)


def _gathers(method: Any) -> bool:
    """Whether a method that stands before the class's is FSDP2's or ours, by its code's file."""
    function = getattr(method, "__func__", method)
    code = getattr(function, "__code__", None)
    file = getattr(code, "co_filename", "").replace("\\", "/")
    return file.endswith("shardplug/core/root.py") or "torch/distributed/" in file


def _recomputes(hook: Any) -> bool:
    return "checkpoint" in str(getattr(hook, "__module__", ""))


def _containers(roots: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    """Yield every list, dictionary, set and deque below some attributes, with its content."""
    seen: set[int] = set()
    level: list[Any] = [value for root in roots for value in root.values()]
    for _ in range(_DEEPEST):
        below: list[Any] = []
        for value in level:
            if not isinstance(value, (list, dict, set, deque)) or id(value) in seen:
                continue
            seen.add(id(value))
            content = dict(value) if isinstance(value, dict) else list(value)
            yield value, content
            if len(content) <= _MOST_ITEMS:
                below += content.values() if isinstance(content, dict) else content
        level = below


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        if container.keys() == content.keys() and all(
            container[key] is value for key, value in content.items()
        ):
            return
        container.clear()
        container.update(content)
    elif isinstance(container, set):
        container.clear()
        container.update(content)
    elif len(container) != len(content) or any(
        one is not two for one, two in zip(container, content, strict=True)
    ):
        container.clear()
        container.extend(content)


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leave the states of Python's, numpy's and torch's CPU generators as they were."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    array = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(array)
