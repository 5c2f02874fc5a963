"""What happens around the outermost call into a sharded model."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from shardplug.core._torch.calls import register_extra_outputs
from shardplug.core._torch.groups import CONVERT_BEFORE, changed_layout, resting_layouts
from shardplug.core._torch.resharding import (
    before_state_dict,
    forwards_so_far,
    reshard_all,
    reshard_own,
)
from shardplug.core.gathered.writes import GatheredWrites
from shardplug.core.hooks import outside_of_graphs
from shardplug.core.stage import Stage
from shardplug.errors import ModelError, ScheduleError

__all__ = ["CallEvents", "KeptOutputs", "RootForwardHooks", "refuse_state_dict"]


class CallEvents:
    """Told of outermost calls into a sharded model; a method does nothing unless overridden."""

    def before_training_call(self, method: str, args: Any, kwargs: Any) -> None:
        """Before a call that records gradients."""

    def after_any_call(self) -> None:
        """After a call, before anything else."""

    def on_error(self, error: BaseException) -> None:
        """After `after_any_call`, with the exception that ends the call."""

    def after_training_call(self) -> None:
        """After a call that records gradients."""

    def after_call_at_rest(self) -> None:
        """Last, after any call for which no parameters are held whole."""

    def after_evaluating_method(self) -> None:
        """After one of `methods` without gradients, with no parameter held whole."""

    def before_evaluation(self) -> None:
        """Before the first call in evaluation mode without gradients after one that trained, or
        before parameters are held whole."""


class RootForwardHooks:
    """Follows calls into the root's forward and its other computing methods.

    FSDP2 keeps the root's parameters gathered after a forward. They are dropped here at the end
    of the outermost call, when the stage says so, and all of the model's after a call without
    gradients: else code that runs after an evaluation would read, or write, plain copies.

    Args:
        root: The sharded model.
        stage: The row of the stage table.
        methods: Other methods of the root that compute with its parameters.
        events: What is told of outermost calls.
    """

    def __init__(
        self, root: nn.Module, stage: Stage, methods: Sequence[str], events: CallEvents
    ) -> None:
        self._root = root
        self._stage = stage
        self._events = events
        self._trained = False
        self._layouts: list[tuple[Any, torch.dtype, torch.device]] = []
        self._depth = 0
        self._held: Counter[FSDPModule] = Counter()
        self._no_state_dict: dict[FSDPModule, RemovableHandle] = {}
        self._forget_forwards: Callable[[], None] | None = None
        root.register_forward_pre_hook(
            outside_of_graphs(lambda _, args, kwargs: self._enter("forward", args, kwargs)),
            prepend=True,
            with_kwargs=True,
        )
        root.register_forward_hook(outside_of_graphs(lambda *_: self._leave()), always_call=True)
        for name in methods:
            setattr(root, name, self._followed(name, getattr(root, name)))
        self.writes = GatheredWrites(root)
        """What keeps writes to gathered parameters."""

    def _followed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(name, args, kwargs)
            try:
                result = method(*args, **kwargs)
            finally:
                self._leave()
            if self._depth == 0 and not torch.is_grad_enabled() and not self._held:
                self._events.after_evaluating_method()
            return result

        return call

    def note_layouts(self) -> None:
        """Remember dtypes and devices of the shards: a model that differs later was converted.

        For a root that has been settled, as FSDP2 only then takes over parameters that were
        replaced while it was sharded.
        """
        self._layouts = resting_layouts(self._root)

    # ---------------------------------------------------------------- whole parameters

    def hold(self, part: nn.Module) -> list[FSDPModule]:
        """Gather the units that `part` computes with, and keep them whole. Collective.

        Args:
            part: The model, or a module in it.

        Returns:
            The units, for `release`.
        """
        inside = set(part.modules())
        units: list[FSDPModule] = [
            unit
            for unit in self._root.modules()
            if isinstance(unit, FSDPModule) and (unit in inside or part in set(unit.modules()))
        ]
        self._leave_training()
        self._held.update(units)
        self._begin_evaluation()
        try:
            for unit in units:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
                if unit not in self._no_state_dict:
                    self._no_state_dict[unit] = before_state_dict(
                        cast(nn.Module, unit), refuse_state_dict
                    )
        except BaseException:
            self.release(units)
            raise
        return units

    def release(self, units: Sequence[FSDPModule]) -> None:
        """End a `hold`; what no other one keeps is sharded again."""
        self._held.subtract(units)
        self._held = +self._held
        for unit in units:
            if unit not in self._held and unit in self._no_state_dict:
                self._no_state_dict.pop(unit).remove()
            if unit not in self._held and unit is not cast(FSDPModule, self._root):
                unit.set_reshard_after_forward(self._stage.reshard_after_forward, recurse=False)
        self._reshard()

    @property
    def holds(self) -> bool:
        """Whether parameters are held whole."""
        return bool(self._held)

    def is_held(self, part: nn.Module) -> bool:
        """Whether every unit that `part` has is held whole."""
        units = [unit for unit in part.modules() if isinstance(unit, FSDPModule)]
        return bool(self._held) and all(unit in self._held for unit in units)

    def _leave_training(self) -> None:
        if self._trained and not self._held:
            self._trained = False
            self._events.before_evaluation()

    def _begin_evaluation(self) -> None:
        if self._forget_forwards is None:
            self._forget_forwards = forwards_so_far(self._root)

    def _reshard(self) -> None:
        if not self._held:
            if self._forget_forwards is not None:
                self._forget_forwards()
                self._forget_forwards = None
            reshard_all(self._root)
            return
        for unit in self._root.modules():
            if isinstance(unit, FSDPModule) and unit not in self._held:
                reshard_own(unit)

    # ---------------------------------------------------------------- calls

    def _enter(self, method: str, args: Any, kwargs: Any) -> None:
        if torch.is_inference_mode_enabled():
            raise ScheduleError(
                "Expected torch.no_grad() around an evaluation, found torch.inference_mode(): "
                "gathered parameters made there cannot be trained with afterwards."
            )
        if self._held and torch.is_grad_enabled():
            raise ScheduleError(
                "Expected forwards without gradients while parameters are held whole (gathered()), "
                "found gradients enabled: no backward can follow. Train outside of the context."
            )
        if self._depth == 0 and not self._held:
            self._require_unconverted()
        if self._depth == 0 and not torch.is_grad_enabled() and not self._root.training:
            self._leave_training()
        self._depth += 1
        if self._depth == 1:
            # While parameters are held each rank runs what it wants to.
            if not self._held and (torch.is_grad_enabled() or self._root.training):
                self._trained = True
            if torch.is_grad_enabled():
                self._events.before_training_call(method, args, kwargs)
            else:
                if not self._held:  # a gathered copy may be older than its shard
                    reshard_all(self._root)
                self._begin_evaluation()

    def _require_unconverted(self) -> None:
        found = changed_layout(self._layouts)
        if found is not None:
            raise ModelError(
                f"Expected {found[0]} as it was sharded, but it is {found[1]}: the model was "
                f"converted (.to(...), .half(), .bfloat16()) after sharding. {CONVERT_BEFORE}"
            )

    def _leave(self) -> None:
        if self._depth == 0:  # the call was refused before it began
            return
        self._depth -= 1
        if self._depth:
            return
        self._events.after_any_call()
        error = sys.exc_info()[1]
        if error is not None:
            self._events.on_error(error)
        if torch.is_grad_enabled():
            # Before the copies go: the phase "after the forward" is the stage's, not the root's.
            if self._stage.reshard_after_forward:
                reshard_own(self._root)
            self._events.after_training_call()
        else:
            self._reshard()
        if not self._held:
            self._events.after_call_at_rest()

    def reset(self) -> None:
        """Forget a call that an exception ended."""
        self._depth = 0
        self._forget_forwards = None


def refuse_state_dict(*_: Any) -> None:
    """FSDP2 shards a unit again before it hands out a state_dict."""
    raise ScheduleError(
        "Expected no state_dict() while parameters are held whole (gathered()), as it would give "
        "this rank's shards and end the gathering. Inside, take the whole parameters: "
        "{n: p.detach().clone() for n, p in model.named_parameters()}. To save weights leave the "
        "context, and use the engine's save or full_state_dict, or the framework's own calls, on "
        "every rank."
    )


class KeptOutputs:
    """Finds tensors that a unit's forward leaves on its modules, such as an auxiliary loss.

    The backward may enter the unit through them before it enters through the unit's outputs, so
    they need the same hook. The first passes look at every module; afterwards only units that
    keep tensors are looked at.
    """

    _LEARNING_PASSES = 3

    def __init__(self, units: Iterable[nn.Module]) -> None:
        for unit in units:
            look = _KeptOutputsHook(self._LEARNING_PASSES).look
            unit.register_forward_hook(outside_of_graphs(look))


class _KeptOutputsHook:
    def __init__(self, passes: int) -> None:
        self._passes_left = passes
        self._keeps = False

    def look(self, unit: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or not (self._keeps or self._passes_left):
            return
        self._passes_left = max(0, self._passes_left - 1)
        kept = [
            tensor
            for module in unit.modules()
            for value in vars(module).values()
            for tensor in _tensors(value)
        ]
        if kept:
            self._keeps = True
            register_extra_outputs(unit, kept)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.grad_fn is not None:
            yield value
    elif isinstance(value, (list, tuple)) and len(value) < 256:
        for item in value:
            if isinstance(item, torch.Tensor):
                yield from _tensors(item)
    elif type(value) is dict and len(value) < 256:
        for item in value.values():
            if isinstance(item, torch.Tensor):
                yield from _tensors(item)
