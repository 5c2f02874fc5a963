"""The prepared optimizers of one engine."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from shardplug.core.quantised import patch_compiled_step
from shardplug.core.weights.late import UntrainedParameters
from shardplug.engine.listener import EngineListener, Listeners
from shardplug.engine.models import ShardedModels
from shardplug.engine.offload import Offload
from shardplug.engine.window import Window
from shardplug.errors import OptimizerError, ScheduleError
from shardplug.optim import Binding, refuse_matrix_optimizer, step_on_shards, try_on_copies

__all__ = ["Optimizers"]

_REPLACED = ("step", "zero_grad", "train", "eval")
"""Methods of an optimizer that are replaced on the object."""

_Before = tuple[dict[str, Any], list[RemovableHandle]]
"""What the object had of them before it was prepared, and the hooks that were registered."""


class Optimizers:
    """Binds optimizers to the shards, and follows their steps.

    Args:
        models: The sharded models.
        window: The micro-batches of a step.
        offload: The tiers.
        listeners: Told of optimizers, phases and errors.
        mesh: The ranks.
        control: All ranks, with messages on the CPU.
        poll_save: Called before each step; raises the error of a save in the background.
    """

    def __init__(
        self,
        models: ShardedModels,
        window: Window,
        offload: Offload,
        listeners: Listeners,
        mesh: DeviceMesh,
        control: dist.ProcessGroup,
        poll_save: Callable[[], None],
    ) -> None:
        self._models = models
        self._window = window
        self._offload = offload
        self._listeners = listeners
        self._mesh = mesh
        self._control = control
        self._poll_save = poll_save
        self._prepared: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Before] = (
            weakref.WeakKeyDictionary()
        )
        self._untrained = UntrainedParameters()
        self.binding = Binding(lambda: models.resting_parameters, lambda: models.modules)

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        """Iterate over the prepared optimizers that are alive, in no fixed order."""
        return iter(list(self._prepared))

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer train the shards: see `ZeroEngine.prepare_optimizer`."""
        if optimizer in self._prepared:
            self.binding.require_known(optimizer, optimizer.param_groups)
            return
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}: unwrap it."
            )
        if not len(self._models):
            raise OptimizerError("Expected engine.shard(model) before prepare_optimizer().")
        refuse_matrix_optimizer(optimizer)
        self.binding.bind(optimizer)
        if not any(p.requires_grad for m in self._models.modules for p in m.parameters()):
            raise OptimizerError(
                "Expected a model with trainable parameters, got nothing to train: all are frozen "
                "(requires_grad=False). Unfreeze some, or leave the optimizer out."
            )
        own = {name: vars(optimizer).get(name) for name in _REPLACED}
        with self._listeners.telling_errors():
            self._listeners.tell(EngineListener.optimizer_bound, optimizer)
            self._make_step(optimizer)
        self._prepared[optimizer] = (own, self._follow(optimizer))

    def release(self) -> None:
        """Give all optimizers their own methods back."""
        while self._prepared:
            optimizer, (own, hooks) = self._prepared.popitem()
            for hook in hooks:
                hook.remove()
            for name, method in own.items():
                if method is None:
                    vars(optimizer).pop(name, None)
                else:
                    setattr(optimizer, name, method)

    def _make_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `step` right for shards."""
        if self._offload.optimizer_tier is not None:
            self._offload.stream(optimizer)
        elif not step_on_shards(optimizer):
            names = {id(p): n for m in self._models.modules for n, p in m.named_parameters()}
            try_on_copies(optimizer, names, self._mesh, self._control)

    def _follow(self, optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
        for name in ("train", "eval"):  # schedule-free optimizers exchange weights in them
            if callable(getattr(optimizer, name, None)):
                setattr(optimizer, name, self._at_rest(getattr(optimizer, name)))
        hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        patch_compiled_step(optimizer)
        self._tell_errors_of_step(optimizer)
        optimizer.zero_grad = functools.partial(  # type: ignore[method-assign]
            self.zero_grad,
            optimizer.zero_grad,
            lambda: {id(p) for group in optimizer.param_groups for p in group["params"]},
        )
        return hooks

    def _tell_errors_of_step(self, optimizer: torch.optim.Optimizer) -> None:
        inner, listeners = optimizer.step, self._listeners

        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            with listeners.telling_errors():
                return inner(*args, **kwargs)

        functools.update_wrapper(step, inner)  # the mark of a scheduler made before comes along
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _at_rest(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Let a method that changes shards run when no gathered copies are left."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._models.reshard()
            return method(*args, **kwargs)

        return call

    # ---------------------------------------------------------------- a step

    def _weights_may_change(self, optimizer: torch.optim.Optimizer) -> None:
        """Get ready for a step: take over what was written to gathered copies, and drop them."""
        self._window.require_boundary("optimizer.step()")
        self._models.require_unmodified("optimizer.step()")
        self._models.reshard()
        for sharded in self._models:
            sharded.calls.writes.raise_refused()
        self._untrained.look(self._models.modules, self, optimizer)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._poll_save()
        if any(sharded.rank_sync.whole.is_open for sharded in self._models):
            raise ScheduleError(
                "Expected optimizer.step() outside of gathered(grad=True), found it inside, where "
                "the whole parameters would keep the values from before the step. Run the backward "
                "inside or after the context, and the step after it."
            )
        streamed = self._offload.streamed(optimizer)
        if streamed is not None:
            streamed.require_entered()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: optimizer
        if closure is None:
            self._weights_may_change(optimizer)
            return args, kwargs

        @functools.wraps(closure)
        def complete() -> Any:
            result = closure()
            self._weights_may_change(optimizer)
            return result

        if "closure" in kwargs:
            return args, {**kwargs, "closure": complete}
        return (args[0], complete, *args[2:]), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._models.reshard()
        for offloaded in self._models.activations:
            offloaded.end_step()
        self._offload.after_step(optimizer)
        self._listeners.tell_phase("after_step")

    def zero_grad(
        self,
        original: Callable[..., None],
        only: Callable[[], set[int] | None],
        set_to_none: bool = True,
    ) -> None:
        """Clear gradients, and what the engine keeps of them.

        Args:
            original: The `zero_grad` of an optimizer or a model.
            only: Returns the ids of the parameters that it is for; None means all.
            set_to_none: As in torch.
        """
        original(set_to_none=set_to_none)
        for streamed in self._offload.all_streamed():
            streamed.gradients_cleared(to_none=set_to_none)
        for sharded in self._models:
            sharded.rank_sync.note_missing_gradients()
        self._window.drop_gradients(only)
