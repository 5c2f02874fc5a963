"""The Fabric strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from shardplug.config import Tier
from shardplug.errors import ConfigError
from shardplug.integrations.common import attach, comm, namespace
from shardplug.integrations.common import precision_option as precision
from shardplug.integrations.common.async_save import AsyncSaveMixin
from shardplug.integrations.common.options import budget_of, config_of, preset_options
from shardplug.integrations.common.process_group_mixin import ProcessGroupMixin
from shardplug.integrations.data.example import example_batch
from shardplug.integrations.fabric.entry import Entry
from shardplug.integrations.fabric.saving import SavesState
from shardplug.plan.auto import AutoBudget, auto_config
from shardplug.plan.run.announce import Announcement

if TYPE_CHECKING:
    _Base: Any  # a ParallelStrategy; which one, strategy_class says
else:
    _Base = object

__all__ = ["FabricStrategy", "from_preset", "strategy_class"]


class FabricStrategy(SavesState, AsyncSaveMixin, ProcessGroupMixin, _Base):  # type: ignore[misc]
    """Shards the modules set up with Fabric over the data-parallel ranks (ZeRO stage 1, 2 or 3).

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
            computation; left out, it follows Fabric's precision.
        reduce_dtype: dtype that gradients are reduced in; left out, it follows too.
        activation_checkpointing: Recompute activations of the repeated blocks in the backward.
        offload_activations: Where activations wait for the backward: "none" or "cpu".
        prefetch: Units gathered ahead of their use.
        watchdog: What happens when a rank is lost: the job ends on all ranks ("end"), it is logged
            ("report"), or nothing ("off").
        silence_seconds: Limit for a rank that is stopped, or silent on another machine.
        stall_seconds: Limit for ranks that live but end no forward, backward or step.
        async_save: `fabric.save` copies the shards into CPU memory and returns; they are written
            while training goes on. A failure is raised on every rank by the optimizer step, save
            or load that comes next. Call `fabric.strategy.wait_for_save()` at the end.
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
        self._loader: Any = None
        self._backward_sync_control = _sync_control(self._namespace)(self)

    # ---------------------------------------------------------------- the world

    @property
    def _num_nodes(self) -> int:
        return self.num_nodes

    @_num_nodes.setter
    def _num_nodes(self, number: int) -> None:  # the name that Fabric sets
        self.num_nodes = number

    def _set_world_ranks(self) -> None:
        self._assign_ranks(("utilities.rank_zero",))

    def setup_environment(self) -> None:
        """Set the device and the process group up."""
        super().setup_environment()
        self._set_world_ranks()
        self._connect()

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; other objects are returned as they are."""
        return comm.reduce(tensor, group, reduce_op)

    # ---------------------------------------------------------------- set-up

    @property
    def precision(self) -> Any:
        """Fabric's precision plugin."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            precision.with_precision(self.config, plugin)  # refuse before anything is built
            precision.share_scaler(plugin)
        self._precision = plugin

    def module_init_context(
        self, empty_init: bool | None = None
    ) -> AbstractContextManager[Any, bool | None]:
        """Build on meta when `empty_init` is true; else where the user's code builds."""
        stack = ExitStack()
        stack.enter_context(torch.device("meta") if empty_init else nullcontext())
        stack.enter_context(self.precision.module_init_context())
        return stack

    def module_to_device(self, module: nn.Module) -> None:
        """Move metrics; a module with parameters is moved by sharding it, unit by unit."""
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module. Collective."""
        return self._shard(module, several_optimizers=False)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Make an optimizer, built before or after its module was set up, train the shards."""
        return self.engine.prepare_optimizer(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard a module and make its optimizers train the shards. Collective."""
        attach.require_trainable(module)
        entry = self._shard(
            module, several_optimizers=len(optimizers) > 1, optimizer=next(iter(optimizers), None)
        )
        return entry, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def process_dataloader(self, dataloader: Any) -> Any:
        """Remember the loader, for zero_auto to plan with."""
        self._loader = dataloader
        return super().process_dataloader(dataloader)

    def _shard(
        self,
        module: nn.Module,
        *,
        several_optimizers: bool,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> nn.Module:
        config = precision.with_precision(self.config, self.precision)
        config = attach.config_for(module, config, self._budget)
        engine = attach.engine_for(module, config)
        if engine is not None:
            self._engine = self._engine or engine
            return Entry(module)
        if self._engine is None:
            if self._budget is not None:
                batch = self._budget.example_batch
                config = auto_config(
                    module,
                    self._budget,
                    batch=example_batch(self._loader) if batch is None else batch,
                    optimizer=optimizer,
                    base=config,
                    loop="lightning",
                    device=self.root_device,
                )
            self._engine = attach.new_engine(config, self.root_device)
            self._announcement = Announcement(self._engine)
        by_hand = getattr(module, "automatic_optimization", True) is False
        attach.shard(
            self._engine,
            module,
            # Fabric converts inputs and runs the forward under autocast itself.
            cast_inputs=not precision.autocasts(self.precision),
            forward_methods=(),
            child_units=several_optimizers or by_hand,
        )
        if self._announcement is not None:
            self._announcement.follow_models()
        return Entry(module)

    # ---------------------------------------------------------------- the step

    def backward(self, tensor: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward and complete the gradients."""
        telling = nullcontext() if self._engine is None else self._engine.telling_errors()
        with telling:
            super().backward(tensor, module, *args, **kwargs)
            if self._engine is not None and not self._in_window:
                self._engine.after_backward()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the global norm of an optimizer's gradients. Collective.

        Returns:
            The norm before clipping, the same on every rank.
        """
        self.precision.unscale_gradients(optimizer)
        norm = self.engine.clip_grad_norm(
            float(max_norm),
            parameters=self.precision.main_params(optimizer),
            norm_type=float(norm_type),
            error_if_nonfinite=error_if_nonfinite,
        )
        return torch.tensor(norm, device=self.root_device)

    def clip_gradients_value(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float
    ) -> None:
        """Clamp every element of an optimizer's gradients."""
        self.precision.unscale_gradients(optimizer)
        parameters = self.precision.main_params(optimizer)
        self.engine.clip_grad_value(float(clip_val), parameters=parameters)


@functools.cache
def _sync_control(namespace_: str) -> type[Any]:
    base = namespace.lookup(namespace_, "strategies.strategy", "_BackwardSyncControl")
    return type("_WindowControl", (_WindowControl, base), {})


class _WindowControl:
    """Fabric's `no_backward_sync`: a micro-batch that is not the last of its window."""

    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> AbstractContextManager[Any, bool | None]:
        """Return the context to run forward and backward in."""
        return _Window(self._strategy) if enabled else nullcontext()


class _Window(AbstractContextManager[None, "bool | None"]):
    def __init__(self, strategy: FabricStrategy) -> None:
        self._strategy = strategy
        self._step = strategy.engine.micro_step(last=False)

    def __enter__(self) -> None:
        self._strategy._in_window = True
        self._step.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        self._strategy._in_window = False
        return self._step.__exit__(*error)


@functools.cache
def strategy_class(namespace_: str) -> Callable[..., Any]:
    """Return the strategy class for one of Fabric's import names.

    Args:
        namespace_: "lightning.fabric" or "lightning_fabric".

    Returns:
        A subclass of that namespace's ParallelStrategy, with `FabricStrategy`'s options.

    Raises:
        ConfigError: For another name.
    """
    if namespace_ not in namespace.FABRIC:
        raise ConfigError(f"Expected one of {', '.join(namespace.FABRIC)}, got {namespace_!r}.")
    base = namespace.lookup(namespace_, "strategies", "ParallelStrategy")
    body = {
        "__doc__": FabricStrategy.__doc__,
        "__module__": "shardplug.fabric",
        "_namespace": namespace_,
    }
    return type("ZeroStrategy", (FabricStrategy, base), body)


def from_preset(namespace_: str, preset: str) -> Any:
    """Build the strategy behind a string such as "zero3".

    Raises:
        ConfigError: For an unknown preset.
    """
    return strategy_class(namespace_)(**preset_options(preset))
