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
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from shardplug.core._torch import (
    TorchDispatchMode,
    is_copy,
    is_read_of_value,
    tree_leaves,
    written_tensors,
)
from shardplug.core.precision import PLAIN_FORWARD
from shardplug.memory.layout import Placed
from shardplug.memory.recorder import flops_of
from shardplug.memory.repeat import trace_model
from shardplug.memory.trace import Trace, TraceSettings

__all__ = ["DryRun", "dry_run"]

_MACHINERY = ("torch.distributed.", "shardplug.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MOST_ITEMS = 100_000
_DEEPEST = 4
_COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")

Step = Callable[[nn.Module, Any], torch.Tensor]
"""Computes the loss of (model, batch)."""


class _Refused(Exception):
    """The step does what a trace beside a run must not do."""


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
    guard = _Guard(time.monotonic() + most_seconds)

    reads = _Reads()

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
    try:
        for module in modules:
            _strip(module)
        yield
    finally:
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


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands out values that nobody has, where no module is at work.

    Steps log what they have computed: `loss.item()`, `loss.detach().cpu()`. Inside of a module a
    value decides what is computed next, and the trace has to end.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made_up = 0
        self._depth = 0

    @contextmanager
    def following(self, inside: int) -> Iterator[None]:
        """Know whether a module is at work, beyond those that the step itself is in."""
        self._depth = -inside
        enter = register_module_forward_pre_hook(lambda *_: self._count(1))
        leave = register_module_forward_hook(lambda *_: self._count(-1), always_call=True)
        try:
            yield
        finally:
            enter.remove()
            leave.remove()

    def _count(self, by: int) -> None:
        self._depth += by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._depth <= 0 and args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            if is_read_of_value(func):
                self.made_up += 1
                return torch.ones((), dtype=args[0].dtype).item()
            if is_copy(func):
                kwargs = {**kwargs, "device": args[0].device}
        return func(*args, **kwargs)


class _Guard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that would be seen outside of the trace, and counts recomputation."""

    def __init__(self, deadline: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_backward = False
        self.recomputed_flops = 0
        self._deadline = deadline
        self._made: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise _Refused(f"the step talks to other ranks ({func})")
        if time.monotonic() > self._deadline:
            raise _Refused("tracing the step takes too long")
        if not all(self._is_own(tensor) for tensor in written_tensors(func, args, kwargs)):
            raise _Refused(f"the step writes to a tensor that is no parameter ({func})")
        output = func(*args, **kwargs)
        for value in tree_leaves(output):
            if isinstance(value, torch.Tensor) and not value.is_meta:
                storage = value.untyped_storage()
                self._made[id(storage)] = weakref.ref(storage)
        # A backward runs without recording, but for a forward that it computes again.
        if self.in_backward and torch.is_grad_enabled():
            self.recomputed_flops += flops_of(func, args, kwargs, output)
        return output

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has no memory, or memory that the trace has made."""
        if tensor.is_meta:
            return True
        storage = tensor.untyped_storage()
        known = self._made.get(id(storage))
        return known is not None and known() is storage
