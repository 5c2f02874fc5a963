"""The engine that plain loops use and every adapter stands on."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardplug import watchdog as watchdog
from shardplug.config import ZeroConfig
from shardplug.core import grads
from shardplug.core._torch.accounting import gathered_storages, model_state_tensors
from shardplug.core._torch.calls import let_inputs_change
from shardplug.core._torch.gradients import (
    drop_unreduced_gradients,
    has_unreduced_gradients,
    hooks_on,
)
from shardplug.core._torch.groups import lazy_init_root, managed_parameters
from shardplug.core._torch.patches import guard_partial_reads
from shardplug.core._torch.resharding import reset_iteration, reshard_all
from shardplug.core._torch.tensors import storage_bytes
from shardplug.core.activations.checkpointing import checkpoint_activations
from shardplug.core.activations.host_copies import copies_for
from shardplug.core.activations.offload import ActivationOffload
from shardplug.core.activations.unit_hooks import follow_model
from shardplug.core.arguments import UnitArguments
from shardplug.core.gathered.max_norm import renormalise_together
from shardplug.core.gathered.modify import ModifiedPart, modify_whole, take_whole_tensors
from shardplug.core.gathered.outside_use import refuse_mixed_use
from shardplug.core.gathered.whole_parameters import hold_whole, traced
from shardplug.core.gradient_hooks import HooksBefore
from shardplug.core.mesh import build_mesh, check_mesh, current_device
from shardplug.core.precision import Precision
from shardplug.core.quantised import patch_compiled_step
from shardplug.core.ranks.generation import generate_in_step
from shardplug.core.ranks.layer_drop import drop_same_layers
from shardplug.core.ranks.rank_sync import RankSync, control_group, drain_gloo_at_exit
from shardplug.core.ranks.threads import warn_of_cores
from shardplug.core.root import KeptOutputs, RootForwardHooks
from shardplug.core.schedule import Schedule
from shardplug.core.shard import refuse_unshardable, shard_model
from shardplug.core.stage import STAGES
from shardplug.core.units import plan_units
from shardplug.core.weights.late import UntrainedParameters
from shardplug.core.weights.origin import note_source_dtypes
from shardplug.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    OptimizerError,
    ScheduleError,
    ShardplugError,
)
from shardplug.oom.watch import OomWatch, explain_step
from shardplug.optim import (
    Binding,
    patch_matrix_optimizer,
    step_on_shards,
    try_on_copies,
)
from shardplug.plan.run.preflight import announce_state

if TYPE_CHECKING:
    from shardplug.checkpoint.write.background import Background
    from shardplug.optim.streamed import StreamedOptimizer
    from shardplug.params import ParameterTier
    from shardplug.tiers import Tier

__all__ = ["ZeroEngine"]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
PathLikeStr = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class _Sharded:
    """What the engine keeps for one model."""

    model: nn.Module
    calls: RootForwardHooks
    rank_sync: RankSync
    replicated: list[nn.Parameter]
    """Parameters that every rank holds whole."""
    activations: ActivationOffload | None


def _call_opens(rank_sync: RankSync, activations: ActivationOffload | None) -> None:
    rank_sync.window_opens()
    if activations is not None:
        activations.begin()


def _call_returns(activations: ActivationOffload | None) -> None:
    if activations is not None:
        activations.end()


class ZeroEngine:
    """Shards models over the data-parallel ranks and drives the ZeRO schedule.

    Every method that the docstring calls collective must be called on every rank.

        engine = ZeroEngine(ZeroConfig(stage=3))
        model = engine.shard(model)
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        for index, batch in enumerate(batches):
            last = (index + 1) % 4 == 0
            with engine.micro_step(last=last):
                model(batch).loss.div(4).backward()
            if last:
                engine.clip_grad_norm(1.0)
                optimizer.step()
                optimizer.zero_grad()

    Args:
        config: Stage, units, precision.
        device_mesh: One axis (shards) or two (replicas, shards) over all ranks; made from the
            default process group when left out.

    Raises:
        ConfigError: When no process group is up, the mesh contradicts the configuration, or the
            folder for swap files is missing or cannot be written to.
    """

    def __init__(self, config: ZeroConfig, device_mesh: DeviceMesh | None = None) -> None:
        if not isinstance(config, ZeroConfig):
            raise ConfigError(f"Expected a ZeroConfig, got {type(config).__name__}.")
        if device_mesh is None:
            device_mesh = build_mesh(config.replicate_size, current_device().type)
        check_mesh(device_mesh, config.replicate_size)
        self.config = config
        self.device_mesh = device_mesh
        self.device = torch.device("cpu") if device_mesh.device_type == "cpu" else current_device()
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._precision = Precision.of(config)
        self._stage = STAGES[config.stage]
        self._schedule = Schedule(self._stage)
        self._control = control_group(self.device)
        drain_gloo_at_exit()
        watchdog.start()
        if config.offload_optimizer != "none" or self.device.type == "cpu":
            warn_of_cores(os.environ)
        self._tier = self._open_tier()
        self._parameters = self._open_parameter_tier()
        self._streamed: weakref.WeakKeyDictionary[torch.optim.Optimizer, StreamedOptimizer] = (
            weakref.WeakKeyDictionary()
        )
        self._sharded: list[_Sharded] = []
        self._num_sharded = 0
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._untrained = UntrainedParameters()
        self._binding = Binding(self._all_resting_parameters, lambda: self.models)
        self._listeners: list[Callable[[str], None]] = []
        self._backward_ran = False
        self._window_pending = False
        self._background: Background | None = None
        guard_partial_reads()
        refuse_mixed_use()
        self.oom = OomWatch(self)
        """Explains out-of-memory errors; adapters tell it where to write."""
        self.add_phase_listener(self.oom.on_phase)

    # ---------------------------------------------------------------- models and optimizers

    @property
    def models(self) -> list[nn.Module]:
        """The sharded models, in the order they were sharded."""
        return [sharded.model for sharded in self._sharded]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The prepared optimizers that are alive, in no fixed order."""
        return list(self._optimizers)

    @property
    def shard_size(self) -> int:
        """Number of ranks that one copy of the parameters is spread over."""
        return self.device_mesh.size(self.device_mesh.ndim - 1)

    def shard(
        self,
        model: ModelT,
        *,
        cast_inputs: bool = True,
        forward_methods: Sequence[str] = (),
        child_units: bool = False,
    ) -> ModelT:
        """Shard a model in place. Collective.

        Every rank takes rank 0's weights and buffers; a model built on meta is initialised, one
        from `shardplug.hf.from_pretrained` is read, each rank its own rows. The parameters move to
        the engine's device unit by unit. With a low `param_dtype` trainable parameters are kept in
        fp32 and frozen ones in the dtype they came in.

        Args:
            model: The module; the same object is returned, and keeps its class name.
            cast_inputs: Cast float inputs of the root to `param_dtype`. False suits autocast,
                which casts where it has to, and keeps float targets exact.
            forward_methods: Other methods of the model that compute with its parameters.
            child_units: Make every direct child with parameters a unit of its own, so that no
                gathered copy outlives a child's forward (several optimizers by hand need it).

        Raises:
            ModelError: When the model cannot be sharded, or differs between ranks.
            CheckpointError: On every rank, when weights cannot be read.
        """
        if any(model is known for known in self.models):
            return model
        refuse_unshardable(model)
        self.oom.before_shard(model)
        with self.oom.explaining():
            self._shard(model, cast_inputs, forward_methods, child_units)
        self.oom.after_shard()
        return model

    def _shard(
        self,
        model: nn.Module,
        cast_inputs: bool,
        forward_methods: Sequence[str],
        child_units: bool,
    ) -> None:
        before = list(model.named_parameters(remove_duplicate=False))
        hooks = {name: hooks_on(parameter) for name, parameter in before}
        note_source_dtypes(model)
        plan = plan_units(
            model,
            self.config.units,
            child_units=child_units,
            master_dtype=torch.float32 if self._precision.keeps_masters else None,
        )
        if self.config.activation_checkpointing:
            checkpoint_activations(model, plan.blocks)
        shard_model(
            model,
            plan,
            self.device_mesh,
            self._stage,
            self._precision,
            self.device,
            cast_inputs=cast_inputs,
            forward_methods=forward_methods,
            prefetch=self.config.prefetch,
            on_cpu=self.config.offload_params == "cpu",
            on_unit=self._move_shards,
        )
        self._move_shards(*(m for m in model.modules() if isinstance(m, FSDPModule)))
        self._raise_offload_errors("Moving parameters to files")
        self._binding.record(before, model)
        assert isinstance(model, FSDPModule)
        self._schedule.attach(model)
        lazy_init_root(model)  # takes over parameters that were filled after they were sharded
        self._adopt(model, forward_methods, plan.blocks, hooks)
        calls = self._sharded[-1].calls
        calls.note_layouts()
        take_whole_tensors(model, self._sharded[-1].replicated, calls.writes, lambda: calls.holds)
        renormalise_together(model, lambda: calls.holds)

    def forget(self, model: nn.Module) -> None:
        """Stop keeping a sharded model, so that its memory goes when the caller drops it."""
        self._sharded = [s for s in self._sharded if s.model is not model]
        self._schedule.detach(model)

    def _adopt(
        self,
        model: nn.Module,
        forward_methods: Sequence[str],
        blocks: Sequence[nn.Module],
        hooks: HooksBefore,
    ) -> None:
        activations = self._activations_of(model, blocks)
        replicated = [p for p in model.parameters() if not isinstance(p, DTensor)]
        rank_sync = RankSync(
            model,
            replicated,
            self._control,
            self.device_mesh,
            self._num_sharded,
            on_backward=self._on_backward,
            hooks_before=hooks,
        )
        calls = RootForwardHooks(
            model,
            self._stage,
            forward_methods,
            on_enter=functools.partial(_call_opens, rank_sync, activations),
            on_exit=functools.partial(self._emit, "after_forward"),
            on_leave=functools.partial(self._raise_offload_errors, "The forward"),
            on_call=functools.partial(self.oom.on_call, model),
            on_error=self.oom.explain,
            on_end=rank_sync.call_ends,
            on_evaluation=rank_sync.evaluation_begins,
            on_return=functools.partial(_call_returns, activations),
        )
        generate_in_step(model, calls.is_held)
        drop_same_layers(model, self._control)
        if any(hasattr(type(module), "save_pretrained") for module in model.modules()):
            from shardplug.checkpoint.state.whole import save_pretrained_whole

            save_pretrained_whole(model)
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        let_inputs_change(model)
        UnitArguments(units, resharded=self._stage.reshard_after_forward)
        if self._stage.reshard_after_forward:
            KeptOutputs(units)
        self._num_sharded += 1
        self._sharded.append(_Sharded(model, calls, rank_sync, replicated, activations))
        model.zero_grad = functools.partial(  # type: ignore[method-assign]
            self._zero_grad,
            functools.partial(self._zero_model, model, model.zero_grad),
            lambda: None,
        )

    def _activations_of(
        self, model: nn.Module, blocks: Sequence[nn.Module]
    ) -> ActivationOffload | None:
        if self.config.offload_activations == "none":
            return None
        buffers = [buffer.untyped_storage() for buffer in model.buffers()]
        offload = ActivationOffload(
            copies_for(self.device),
            self.device,
            self.config.prefetch,
            lambda: (*buffers, *gathered_storages(model)),
        )
        follow_model(offload, [m for m in model.modules() if isinstance(m, FSDPModule)], blocks)
        return offload

    def prepare_optimizer(self, optimizer: OptimizerT) -> OptimizerT:
        """Make an optimizer train the sharded parameters. In place, idempotent.

        Parameters that it holds from before `shard` are replaced by their shards; groups, their
        options and state made so far are kept. With `offload_optimizer` it is collective, reserves
        the room for the optimizer's state, and steps block by block from then on. For a class that
        is not of `torch.optim` it is collective too: the optimizer takes trial steps on copies of
        some parameters, sharded and whole, which must come out equal.

        Args:
            optimizer: Any `torch.optim` optimizer over parameters of sharded models.

        Raises:
            OptimizerError: When it holds a parameter of no sharded model, or none at all, or
                its state cannot be sharded or offloaded; on every rank, when its update on
                sharded parameters is not that on whole ones.
            StorageError: On every rank, when there is too little room for offloaded state on one.
        """
        if optimizer in self._optimizers:
            self._binding.require_known(optimizer, optimizer.param_groups)
            return optimizer
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptimizerError(
                f"Expected a torch.optim.Optimizer, got {type(optimizer).__name__}: unwrap it."
            )
        if not self._sharded:
            raise OptimizerError("Expected engine.shard(model) before prepare_optimizer().")
        patch_matrix_optimizer(optimizer)
        self._binding.bind(optimizer)
        if not any(p.requires_grad for model in self.models for p in model.parameters()):
            raise OptimizerError(
                "Expected a model with trainable parameters, got nothing to train: all are frozen "
                "(requires_grad=False). Unfreeze some, or leave the optimizer out."
            )
        self.oom.on_optimizer(optimizer)
        if self._tier is not None:
            from shardplug.optim.streamed import StreamedOptimizer

            with self.oom.explaining():
                announce_state(self, optimizer, self._tier.name)
                self._streamed[optimizer] = StreamedOptimizer(
                    optimizer, self._tier, self._control, self._parameters
                )
        elif not step_on_shards(optimizer):
            names = {id(p): n for model in self.models for n, p in model.named_parameters()}
            try_on_copies(optimizer, names, self.device_mesh, self._control)
        for name in ("train", "eval"):  # schedule-free optimizers exchange weights in them
            if callable(getattr(optimizer, name, None)):
                setattr(optimizer, name, self._at_rest(getattr(optimizer, name)))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        patch_compiled_step(optimizer)
        explain_step(optimizer, self.oom)
        optimizer.zero_grad = functools.partial(  # type: ignore[method-assign]
            self._zero_grad,
            optimizer.zero_grad,
            lambda: {id(p) for group in optimizer.param_groups for p in group["params"]},
        )
        self._optimizers.add(optimizer)
        return optimizer

    def _open_tier(self) -> Tier | None:
        if self.config.offload_optimizer == "none":
            return None
        return self._open(self.config.offload_optimizer, "offload_optimizer")

    def _open(self, name: str, option: str) -> Tier:
        from shardplug.tiers import open_tier

        tier = open_tier(
            name,
            self.config.nvme_path,
            self._control,
            pinned=self.device.type != "cpu",
            what=option,
            cpu_bytes=int((self.config.offload_cpu_gib or 0) * 2**30),
        )
        watchdog.before_end(tier.remove_files)
        return tier

    def _open_parameter_tier(self) -> ParameterTier | None:
        if self.config.offload_params != "nvme":
            return None
        from shardplug.params import ParameterTier
        from shardplug.tiers.disk import DiskTier
        from shardplug.tiers.split import SplitTier

        tier = self._tier.far if isinstance(self._tier, SplitTier) else self._tier
        if not isinstance(tier, DiskTier):  # optimizer state is elsewhere
            tier = self._open("nvme", "offload_params")
            assert isinstance(tier, DiskTier)
        return ParameterTier(tier, self.config.prefetch, self._control)

    def _move_shards(self, *units: nn.Module) -> None:
        if self._parameters is not None:
            for unit in units:
                self._parameters.offload_unit(unit, self.device)

    def _raise_offload_errors(self, doing: str) -> None:
        """Raise on every rank what has failed on one since the ranks last met."""
        if self._parameters is not None:
            self._parameters.raise_failure(doing)

    @property
    def _offloads(self) -> list[ActivationOffload]:
        return [s.activations for s in self._sharded if s.activations is not None]

    def _resting_parameters(self, model: nn.Module) -> list[nn.Parameter]:
        replicated = next(s.replicated for s in self._sharded if s.model is model)
        return [*managed_parameters(model), *replicated]

    def _all_resting_parameters(self) -> list[nn.Parameter]:
        return [p for model in self.models for p in self._resting_parameters(model)]

    # ---------------------------------------------------------------- the step

    @contextmanager
    def micro_step(self, last: bool = True) -> Iterator[None]:
        """Run one micro-batch's forward and backward inside this context.

        Args:
            last: Whether it is the last micro-batch before the optimizer step. Outside any
                `micro_step` each backward counts as the last.
        """
        self._schedule.begin(last)
        self.oom.on_micro_step(last)
        try:
            with self.oom.explaining():
                yield
                self.after_backward()
        finally:
            self._schedule.begin(True)

    def after_backward(self) -> None:
        """Complete a backward that ran outside `micro_step`. Collective; harmless if repeated.

        An optimizer step or a clip does it too, where it was left out.

        Raises:
            ScheduleError: On every rank, when the ranks used different units.
        """
        if not self._backward_ran:
            return
        self._backward_ran = False
        self._window_pending = not self._schedule.last
        if self._schedule.last:
            for sharded in self._sharded:
                sharded.rank_sync.window_closes()
        for sharded in self._sharded:
            sharded.rank_sync.backward_ends()
        self._raise_offload_errors("The backward")
        self._emit("after_backward")

    def _on_backward(self) -> None:
        self._backward_ran = True

    def _require_boundary(self, what: str) -> None:
        self.after_backward()
        if self._window_pending:
            raise ScheduleError(
                f"Expected {what} after the last micro-batch of a window, but the latest one ran "
                "under micro_step(last=False), so its gradients are not reduced over the ranks. "
                "Run the window's last micro-batch with last=True, or drop the window with "
                "optimizer.zero_grad()."
            )

    def _at_rest(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Let a method that changes shards run when no gathered copies are left."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.reshard()
            return method(*args, **kwargs)

        return call

    def _weights_may_change(self, optimizer: torch.optim.Optimizer) -> None:
        """Get ready for a step: take over what was written to gathered copies, and drop them."""
        self._require_boundary("optimizer.step()")
        self._require_unmodified("optimizer.step()")
        self.reshard()
        for sharded in self._sharded:
            sharded.calls.writes.raise_refused()
        self._untrained.look(self.models, self._optimizers, optimizer)

    def _require_unmodified(self, what: str) -> None:
        if any(sharded.calls.writes.is_modifying for sharded in self._sharded):
            raise ScheduleError(
                f"Expected {what} outside of gathered(modify=True), whose changes count only at "
                "its end. Leave the context first."
            )

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._background is not None:
            self._background.poll()
        if any(sharded.rank_sync.whole.is_open for sharded in self._sharded):
            raise ScheduleError(
                "Expected optimizer.step() outside of gathered(grad=True), found it inside, where "
                "the whole parameters would keep the values from before the step. Run the backward "
                "inside or after the context, and the step after it."
            )
        if optimizer in self._streamed:
            self._streamed[optimizer].require_entered()
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
        self.reshard()
        for offload in self._offloads:
            offload.end_step()
        if self._parameters is not None:
            self._parameters.after_step(self._streamed[optimizer].last_step)
        self._emit("after_step")

    def _zero_model(
        self, model: nn.Module, original: Callable[..., None], *, set_to_none: bool
    ) -> None:
        original(set_to_none=set_to_none)
        for parameter in self._resting_parameters(model):  # gathered copies stand before them
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def _zero_grad(
        self,
        original: Callable[..., None],
        only: Callable[[], set[int] | None],
        set_to_none: bool = True,
    ) -> None:
        original(set_to_none=set_to_none)
        for streamed in self._streamed.values():
            streamed.gradients_cleared(to_none=set_to_none)
        for sharded in self._sharded:
            sharded.rank_sync.note_missing_gradients()
        if self._window_pending:
            for model in self.models:
                drop_unreduced_gradients(model, only())
            if not any(has_unreduced_gradients(model) for model in self.models):
                self._window_pending = False
                for sharded in self._sharded:
                    sharded.rank_sync.reset()

    # ---------------------------------------------------------------- gradients

    def grad_norm(
        self, parameters: Iterable[torch.Tensor] | None = None, norm_type: float = 2.0
    ) -> float:
        """Return the norm of all gradients together, the same on every rank. Collective.

        Args:
            parameters: Sharded parameters; None means those of every model.
            norm_type: p of the p-norm; may be `math.inf`.

        Raises:
            ScheduleError: In the middle of an accumulation window.
        """
        return self._norm(self._clip_targets(parameters), norm_type)

    def clip_grad_norm(
        self,
        max_norm: float,
        parameters: Iterable[torch.Tensor] | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> float:
        """Scale gradients so that their global norm is at most `max_norm`. Collective.

        Args:
            max_norm: Largest norm allowed.
            parameters: Sharded parameters; None means those of every model.
            norm_type: p of the p-norm; may be `math.inf`.
            error_if_nonfinite: Raise when the norm is NaN or infinite.

        Returns:
            The norm before clipping, the same on every rank.

        Raises:
            ScheduleError: In the middle of an accumulation window.
            RuntimeError: On every rank, for a norm that is not finite, if asked for.
        """
        targets = self._clip_targets(parameters)
        norm = self._norm(targets, norm_type)
        if error_if_nonfinite and not torch.isfinite(torch.tensor(norm)):
            raise RuntimeError(
                f"The gradient norm of order {norm_type} is {norm}, so it cannot be clipped."
            )
        grads.scale_to_norm(targets, norm, max_norm)
        return norm

    def clip_grad_value(
        self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None
    ) -> None:
        """Clamp every gradient element to [-clip_value, clip_value].

        Raises:
            ScheduleError: In the middle of an accumulation window.
        """
        grads.clip_by_value(self._clip_targets(parameters), clip_value)

    def _norm(self, targets: list[torch.Tensor], norm_type: float) -> float:
        group = self.device_mesh.get_group(self.device_mesh.ndim - 1)
        return grads.global_norm(targets, norm_type, group)

    def _clip_targets(self, parameters: Iterable[torch.Tensor] | None) -> list[torch.Tensor]:
        self._require_boundary("clipping")
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        if parameters is None:
            return list(self._all_resting_parameters())
        return [self._binding.current(p) for p in parameters]

    # ---------------------------------------------------------------- whole parameters

    @contextmanager
    def gathered(
        self,
        model: nn.Module | None = None,
        *,
        modify: bool = False,
        src: int | None = None,
        grad: bool = False,
    ) -> Iterator[None]:
        """Hold parameters whole on every rank, to be read or changed. Collective.

        To be read, parameters are held in the dtype that the model computes in. Gradients are off
        and forwards exchange nothing: many tokens cost one gather, and ranks may run any number
        of forwards, or none. Contexts may be nested. A write to a parameter is refused at the end.

        With `modify` whole master weights (fp32 in mixed precision) stand in the modules of
        `model`, and what they are at the end of the context is put into every rank's shards, in
        memory and in tiers. The optimizer's state stays as it is. Shapes and dtypes may not
        change, and no forward may run. An exception, on any rank, leaves the parameters of all
        ranks as they were before the context.

        With `grad=True` losses may be made of the whole parameters (penalties, a gradient with
        respect to a layer's weight, a gradient of a gradient), with or without forwards inside.
        The backward runs inside or after the context; the gradients are averaged over the ranks
        with all others. Parameters are shown in the dtype of their shards, with mixed precision
        fp32, and within a forward in `param_dtype`. The copies stay in memory as long as the loss
        needs them.

        Args:
            model: One of the sharded models, or a module in one (an encoder, a language model);
                None means all models.
            modify: Whether parameters are changed.
            src: With `modify`, the rank whose values count on all ranks. None means that every
                rank makes the same changes: each keeps its own rows of what it has.
            grad: Record gradients; not together with `modify`.

        Raises:
            ConfigError: When `src` is no rank, is not the same on every rank, or is given without
                `modify`.
            ModelError: When the engine did not shard the model; on every rank, when a parameter
                was written to without `modify`, or has another shape or dtype with it.
            ScheduleError: In a forward inside for which gradients were switched on again, and in
                any forward inside with `modify`; for one kind of context inside another; for an
                optimizer step inside with `grad`.
        """
        if traced.get():
            yield
            return
        parts = self._parts(model)
        self._require_one_kind(modify, grad)
        if grad:
            with hold_whole([(s.rank_sync.whole, part) for s, part in parts]):
                self._raise_offload_errors("Gathering")
                yield
                self._refuse_writes(n for s, _ in parts for n in s.rank_sync.whole.written())
            return
        if modify or src is not None:
            with self._modified(parts, modify, src):
                yield
            return
        held = [(sharded, sharded.calls.hold(part)) for sharded, part in parts]
        try:
            self._raise_offload_errors("Gathering")
            watched = [(sharded, sharded.calls.writes.watch(units)) for sharded, units in held]
            with torch.no_grad():
                yield
            self._refuse_writes(
                name for s, before in watched for name in s.calls.writes.drop_written(before)
            )
        finally:
            for sharded, units in held:
                sharded.calls.release(units)

    def _require_one_kind(self, modify: bool, grad: bool) -> None:
        calls = [sharded.calls for sharded in self._sharded]
        if grad and modify:
            raise ConfigError("Expected gathered(grad=True) or gathered(modify=True), got both.")
        elif grad and any(call.holds for call in calls):
            found = "gathered(), in which gradients are off"
        elif grad and any(call.writes.is_modifying for call in calls):
            found = "gathered(modify=True)"
        elif not grad and any(sharded.rank_sync.whole.is_open for sharded in self._sharded):
            found = "gathered(grad=True)"
        else:
            return
        raise ScheduleError(f"Expected gathered(grad={grad}) by itself, found it inside {found}.")

    def _refuse_writes(self, written: Iterable[str]) -> None:
        names = list(written)
        error = (
            None
            if not names
            else ModelError(
                f"Expected parameters that are only read in gathered(), but {', '.join(names[:4])} "
                "changed; the changes are dropped. Use gathered(modify=True) to change weights."
            )
        )
        self._agree("Reading parameters in gathered()", error, ModelError)

    @contextmanager
    def _modified(
        self, parts: list[tuple[_Sharded, nn.Module]], modify: bool, src: int | None
    ) -> Iterator[None]:
        error: ShardplugError | None = None
        if not modify or (src is not None and not 0 <= src < self.world_size):
            error = ConfigError(
                f"Expected src to be a rank below {self.world_size}, and modify=True with it, got "
                f"src={src} and modify={modify}."
            )
        elif any(s.calls.holds or s.calls.writes.is_modifying for s, _ in parts):
            error = ScheduleError(
                "Expected gathered(modify=True) outside of any other gathered() of the same "
                "model, found one within another."
            )
        ends = torch.tensor([-1 if src is None else src, 1 if src is None else -src])
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._control)
        if error is None and int(ends[0]) != -int(ends[1]):
            error = ConfigError(f"Expected the same src on every rank, got {src} on this one.")
        kind = ConfigError if error is None else type(error)
        self._agree("gathered(modify=True)", error, kind)
        changed = [
            ModifiedPart(sharded.model, part, sharded.replicated, sharded.calls.writes)
            for sharded, part in parts
        ]
        agree = functools.partial(self._agree, "Changing parameters in gathered(modify=True)")
        with modify_whole(changed, self.device_mesh, src, agree):
            yield

    def _agree(self, doing: str, error: Exception | None, kind: type[ShardplugError]) -> None:
        from shardplug.tiers.agree import raise_together

        raise_together(error, kind, doing, self._control)

    def _parts(self, model: nn.Module | None) -> list[tuple[_Sharded, nn.Module]]:
        if model is None and self._sharded:
            return [(sharded, sharded.model) for sharded in self._sharded]
        for sharded in self._sharded:
            if any(model is module for module in sharded.model.modules()):
                assert model is not None
                return [(sharded, model)]
        # A framework's wrapper around the model.
        inside = set() if model is None else set(model.modules())
        around = [(sharded, sharded.model) for sharded in self._sharded if sharded.model in inside]
        if not around:
            raise ModelError(
                "Expected a model that this engine sharded, or a module in one, got "
                f"{type(model).__name__}. Shard it first."
            )
        return around

    def full_state_dict(
        self, model: nn.Module | None = None, *, rank0_only: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return whole parameters and persistent buffers on the CPU. Collective.

        Args:
            model: One of the sharded models; None means the only one.
            rank0_only: Other ranks get an empty dictionary.

        Raises:
            CheckpointError: When another rank does not make this call.
        """
        from shardplug.checkpoint.state.whole import whole_state
        from shardplug.collective import gather

        model = self._one_model(model)
        gather(None, "full_state_dict()")  # a rank that calls alone learns it here
        self._require_unmodified("full_state_dict()")
        self.reshard()
        return whole_state(model, keep=self.rank == 0 or not rank0_only)

    def _one_model(self, model: nn.Module | None) -> nn.Module:
        if model is None:
            if len(self._sharded) != 1:
                raise ModelError(f"Expected a model, as {len(self._sharded)} are sharded.")
            return self.models[0]
        if not any(model is known for known in self.models):
            raise ModelError("Expected a model that this engine sharded.")
        return model

    def reshard(self) -> None:
        """Drop all gathered copies, so that every parameter is its shard again."""
        for model in self.models:
            reshard_all(model)

    def reset(self) -> None:
        """Return to rest after an exception in a forward or backward.

        The window under way is lost: its gradients are dropped on this rank. Call it on every
        rank before training goes on.

        Raises:
            ModelError: When a parameter was written to while it was gathered, in a way that cannot
                be kept. The engine is at rest then, too.
        """
        with ExitStack() as stack:
            for sharded in self._sharded:
                stack.enter_context(sharded.calls.writes.reported_at_end())
            for sharded in self._sharded:
                self._reset_model(sharded)
            if self._parameters is not None:
                self._parameters.reset()
            self._backward_ran = False
            self._window_pending = False
            self._schedule.begin(True)

    def _reset_model(self, sharded: _Sharded) -> None:
        reset_iteration(sharded.model)
        reshard_all(sharded.model)
        drop_unreduced_gradients(sharded.model)
        for parameter in self._resting_parameters(sharded.model):
            parameter.grad = None
        sharded.rank_sync.reset()
        sharded.calls.reset()
        if sharded.activations is not None:
            sharded.activations.reset()

    # ---------------------------------------------------------------- memory

    def memory(self) -> dict[str, int]:
        """Return the bytes that this rank holds now, by kind; buffers are not counted.

        Kinds on the device are "master_shards", "gathered", "gradients" and "optimizer_state".
        With `offload_optimizer` there are also "optimizer_state_cpu" (in CPU memory),
        "optimizer_state_nvme" (in files) and "staging", the memory that state is moved through.
        With `offload_params` "nvme" there are "master_shards_nvme", "gradients_nvme" (reduced ones)
        and "compute_copies_nvme" (in `param_dtype`) in files; with "cpu" "master_shards_cpu" and
        "gradients_cpu".
        With `offload_activations` there is "activations_cpu".
        "snapshot" is CPU memory, held from the first save with `async_save` to `wait_for_save`.
        """
        kinds: dict[str, list[torch.Tensor]] = {
            "master_shards": [],
            "gathered": [],
            "gradients": [],
            "optimizer_state": [],
        }
        for sharded in self._sharded:
            for kind, tensors in model_state_tensors(sharded.model).items():
                kinds[kind] += tensors
            kinds["master_shards"] += [p.data for p in sharded.replicated]
            kinds["gradients"] += [p.grad for p in sharded.replicated if p.grad is not None]
        elsewhere = {"optimizer_state_cpu": 0, "optimizer_state_nvme": 0, "staging": 0}
        for optimizer in self._optimizers:
            streamed = self._streamed.get(optimizer)
            if streamed is not None:
                kinds["optimizer_state"] += streamed.device_tensors
                for tier, num_bytes in streamed.state_bytes.items():
                    elsewhere[f"optimizer_state_{tier}"] += num_bytes
                elsewhere["staging"] += streamed.work_bytes
                continue
            for state in optimizer.state.values():
                kinds["optimizer_state"] += [
                    v for v in state.values() if isinstance(v, torch.Tensor)
                ]
        held = {kind: storage_bytes(tensors) for kind, tensors in kinds.items()}
        if self.config.offload_params == "cpu":
            replicated = [p.data for sharded in self._sharded for p in sharded.replicated]
            on_device = storage_bytes(replicated)
            held["master_shards_cpu"] = held["master_shards"] - on_device
            held["master_shards"] = on_device
            reduced = [p.grad for p in self._all_resting_parameters() if p.grad is not None]
            held["gradients_cpu"] = storage_bytes(
                grad for grad in reduced if isinstance(grad, DTensor)
            )
            held["gradients"] -= held["gradients_cpu"]
        if self._offloads:
            held["activations_cpu"] = sum(offload.held_bytes for offload in self._offloads)
        held["snapshot"] = 0 if self._background is None else self._background.memory.num_bytes
        if self._tier is None:
            return held
        elsewhere["staging"] += self._tier.staging_bytes
        if self._parameters is None:
            return {**held, **elsewhere}
        elsewhere["staging"] += self._parameters.staging_bytes
        if not self._tier.uses(self._parameters.tier):
            elsewhere["staging"] += self._parameters.tier.staging_bytes
        return {**held, **elsewhere, **self._parameters.held_bytes(kinds["gradients"])}

    def traffic(self) -> dict[str, float]:
        """Return what the latest step moved between memory and its tiers, on this rank.

        Returns:
            "bytes_read", "bytes_written" and "waited_seconds" (time that the training stood still
            for them): of the optimizers' latest steps and, with `offload_params`, of the gathers
            and gradients before them. Zeros without offload, and for "cpu" on CPU ranks, where
            the state is used in place. With `offload_activations` what left the device is written
            and what came back is read, on CPU ranks too; nobody knows the time waited for it.
        """
        moved = [streamed.last_step for streamed in self._streamed.values()]
        if self._parameters is not None:
            moved.append(self._parameters.last_step)
        return {
            "bytes_read": sum(step.bytes_read for step in moved)
            + sum(offload.last_step[1] for offload in self._offloads),
            "bytes_written": sum(step.bytes_written for step in moved)
            + sum(offload.last_step[0] for offload in self._offloads),
            "waited_seconds": sum(step.waited_seconds for step in moved),
        }

    def add_phase_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with "after_forward", "after_backward" and "after_step"."""
        self._listeners.append(listener)

    def remove_phase_listener(self, listener: Callable[[str], None]) -> None:
        """Stop calling `listener`."""
        self._listeners.remove(listener)

    def _emit(self, phase: str) -> None:
        watchdog.progress()
        for listener in tuple(self._listeners):
            listener(phase)

    # ---------------------------------------------------------------- checkpoints

    @property
    def background(self) -> Background:
        """What writes checkpoints beside the training; hosts pass it to `checkpoint.write`."""
        if self._background is None:
            from shardplug.checkpoint.write.background import Background

            self._background = Background()
        return self._background

    def save(
        self,
        path: PathLikeStr,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        extra: Mapping[str, Any] | None = None,
        side_files: Callable[[Path], None] | None = None,
        async_save: bool = False,
    ) -> None:
        """Write models, optimizers and each rank's random state into a new folder. Collective.

        The folder appears at once and whole; an older one at `path` is replaced.

        Args:
            path: The folder; rank 0's counts.
            optimizers: Prepared optimizers.
            extra: Anything else, made of plain types and tensors; rank 0's is kept. "step", the
                optimizer steps done, is what `resume_point` and `inspect` show.
            side_files: Called on every rank with the folder being written, to add files to it.
            async_save: Copy this rank's shards into CPU memory and return; a thread writes them.
                The copy is as large as the shards; its memory is used again by the next save, and
                given back by `wait_for_save`. The next save waits for the one before. A failure
                is raised by the optimizer step, the save or the `wait_for_save` that comes next,
                on every rank. Call `wait_for_save` at the end.

        Raises:
            CheckpointError: On every rank, when a rank could not write.
        """
        from shardplug.checkpoint import state_of_model, state_of_optimizer, together, write

        self._require_unmodified("save()")
        if self._background is not None:
            self._background.wait()  # what was started first is published first

        def collect() -> tuple[list[Any], list[Any], dict[str, Any]]:
            if not isinstance(extra, (Mapping, type(None))):
                raise CheckpointError(
                    f"Expected extra to be a dictionary, got {type(extra).__name__}."
                )
            return (
                [state_of_model(model) for model in self.models],
                [state_of_optimizer(self.models, optimizer) for optimizer in optimizers],
                dict(extra or {}),
            )

        models, states, content = together(collect, "Saving")
        step = content.get("step")
        write(
            path,
            models=models,
            optimizers=states,
            meta={"extra": content},
            run={
                **self.describe_run(),
                "framework": "pytorch",
                "step": step if isinstance(step, int) else None,
            },
            modules=self.models,
            side_files=side_files,
            background=self.background if async_save else None,
        )

    def wait_for_save(self) -> None:
        """Wait until the save that was started with `async_save` is on disk. Collective.

        The memory of the snapshot is given back.

        Raises:
            CheckpointError: On every rank, when it failed.
        """
        if self._background is not None:
            self._background.wait()
            self._background.release()

    def describe_run(self) -> dict[str, Any]:
        """Return what a manifest says about the layout of this run."""
        return {
            "stage": self.config.stage,
            "replicate_size": self.config.replicate_size,
            "world_size": self.world_size,
        }

    def load(
        self,
        path: PathLikeStr,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        strict: bool = True,
        rng: bool = True,
        rename: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Read a folder written at any stage, world size or by any adapter. Collective.

        Args:
            path: The folder; rank 0's counts.
            optimizers: Prepared optimizers, in the order they were saved.
            strict: Refuse missing and unexpected names; False loads what matches and warns of
                the others by name, parameter groups that the optimizer lacks included.
            rng: Restore each rank's random state when the world size is the saved one.
            rename: New names of parameters, buffers or whole modules, by those in the folder.

        Returns:
            The `extra` given to `save`; of a folder that a framework wrote, its "step" if known.

        Raises:
            CheckpointError: On every rank, when the folder is no checkpoint, is damaged or does
                not match.
        """
        from shardplug.checkpoint import Reader, together

        self._require_unmodified("load()")
        reader = Reader(path, rename=rename)
        step = reader.manifest.get("step")
        other = {} if step is None else {"step": step}
        extra = together(lambda: dict(reader.meta.get("extra", other)), "Loading")
        reader.load(self, optimizers, strict=strict)
        if rng:
            reader.restore_rng()
        return extra
