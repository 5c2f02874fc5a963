"""The Trainer strategy.

The module is sharded in place, before a checkpoint is restored and before `configure_optimizers`,
so that hooks run in the order they have with DDP:

    setup, configure_model -> shard -> on_load_checkpoint -> configure_optimizers -> on_fit_start
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shardplug import watchdog as watchdog
from shardplug.config import Tier
from shardplug.engine import ZeroEngine
from shardplug.errors import ConfigError
from shardplug.integrations.common import attach, batchnorm, comm, namespace
from shardplug.integrations.common import precision_option as precision
from shardplug.integrations.common.async_save import AsyncSaveMixin
from shardplug.integrations.common.options import budget_of, config_of, preset_options
from shardplug.integrations.common.process_group_mixin import ProcessGroupMixin
from shardplug.integrations.lightning import automatic, callbacks
from shardplug.integrations.lightning.first_step import first_step
from shardplug.integrations.lightning.precision import clip_through_engine
from shardplug.integrations.lightning.restoring import LoadMixin
from shardplug.integrations.lightning.saving import SaveMixin
from shardplug.integrations.lightning.steps import RunsSteps
from shardplug.plan.auto import AutoBudget
from shardplug.plan.run.announce import Announcement

if TYPE_CHECKING:
    _Base: Any  # a ParallelStrategy; which one, strategy_class says
else:
    _Base = object

__all__ = ["TrainerStrategy", "from_preset", "strategy_class"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class TrainerStrategy(RunsSteps, SaveMixin, LoadMixin, AsyncSaveMixin, ProcessGroupMixin, _Base):  # type: ignore[misc]
    """Shards a LightningModule over the data-parallel ranks (ZeRO stage 1, 2 or 3).

    Args:
        stage: 1 shards optimizer states, 2 also gradients, 3 also parameters.
        offload_optimizer: Where optimizer state lives: "none", "cpu" or "nvme".
        offload_params: Where parameters live: "none", "cpu" or "nvme".
        nvme_path: Folder for swap files, for the "nvme" tier.
        offload_cpu_gib: With "nvme": GiB of CPU memory that a rank's optimizer state fills before
            files.
        replicate_size: Replicas (HSDP): 1 shards over all ranks.
        units: Which modules are gathered together: "auto", or class names.
        param_dtype: "bf16", "fp16" or "fp32": dtype of gathered parameters and of the
            computation; left out, it follows the Trainer's precision.
        reduce_dtype: dtype that gradients are reduced in; left out, it follows too.
        activation_checkpointing: Recompute activations of the repeated blocks in the backward.
        offload_activations: Where activations wait for the backward: "none" or "cpu".
        prefetch: Units gathered ahead of their use.
        watchdog: What happens when a rank is lost: the job ends on all ranks ("end"), it is logged
            ("report"), or nothing ("off").
        silence_seconds: Limit for a rank that is stopped, or silent on another machine.
        stall_seconds: Limit for ranks that live but end no forward, backward or step.
        async_save: Copy the shards into CPU memory and train on while a checkpoint is written; one
            that cannot be written ends the training. `fit` returns when the last is on disk.
        load_rename: New names of parameters, buffers or whole modules, by those in the checkpoint
            that is loaded. A checkpoint that has an entry's new name already is taken as it is.
        budget: For zero_auto: stage, tiers and checkpointing are the fastest that fit into it,
            found before the module is sharded. An `AutoBudget`, or its fields as a mapping.
        process_group_backend: torch backend; left out, NCCL for CUDA and gloo for the CPU.
        timeout: How long a collective waits for a rank before it fails.
        **unknown: Refused.

    Raises:
        ConfigError: For an unknown option or an impossible value.
    """

    strategy_name = "zero"
    is_distributed = True  # else Lightning gives every rank the same samples

    def __init__(
        self,
        stage: Literal[1, 2, 3] = 3,
        *,
        offload_optimizer: Tier = "none",
        offload_params: Tier = "none",
        nvme_path: str | None = None,
        offload_cpu_gib: float | None = None,
        replicate_size: int = 1,
        units: str | tuple[str, ...] = "auto",
        param_dtype: str | torch.dtype | None = None,
        reduce_dtype: str | torch.dtype | None = None,
        activation_checkpointing: bool = False,
        offload_activations: Literal["none", "cpu"] = "none",
        prefetch: int = 1,
        watchdog: Literal["end", "report", "off"] = "end",
        silence_seconds: float = 20.0,
        stall_seconds: float | None = None,
        async_save: bool = False,
        load_rename: Mapping[str, str] | None = None,
        budget: AutoBudget | Mapping[str, Any] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        **unknown: Any,
    ) -> None:
        config = config_of(
            {
                "stage": stage,
                "offload_optimizer": offload_optimizer,
                "offload_params": offload_params,
                "nvme_path": nvme_path,
                "offload_cpu_gib": offload_cpu_gib,
                "replicate_size": replicate_size,
                "units": units,
                "param_dtype": param_dtype,
                "reduce_dtype": reduce_dtype,
                "activation_checkpointing": activation_checkpointing,
                "offload_activations": offload_activations,
                "prefetch": prefetch,
                "watchdog": watchdog,
                "silence_seconds": silence_seconds,
                "stall_seconds": stall_seconds,
                **unknown,
            }
        )
        self._join(config, process_group_backend, timeout, budget_of(budget, config))
        self._keep_checkpoints(async_save, load_rename)
        super().__init__()

    # ---------------------------------------------------------------- the world

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero helpers this process's rank."""
        self._assign_ranks(("utilities.rank_zero", "utilities"))

    def setup_environment(self) -> None:
        """Set the device and the process group up, and refuse what cannot work."""
        super().setup_environment()
        self.set_world_ranks()
        self._connect()
        trainer = self.lightning_module.trainer
        callbacks.refuse(trainer, self.lightning_module)
        callbacks.follow_saves(trainer, self._is_being_saved, self._link)
        callbacks.watch_swaps(trainer)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; other objects are returned as they are."""
        return comm.reduce(tensor, group, reduce_op)

    # ---------------------------------------------------------------- precision

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plugin, which clips through the engine."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            precision.with_precision(self.config, plugin)  # refuse before anything is built
            precision.share_scaler(plugin)
            plugin = clip_through_engine(plugin, _engine_of(self))
        self._precision_plugin = plugin

    # ---------------------------------------------------------------- set-up

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build on meta when `empty_init` is true; else where the user's code builds.

        Whole models are never built on the rank's device.
        """
        where = torch.device("meta") if empty_init else nullcontext()
        with where, self.precision_plugin.tensor_init_context():
            yield

    def connect(self, model: Any) -> None:
        """Take the Trainer's module; another module gets another engine."""
        if model is not self._lightning_module:
            self._engine = None
        super().connect(model)

    def shard_module(self) -> None:
        """Shard the connected module, and the copies that averaging callbacks keep of it."""
        module = self.lightning_module
        config = precision.with_precision(self.config, self.precision_plugin)
        config = attach.config_for(module, config, self._budget)
        self._engine = attach.engine_for(module, config)
        if self._engine is None:
            if self._layer_sync is not None:
                # Not undone at teardown: the engine knows the layers it has sharded.
                self._layer_sync.apply(module)
                if self.root_device.type == "cpu":
                    batchnorm.run_on_cpu(module)
            self.precision_plugin.convert_module(module)
            if self._budget is not None:
                config = automatic.decide(module, self._budget, config, self.root_device)
            folder = module.trainer.default_root_dir
            self._engine = attach.new_engine(config, self.root_device, folder)
            if self._budget is None:  # zero_auto has said its plan
                self._announcement = Announcement(self._engine, listens=False)
            self._shard(module)
        for copy in callbacks.average_models(module.trainer):
            if not any(copy is known for known in self._engine.models):
                self._shard(copy)

    def _shard(self, module: nn.Module) -> None:
        assert self._engine is not None
        attach.shard(
            self._engine,
            module,
            # Autocast casts where it must; casting the root's inputs would round float targets.
            cast_inputs=not precision.autocasts(self.precision_plugin),
            forward_methods=_STEPS,
            child_units=not getattr(module, "automatic_optimization", True),
        )

    def setup(self, trainer: Any) -> None:
        """Shard the module and make the optimizers ready."""
        self.accelerator.setup(trainer)
        self.shard_module()
        attach.require_unchanged(self.lightning_module)
        # Lightning leaves inference mode off for FSDPStrategy and gloo only; FSDP2's gathered
        # parameters must not be inference tensors.
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            loop.inference_mode = False
        fitting = trainer.state.fn == "fit"
        if fitting:
            attach.require_trainable(self.lightning_module)
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        self.barrier()
        self._is_running = True

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the optimizers, and make those built before sharding train the shards."""
        super().setup_optimizers(trainer)
        for optimizer in self.real_optimizers():
            self.engine.prepare_optimizer(optimizer)
        prepared: list[Any] = self._optimizers
        self.optimizers = prepared  # made anew: Lightning's wrappers copy what was there before

    def model_to_device(self) -> None:
        """Do nothing: sharding moves the module, unit by unit."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step; the first one is planned before."""
        if self._announcement is not None and args:
            module, number = self.lightning_module, args[1] if len(args) > 1 else 0
            # A trace would run the user's step once more, with all that it does besides.
            self._announcement.begin(
                lambda: dataclasses.replace(
                    first_step(module.trainer, module, args[0], number),
                    untraceable="the step is traced for a MemoryCurve only",
                )
            )
            self._announcement = None
        return super().training_step(*args, **kwargs)

    # ---------------------------------------------------------------- the end

    def on_train_end(self) -> None:
        """Wait for the last save."""
        self.wait_for_save()

    def on_exception(self, exception: BaseException) -> None:
        """Bring the engine back to rest, so that the same module can be fitted again."""
        watchdog.raised(exception)  # first, as what follows waits for ranks that did not raise
        self.forget_rng()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            _drop_unread_data(self.lightning_module.trainer)
        if self._engine is None:
            return
        self._engine.tell_error(exception)
        self._end_save_after(exception)
        try:
            self._engine.reset()
            callbacks.swap_back(self.lightning_module.trainer, self.lightning_module)
        except RuntimeError as error:
            # The exception that brought us here is the one to be seen; this one follows from it.
            reason = str(error).partition("\n")[0]
            warnings.warn(
                "The ranks could not be brought back to rest, as one of them has failed or is gone "
                f"({reason}). Look at the first error of the other ranks, and start all of them "
                "again.",
                UserWarning,
                stacklevel=2,
            )

    def teardown(self) -> None:
        """Leave the module sharded where it is; a later fit or test goes on with it."""
        self.forget_rng()
        self._is_running = False
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            callbacks.unfollow(self.lightning_module.trainer)
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()


