"""The engine that plain loops use and every integration stands on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from shardplug.config import ZeroConfig
from shardplug.core import grads
from shardplug.core._torch.gradients import hooks_on
from shardplug.core._torch.groups import lazy_init_root
from shardplug.core._torch.patches import patch_for, unpatch_for
from shardplug.core.activations.checkpointing import checkpoint_activations
from shardplug.core.gathered.outside_use import refuse_mixed_scalar
from shardplug.core.gathered.whole_parameters import traced
from shardplug.core.mesh import build_mesh, check_mesh, current_device
from shardplug.core.precision import Precision
from shardplug.core.ranks.rank_sync import control_group, drain_gloo_at_exit
from shardplug.core.schedule import Schedule
from shardplug.core.shard import Sharding, refuse_unshardable, shard_model
from shardplug.core.stage import STAGES
from shardplug.core.units import plan_units
from shardplug.core.weights.origin import note_source_dtypes
from shardplug.engine.accounting import held_bytes, moved_bytes
from shardplug.engine.gathering import Gathering
from shardplug.engine.listener import EngineListener, Listeners
from shardplug.engine.models import ShardedModel, ShardedModels, offload_activations
from shardplug.engine.offload import Offload
from shardplug.engine.optimizers import Optimizers
from shardplug.engine.window import Window
from shardplug.errors import ConfigError

if TYPE_CHECKING:
    from shardplug.checkpoint.write.background import Background
    from shardplug.tiers import Tier

__all__ = ["ZeroEngine"]

ModelT = TypeVar("ModelT", bound=nn.Module)
OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
PathLikeStr = str | PathLike[str]


class ZeroEngine:
    """Shards models over the data-parallel ranks and drives the ZeRO schedule.

    Making an engine is collective, and so is every method whose docstring says so: call it on
    every rank.

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
        listeners: What watches the run: `shardplug.default_listeners()` explains out-of-memory
            errors, ends the job when a rank is lost, and says at the start what offloaded state
            takes. None watches when left out.

    Raises:
        ConfigError: When no process group is up, the mesh contradicts the configuration, or the
            folder for swap files is missing or cannot be written to.
    """

    def __init__(
        self,
        config: ZeroConfig,
        device_mesh: DeviceMesh | None = None,
        *,
        listeners: Sequence[EngineListener] = (),
    ) -> None:
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
        self._control = control_group(self.device)
        self._sharding = Sharding(
            mesh=device_mesh,
            stage=STAGES[config.stage],
            precision=Precision.of(config),
            device=self.device,
            prefetch=config.prefetch,
            on_cpu=config.offload_params == "cpu",
        )
        drain_gloo_at_exit()
        patch_for(device_mesh, refuse_mixed_scalar)
        self._listeners = Listeners(listeners)
        self._offload = Offload(config, self.device, self._control)
        self._schedule = Schedule(self._sharding.stage)
        self._models = ShardedModels()
        self._window = Window(self._models, self._schedule, self._offload, self._listeners)
        self._optimizers = Optimizers(
            self._models,
            self._window,
            self._offload,
            self._listeners,
            device_mesh,
            self._control,
            self._poll_save,
        )
        self._gathering = Gathering(self._models, self._offload, device_mesh, self._control)
        self._background: Background | None = None
        self._closed = False
        # What hooks into models refers to the window, which may outlive the engine with them.
        self._unpatch = weakref.finalize(self._window, unpatch_for, device_mesh)
        self._listeners.tell(EngineListener.opened, self)

    # ---------------------------------------------------------------- models and optimizers

    @property
    def models(self) -> list[nn.Module]:
        """The sharded models, in the order they were sharded."""
        return self._models.modules

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The prepared optimizers that are alive, in no fixed order."""
        return list(self._optimizers)

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that are open."""
        return self._offload.tiers

    @property
    def listeners(self) -> list[EngineListener]:
        """What watches the run."""
        return list(self._listeners)

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
        self._listeners.tell(EngineListener.before_shard, model)
        with self._listeners.telling_errors():
            self._shard(model, cast_inputs, forward_methods, child_units)
        self._listeners.tell(EngineListener.after_shard)
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
            master_dtype=torch.float32 if self._sharding.precision.keeps_masters else None,
        )
        if self.config.activation_checkpointing:
            checkpoint_activations(model, plan.blocks)
        shard_model(
            model,
            plan,
            self._sharding,
            cast_inputs=cast_inputs,
            forward_methods=forward_methods,
            on_unit=self._offload.move_unit,
        )
        self._offload.move_units(model)
        self._optimizers.binding.record(before, model)
        assert isinstance(model, FSDPModule)
        self._schedule.attach(model)
        lazy_init_root(model)  # takes over parameters that were filled after they were sharded
        activations = (
            None
            if self.config.offload_activations == "none"
            else offload_activations(model, plan.blocks, self._sharding)
        )
        sharded = ShardedModel.follow(
            model,
            self._sharding,
            self._control,
            index=self._models.count,
            hooks=hooks,
            activations=activations,
            forward_methods=forward_methods,
            on_backward=self._window.backward_reaches_unit,
            offload=self._offload,
            listeners=self._listeners,
        )
        self._models.add(sharded)
        sharded.clear_gradients_in_zero_grad(self._optimizers.zero_grad)

    def forget(self, model: nn.Module) -> None:
        """Stop keeping a sharded model, so that its memory goes when the caller drops it."""
        self._models.forget(model)
        self._schedule.detach(model)

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
        self._optimizers.prepare(optimizer)
        return optimizer

    # ---------------------------------------------------------------- the step

    def micro_step(self, last: bool = True) -> AbstractContextManager[None]:
        """Run one micro-batch's forward and backward inside this context.

        Args:
            last: Whether it is the last micro-batch before the optimizer step. Outside any
                `micro_step` each backward counts as the last.
        """
        return self._window.micro_step(last)

    def after_backward(self) -> None:
        """Complete a backward that ran outside `micro_step`. Collective; harmless if repeated.

        An optimizer step or a clip does it too, where it was left out.

        Raises:
            ScheduleError: On every rank, when the ranks used different units.
        """
        self._window.after_backward()

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
        self._window.require_boundary("clipping")
        if isinstance(parameters, torch.Tensor):
            parameters = [parameters]
        if parameters is None:
            return list(self._models.resting_parameters)
        return [self._optimizers.binding.current(p) for p in parameters]

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
        with self._gathering.open(model, modify=modify, src=src, grad=grad):
            yield

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
        from shardplug.checkpoint.state.whole_weights import whole_state
        from shardplug.collective import gather

        model = self._models.one(model)
        gather(None, "full_state_dict()")  # a rank that calls alone learns it here
        self._models.require_unmodified("full_state_dict()")
        self.reshard()
        return whole_state(model, keep=self.rank == 0 or not rank0_only)

    def reshard(self) -> None:
        """Drop all gathered copies, so that every parameter is its shard again."""
        self._models.reshard()

    def reset(self) -> None:
        """Return to rest after an exception in a forward or backward.

        The window under way is lost: its gradients are dropped on this rank. Call it on every
        rank before training goes on.

        Raises:
            ModelError: When a parameter was written to while it was gathered, in a way that cannot
                be kept. The engine is at rest then, too.
        """
        with ExitStack() as stack:
            for sharded in self._models:
                stack.enter_context(sharded.calls.writes.reported_at_end())
            for sharded in self._models:
                sharded.reset()
            self._offload.reset()
            self._window.reset()

    def close(self) -> None:
        """Undo what the engine has changed in this process. Collective.

        The save under way is waited for, tiers are closed and their files removed, listeners are
        told. With the last engine of the process torch's own methods are back in their places.
        Optimizers get their own methods back. Models stay sharded, for `state_dict` and the like,
        and cannot be trained further.

        Raises:
            CheckpointError: On every rank, when the save under way failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait_for_save()
        finally:
            self._optimizers.release()
            self._offload.close()
            self._listeners.tell(EngineListener.closed)
            self._unpatch()
            if self._control is not dist.group.WORLD:
                dist.destroy_process_group(self._control)

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
        return held_bytes(
            self._models,
            self._optimizers,
            self._offload,
            params_on_cpu=self._sharding.on_cpu,
            snapshot_bytes=0 if self._background is None else self._background.memory.num_bytes,
        )

    def traffic(self) -> dict[str, float]:
        """Return what the latest step moved between memory and its tiers, on this rank.

        Returns:
            "bytes_read", "bytes_written" and "waited_seconds" (time that the training stood still
            for them): of the optimizers' latest steps and, with `offload_params`, of the gathers
            and gradients before them. Zeros without offload, and for "cpu" on CPU ranks, where
            the state is used in place. With `offload_activations` what left the device is written
            and what came back is read, on CPU ranks too; nobody knows the time waited for it.
        """
        return moved_bytes(self._models, self._offload)

    def add_phase_listener(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with "after_forward", "after_backward" and "after_step"."""
        self._listeners.on_phase.append(listener)

    def remove_phase_listener(self, listener: Callable[[str], None]) -> None:
        """Stop calling `listener`."""
        self._listeners.on_phase.remove(listener)

    def telling_errors(self) -> AbstractContextManager[None]:
        """Tell the listeners of an exception of the code inside, and let it through.

        For code that is not in a `micro_step` or an optimizer's step.
        """
        return self._listeners.telling_errors()

    def tell_error(self, error: BaseException) -> None:
        """Tell the listeners of an exception."""
        self._listeners.tell_error(error)

    # ---------------------------------------------------------------- checkpoints

    @property
    def background(self) -> Background:
        """What writes checkpoints beside the training; hosts pass it to `checkpoint.write`."""
        if self._background is None:
            from shardplug.checkpoint.write.background import Background

            self._background = Background()
        return self._background

    def _poll_save(self) -> None:
        if self._background is not None:
            self._background.poll()

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
        from shardplug.engine.checkpoints import save

        self._models.require_unmodified("save()")
        if self._background is not None:
            self._background.wait()  # what was started first is published first
        background = self.background if async_save else None
        save(self, path, optimizers, extra, side_files, background)

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
        from shardplug.engine.checkpoints import load

        self._models.require_unmodified("load()")
        return load(self, path, optimizers, strict=strict, rng=rng, rename=rename)
