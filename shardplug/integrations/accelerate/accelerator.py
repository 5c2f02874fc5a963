"""The `Accelerator` that shards: Accelerate's own interface over a ZeRO engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils.modeling import get_mixed_precision_context_manager
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from shardplug.errors import ConfigError, ModelError, OptimizerError
from shardplug.integrations.accelerate import states
from shardplug.integrations.accelerate.base import engine_of
from shardplug.integrations.accelerate.gradients import GradientMethods
from shardplug.integrations.accelerate.hf_trainer.spread import refuse_spread
from shardplug.integrations.accelerate.loaders import (
    advance_past_skipped,
    agree_on_order,
    keep_in_step,
    refuse_uneven,
)
from shardplug.integrations.accelerate.mixed import add_autocast, remove_autocast
from shardplug.integrations.accelerate.saving import SavingMethods
from shardplug.integrations.data.example import example_batch
from shardplug.plan.auto import auto_config

__all__ = ["Accelerator"]


class Accelerator(GradientMethods, SavingMethods):
    """Accelerate's `Accelerator`, sharding models and optimizers with ZeRO 1, 2 or 3.

    Everything is used as in Accelerate, on GPU and on CPU ranks. What differs:

    - `prepare` takes any number of models and optimizers, together or one by one, in any order.
      An optimizer made before its model was prepared is kept: it trains the sharded parameters.
    - `clip_grad_value_` works; `clip_grad_norm_` returns the global norm, equal on all ranks. Both
      belong behind `if accelerator.sync_gradients:` when gradients are accumulated.
    - `save_state` writes one folder that any stage, number of ranks or framework can resume from;
      nothing is left behind by a save that was interrupted.
    - Samplers are seedable unless a `dataloader_config` says otherwise, so that `load_state`
      followed by `skip_first_batches` sees the samples of the interrupted epoch that remain.
    - As in Accelerate, a prepared scheduler advances `num_processes` times per optimizer step:
      build it for `updates * num_processes` steps, or pass
      `DataLoaderConfiguration(split_batches=True)`, or do not prepare it and step it once where
      `sync_gradients` is true.

    Args:
        *args: As for `accelerate.Accelerator`.
        zero: "zero1", "zero2", "zero3", options like "stage=2,replicate_size=2", or a
            `ZeroConfig`. None takes the string after "shardplug:" in
            `fsdp_sharding_strategy` of the YAML given to `accelerate launch`.
        async_save: `save_state` copies the shards into CPU memory and returns; they are written
            while training goes on. A failure is raised on every rank by the optimizer step, save
            or load that comes next, or by `end_training`. None takes `async_save=true` from the
            string above.
        **kwargs: As for `accelerate.Accelerator`.

    Raises:
        ConfigError: On every rank, for a missing or wrong stage, or for a setting that would
            sidestep or double the sharding.
    """

    def prepare(self, *args: Any, device_placement: list[bool | None] | None = None) -> Any:
        """Prepare models, optimizers, data loaders and schedulers, in whatever order they come.

        Args:
            *args: The objects; anything else is returned as it is.
            device_placement: One flag per object, or None. Sharded models are always placed.

        Returns:
            The prepared objects in the same order; the object itself if there is one.

        Raises:
            ModelError: When the models passed with an optimizer have nothing to train, or a model
                cannot be sharded.
            OptimizerError: When an optimizer holds parameters of no prepared model.
        """
        flags = device_placement or [None] * len(args)
        if len(flags) != len(args):
            raise ConfigError(
                f"Expected device_placement to have {len(args)} entries, got {len(flags)}."
            )
        self._refuse_nothing_to_train(args)
        self._note_what_comes(args)
        result = list(args)
        # Models first: the parameters that optimizers hold are exchanged when these are sharded.
        kinds: list[tuple[type[Any], Callable[..., Any]]] = [
            (nn.Module, self.prepare_model),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
        ]
        for kind, prepare_one in kinds:
            for index, obj in enumerate(args):
                if isinstance(obj, kind):
                    result[index] = prepare_one(obj, device_placement=flags[index])
        for index, obj in enumerate(args):
            if isinstance(obj, LRScheduler):
                result[index] = self.prepare_scheduler(obj)
        for before, after in zip(args, result, strict=True):
            if after is not before or isinstance(after, (nn.Module, torch.optim.Optimizer)):
                after._is_accelerate_prepared = True
        return tuple(result) if len(result) != 1 else result[0]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard a model in place and add mixed precision.

        Args:
            model: The bare model, on any device, meta included.
            device_placement: Not used: the shards live on this rank's device.
            evaluation_mode: Not used: a model without optimizer is sharded alike.

        Returns:
            The same object.

        Raises:
            ModelError: When the model is wrapped, placed by `device_map`, or cannot be sharded.
        """
        if any(model is known for known in self._models):
            return model
        refuse_spread(self, model)
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ModelError(
                f"Expected an unsharded model, but {type(model).__name__} was sharded by "
                "transformers. Take distributed_config out of from_pretrained; "
                "shardplug.hf.from_pretrained lets each rank read its own rows too."
            )
        if self._engine is None:
            self._engine = engine_of(model)
        if next(model.parameters(), None) is None:
            model = model.to(self.device)
        else:
            self._decide(model)
            model = self.engine.shard(model, cast_inputs=not self.native_amp)
            self._remember(model)
            if self.native_amp:
                add_autocast(
                    model,
                    get_mixed_precision_context_manager(self.native_amp, self.autocast_handler),
                )
        self._models.append(model)
        self._adopt_optimizers()
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Make an optimizer train the sharded parameters and step with `sync_gradients`.

        Args:
            optimizer: Any torch optimizer over the model's parameters, made before or after the
                model was prepared. When no model has been prepared yet, it is completed with the
                first `prepare` that brings its model.
            device_placement: Not used: its state is made where the shards live.

        Raises:
            OptimizerError: When it holds parameters of no prepared model.
        """
        if any(optimizer is known for known in self._optimizers):
            return optimizer
        inner = states.bare_optimizer(optimizer)
        if self._engine is not None and self._engine.models:
            self._engine.prepare_optimizer(inner)
        else:
            self._unsharded_optimizers.append(inner)
        if not self._optimizers:
            inner.register_step_post_hook(self._count_step)
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any
    ) -> DataLoader[Any]:
        """Split a data loader over the ranks, as Accelerate does.

        Args:
            data_loader: The loader of the whole data, the same on every rank.
            *args: As for `accelerate.Accelerator.prepare_data_loader`.
            **kwargs: As for `accelerate.Accelerator.prepare_data_loader`.

        Streamed data (an IterableDataset) ends on every rank when the first rank has no more.

        Raises:
            ConfigError: When `even_batches=False` gives the ranks different numbers of batches.
        """
        prepared: DataLoader[Any] = super().prepare_data_loader(data_loader, *args, **kwargs)
        agree_on_order(prepared)
        keep_in_step(prepared)
        if not self.even_batches:
            refuse_uneven(prepared)
        return prepared

    def skip_first_batches(
        self, dataloader: DataLoader[Any], num_batches: int = 0
    ) -> DataLoader[Any]:
        """Return the rest of the loader's current epoch; the loader goes on with the next epoch.

        Args:
            dataloader: A prepared loader.
            num_batches: Batches of this rank that are left out at the beginning.
        """
        skipped: DataLoader[Any] = super().skip_first_batches(dataloader, num_batches)
        keep_in_step(skipped)
        advance_past_skipped(dataloader, skipped)
        return skipped

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model itself, which `prepare` never wrapped.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether its forward keeps running under mixed precision.
            keep_torch_compile: As in Accelerate.
        """
        model = super().unwrap_model(model, True, keep_torch_compile)
        if not keep_fp32_wrapper:
            remove_autocast(model)
        return model

    def gathered(
        self,
        model: nn.Module | None = None,
        *,
        modify: bool = False,
        src: int | None = None,
        grad: bool = False,
    ) -> AbstractContextManager[None]:
        """Hold parameters whole, to generate, evaluate or change them. Collective.

            with accelerator.gathered(model):
                tokens = model.generate(prompts)

        Ranks may generate texts of different lengths inside, or none. With `modify` whole master
        weights can be changed inside; at the end every rank's shards and tiers have the new values.

        Args:
            model: A prepared model, or a module in one; None means all that are prepared.
            modify: Whether parameters are changed.
            src: With `modify`, the rank whose values count on all ranks; None means that every
                rank makes the same changes.
            grad: Record gradients, for losses that are made of the parameters.

        Returns:
            A context; see `ZeroEngine.gathered`.
        """
        return self.engine.gathered(model, modify=modify, src=src, grad=grad)

    def free_memory(self, *objects: Any) -> Any:
        """Drop the references to all prepared objects, as Accelerate does; waits for a save."""
        self.wait_for_save()
        if self._engine is not None:
            self._engine.reset()
        self._engine = self._announcement = None
        self._unsharded_optimizers = []
        return super().free_memory(*objects)

    def _note_what_comes(self, objects: tuple[Any, ...]) -> None:
        """Keep hold of data and optimizer until zero_auto has planned for them."""
        if self._budget is not None and self._engine is None:
            self._expected += [
                obj for obj in objects if isinstance(obj, (DataLoader, torch.optim.Optimizer))
            ]

    def _decide(self, model: nn.Module) -> None:
        if self._budget is None or self._engine is not None:
            return
        known, self._expected = [*self._expected, *self._dataloaders], []
        loaders = [obj for obj in known if isinstance(obj, DataLoader)]
        optimizers = [obj for obj in known if isinstance(obj, torch.optim.Optimizer)]
        made_up = self._budget.seq_length is not None
        self.zero_config = auto_config(
            model,
            self._budget,
            batch=example_batch(loaders[0]) if loaders and not made_up else None,
            optimizer=states.bare_optimizer(optimizers[0]) if optimizers else None,
            accumulate=self.gradient_accumulation_steps,
            base=self.zero_config,
            loop="accelerate",
            device=self.device,
        )

    def _refuse_nothing_to_train(self, objects: tuple[Any, ...]) -> None:
        models = [obj for obj in objects if isinstance(obj, nn.Module)]
        if not models or not any(isinstance(obj, torch.optim.Optimizer) for obj in objects):
            return
        trainable = (p.requires_grad for m in [*models, *self._models] for p in m.parameters())
        if not any(trainable):
            names = ", ".join(type(model).__name__ for model in models)
            raise ModelError(
                f"Expected a parameter that requires gradients, got none in {names}: nothing "
                "would be trained. Set requires_grad on what should be, or prepare the model "
                "without an optimizer."
            )

    def _adopt_optimizers(self) -> None:
        waiting, self._unsharded_optimizers = self._unsharded_optimizers, []
        for optimizer in waiting:
            try:
                self.engine.prepare_optimizer(optimizer)
            except OptimizerError:
                self._unsharded_optimizers.append(optimizer)  # its model may still come
            else:
                self._renew_step(optimizer)

    def _renew_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Let Accelerate's wrapper with a gradient scaler call `step` as it is now."""
        for wrapper in self._optimizers:
            if states.bare_optimizer(wrapper) is optimizer and wrapper.scaler is not None:
                wrapper._optimizer_original_step_method = optimizer.step
                wrapper._optimizer_patched_step_method = patch_optimizer_step(
                    wrapper, optimizer.step
                )

    def _count_step(self, *_: Any) -> None:
        self.completed_steps += 1