def _drop_unread_data(trainer: Any) -> None:
    """Take data that could not be iterated from the loops, which would ask it for its length.

    That fails, and Lightning's error would be raised in place of the first one.
    """
    loop = trainer._active_loop
    inner = getattr(getattr(loop, "epoch_loop", None), "val_loop", None)
    owners: tuple[Any, ...] = (loop, inner)
    for owner in owners:
        fetcher = getattr(owner, "_data_fetcher", None)
        loader = getattr(fetcher, "_combined_loader", None)
        if loader is not None and loader._iterator is None:
            loader.reset()  # ends workers
            owner._data_fetcher = None


def _engine_of(strategy: TrainerStrategy) -> Callable[[], ZeroEngine]:
    """Return a way to the engine that does not keep the strategy, and so the model, alive."""
    reference = weakref.ref(strategy)

    def engine() -> ZeroEngine:
        alive = reference()
        assert alive is not None
        return alive.engine

    return engine


@functools.cache
def strategy_class(namespace_: str) -> Callable[..., Any]:
    """Return the strategy class for one of Lightning's import names.

    Args:
        namespace_: "lightning.pytorch" or "pytorch_lightning".

    Returns:
        A subclass of that namespace's ParallelStrategy, with `TrainerStrategy`'s options.

    Raises:
        ConfigError: For another name.
    """
    if namespace_ not in namespace.TRAINER:
        raise ConfigError(f"Expected one of {', '.join(namespace.TRAINER)}, got {namespace_!r}.")
    base = namespace.lookup(namespace_, "strategies", "ParallelStrategy")
    body = {
        "__doc__": TrainerStrategy.__doc__,
        "__module__": "shardplug.lightning",
        "_namespace": namespace_,
    }
    return type("ZeroStrategy", (TrainerStrategy, base), body)


def from_preset(namespace_: str, preset: str) -> Any:
    """Build the strategy behind a string such as "zero3".

    Raises:
        ConfigError: For an unknown preset.
    """
    return strategy_class(namespace_)(**preset_options(preset))
