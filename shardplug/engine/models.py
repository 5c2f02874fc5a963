"""The sharded models of one engine, and what it keeps for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardplug.core._torch.calls import let_inputs_change
from shardplug.core._torch.gradients import drop_unreduced_gradients
from shardplug.core._torch.groups import managed_parameters
from shardplug.core._torch.held_tensors import gathered_storages
from shardplug.core._torch.resharding import reset_iteration, reshard_all
from shardplug.core.activations.activation_offload import ActivationOffload
from shardplug.core.activations.host_copies import copies_for
from shardplug.core.activations.unit_hooks import follow_model
from shardplug.core.arguments import UnitArguments
from shardplug.core.gathered.max_norm import renormalise_together
from shardplug.core.gathered.modify import take_whole_tensors
from shardplug.core.gradient_hooks import HooksBefore
from shardplug.core.ranks.generation import generate_in_step
from shardplug.core.ranks.layer_drop import drop_same_layers
from shardplug.core.ranks.rank_sync import RankSync
from shardplug.core.root import CallEvents, KeptOutputs, RootForwardHooks
from shardplug.core.shard import Sharding
from shardplug.engine.listener import EngineListener, Listeners
from shardplug.engine.offload import Offload
from shardplug.errors import ModelError, ScheduleError

__all__ = ["ShardedModel", "ShardedModels", "offload_activations"]


class _Calls(CallEvents):
    """Passes outermost calls into one model on to what depends on them."""

    def __init__(
        self,
        model: nn.Module,
        rank_sync: RankSync,
        activations: ActivationOffload | None,
        offload: Offload,
        listeners: Listeners,
    ) -> None:
        self._model = model
        self._activations = activations
        self._offload = offload
        self._listeners = listeners
        self._rank_sync = rank_sync

    def before_training_call(self, method: str, args: Any, kwargs: Any) -> None:
        self._rank_sync.window_opens()
        if self._activations is not None:
            self._activations.begin()
        self._listeners.tell(EngineListener.call, self._model, method, args, kwargs)

    def after_any_call(self) -> None:
        if self._activations is not None:
            self._activations.end()

    def on_error(self, error: BaseException) -> None:
        self._listeners.tell_error(error)

    def after_training_call(self) -> None:
        self._listeners.tell_phase("after_forward")

    def after_call_at_rest(self) -> None:
        self._offload.raise_errors("The forward")

    def after_evaluating_method(self) -> None:
        self._rank_sync.call_ends()

    def before_evaluation(self) -> None:
        self._rank_sync.evaluation_begins()


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """What the engine keeps for one model."""

    model: nn.Module
    rank_sync: RankSync
    replicated: list[nn.Parameter]
    """Parameters that every rank holds whole."""
    activations: ActivationOffload | None
    calls: RootForwardHooks

    @property
    def resting_parameters(self) -> list[nn.Parameter]:
        """The parameters that optimizers hold: sharded ones, then those that are whole."""
        return [*managed_parameters(self.model), *self.replicated]

    @classmethod
    def follow(
        cls,
        model: nn.Module,
        sharding: Sharding,
        control: dist.ProcessGroup,
        *,
        index: int,
        hooks: HooksBefore,
        activations: ActivationOffload | None,
        forward_methods: Sequence[str],
        on_backward: Callable[[], None],
        offload: Offload,
        listeners: Listeners,
    ) -> ShardedModel:
        """Hook into a model that was sharded. Collective.

        Args:
            model: The model.
            sharding: How it was sharded.
            control: All ranks, with messages on the CPU.
            index: Number of the model within the engine.
            hooks: Hooks that its parameters had before.
            activations: Moves activations to CPU memory.
            forward_methods: Other methods of the model that compute with its parameters.
            on_backward: Called when a backward reaches a unit.
            offload: The tiers.
            listeners: Told of calls into the model.
        """
        replicated = [p for p in model.parameters() if not isinstance(p, DTensor)]
        rank_sync = RankSync(
            model, replicated, control, sharding.mesh, index, on_backward, hooks_before=hooks
        )
        events = _Calls(model, rank_sync, activations, offload, listeners)
        calls = RootForwardHooks(model, sharding.stage, forward_methods, events)
        generate_in_step(model, calls.is_held)
        drop_same_layers(model, control)
        if any(hasattr(type(module), "save_pretrained") for module in model.modules()):
            from shardplug.checkpoint.state.whole_weights import save_pretrained_whole

            save_pretrained_whole(model)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        let_inputs_change(model)
        UnitArguments(units, resharded=sharding.stage.reshard_after_forward)
        if sharding.stage.reshard_after_forward:
            KeptOutputs(units)
        calls.note_layouts()
        take_whole_tensors(model, replicated, calls.writes, lambda: calls.holds)
        renormalise_together(model, lambda: calls.holds)
        return cls(model, rank_sync, replicated, activations, calls)

    def reset(self) -> None:
        """Return to rest after an exception in a forward or backward."""
        reset_iteration(self.model)
        reshard_all(self.model)
        drop_unreduced_gradients(self.model)
        for parameter in self.resting_parameters:
            parameter.grad = None
        self.rank_sync.reset()
        self.calls.reset()
        if self.activations is not None:
            self.activations.reset()

    def clear_gradients_in_zero_grad(
        self, zero_grad: Callable[[Callable[..., None], Callable[[], None]], Any]
    ) -> None:
        """Let the model's `zero_grad` clear what the engine keeps of gradients as well.

        Args:
            zero_grad: The engine's, told the model's own and which parameters it is for.
        """
        own = self.model.zero_grad

        def clear(*, set_to_none: bool) -> None:
            own(set_to_none=set_to_none)
            for parameter in self.resting_parameters:  # gathered copies stand before them
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_()

        self.model.zero_grad = functools.partial(  # type: ignore[method-assign]
            zero_grad, clear, lambda: None
        )


class ShardedModels:
    """The sharded models of one engine, in the order in which they were sharded."""

    def __init__(self) -> None:
        self._all: list[ShardedModel] = []
        self.count = 0
        """Models that were ever added."""

    def __iter__(self) -> Iterator[ShardedModel]:
        """Iterate over what is kept for each model."""
        return iter(self._all)

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self._all)

    def add(self, sharded: ShardedModel) -> None:
        """Keep one more."""
        self._all.append(sharded)
        self.count += 1

    def forget(self, model: nn.Module) -> None:
        """Stop keeping a model."""
        self._all = [sharded for sharded in self._all if sharded.model is not model]

    @property
    def modules(self) -> list[nn.Module]:
        """The models themselves."""
        return [sharded.model for sharded in self._all]

    @property
    def resting_parameters(self) -> list[nn.Parameter]:
        """The parameters that optimizers hold."""
        return [p for sharded in self._all for p in sharded.resting_parameters]

    @property
    def activations(self) -> list[ActivationOffload]:
        """What moves activations to CPU memory."""
        return [s.activations for s in self._all if s.activations is not None]

    def reshard(self) -> None:
        """Drop all gathered copies."""
        for sharded in self._all:
            reshard_all(sharded.model)

    def require_unmodified(self, what: str) -> None:
        """Refuse a call inside of `gathered(modify=True)`.

        Raises:
            ScheduleError: Naming `what` was called.
        """
        if any(sharded.calls.writes.is_modifying for sharded in self._all):
            raise ScheduleError(
                f"Expected {what} outside of gathered(modify=True), whose changes count only at "
                "its end. Leave the context first."
            )

    def one(self, model: nn.Module | None) -> nn.Module:
        """Return `model`, or the only model when it is None.

        Raises:
            ModelError: When it was not sharded here, or there is not exactly one.
        """
        if model is None:
            if len(self._all) != 1:
                raise ModelError(f"Expected a model, as {len(self._all)} are sharded.")
            return self._all[0].model
        if not any(model is known for known in self.modules):
            raise ModelError("Expected a model that this engine sharded.")
        return model

    def parts(self, model: nn.Module | None) -> list[tuple[ShardedModel, nn.Module]]:
        """Return what is kept for a model, a module in one or a module around some, with the part.

        Args:
            model: None means all models.

        Raises:
            ModelError: When it has nothing to do with a sharded model.
        """
        if model is not None and not isinstance(model, nn.Module):
            raise ModelError(
                f"Expected a module of a sharded model, got {type(model).__name__}: name the "
                "module that has the parameter, or one that holds several modules."
            )
        if model is None and self._all:
            return [(sharded, sharded.model) for sharded in self._all]
        for sharded in self._all:
            if any(model is module for module in sharded.model.modules()):
                assert model is not None
                return [(sharded, model)]
        # A framework's wrapper around the model.
        inside = set() if model is None else set(model.modules())
        around = [(sharded, sharded.model) for sharded in self._all if sharded.model in inside]
        if not around:
            raise ModelError(
                "Expected a model that this engine sharded, or a module in one, got "
                f"{type(model).__name__}. Shard it first."
            )
        return around


def offload_activations(
    model: nn.Module, blocks: Sequence[nn.Module], sharding: Sharding
) -> ActivationOffload:
    """Move what a sharded model's blocks save for the backward to CPU memory.

    Args:
        model: The model.
        blocks: Its repeated blocks, in forward order.
        sharding: Says the device, and how many blocks are brought back ahead of use.

    Raises:
        ModelError: When the model has no repeated blocks.
    """
    buffers = [buffer.untyped_storage() for buffer in model.buffers()]
    offload = ActivationOffload(
        copies_for(sharding.device),
        sharding.device,
        sharding.prefetch,
        lambda: (*buffers, *gathered_storages(model)),
    )
    follow_model(offload, [m for m in model.modules() if isinstance(m, FSDPModule)], blocks)
    return offload
