"""Accumulation, backward and clipping over sharded gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shardplug.errors import ConfigError, ScheduleError
from shardplug.integrations.accelerate.base import AcceleratorBase, engine_of

__all__ = ["GradientMethods"]


class GradientMethods(AcceleratorBase):
    """The part of an Accelerator between the loss and the optimizer step."""

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate: the forward and backward inside do not end the accumulation window.

        The window belongs to the engine, so it holds for every model prepared here.

        Args:
            model: A prepared model.
        """
        if self._no_sync_depth or engine_of(model) is not self.engine:
            yield
            return
        self._no_sync_depth += 1
        try:
            with self.engine.micro_step(last=False):
                yield
        finally:
            self._no_sync_depth -= 1

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Divide the loss by `gradient_accumulation_steps`, scale it for fp16, and differentiate.

        Args:
            loss: A scalar that depends on the output of a prepared model.
            **kwargs: As for `torch.Tensor.backward`.

        Raises:
            OptimizerError: When an optimizer was prepared whose model never was.
        """
        for optimizer in self._unsharded_optimizers:
            self.engine.prepare_optimizer(optimizer)  # says what is wrong with it
        with self.engine.telling_errors():
            super().backward(loss, **kwargs)
            if not self._no_sync_depth:
                self.engine.after_backward()

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Clip gradients by their global norm.

        Args:
            parameters: Parameters of prepared models, for example `model.parameters()`.
            max_norm: Largest norm that is left unchanged; `inf` only measures.
            norm_type: p of the p-norm.

        Returns:
            The norm before clipping, over all ranks and equal on them: a scalar on the device.

        Raises:
            ScheduleError: Inside an accumulation window.
        """
        chosen = self._ready_to_clip(parameters, "clip_grad_norm_")
        norm = self.engine.clip_grad_norm(
            float(max_norm), parameters=chosen, norm_type=float(norm_type)
        )
        return torch.tensor(norm, dtype=torch.float32, device=self.device)

    def clip_grad_value_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float
    ) -> None:
        """Clamp every gradient element to [-clip_value, clip_value].

        Args:
            parameters: Parameters of prepared models.
            clip_value: Largest absolute value.

        Raises:
            ScheduleError: Inside an accumulation window.
        """
        chosen = self._ready_to_clip(parameters, "clip_grad_value_")
        self.engine.clip_grad_value(float(clip_value), parameters=chosen)

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Run a loop over even inputs; uneven ones cannot be joined.

        Raises:
            ConfigError: For `even_batches=False`.
        """
        wanted = self.even_batches if even_batches is None else even_batches
        if not wanted and self.num_processes > 1:
            raise ConfigError(
                "join_uneven_inputs(even_batches=False) is not available: a sharded forward needs "
                "every rank. Leave even_batches at True, which repeats samples at the end."
            )
        yield

    def _ready_to_clip(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], name: str
    ) -> list[torch.Tensor]:
        if not self.sync_gradients or self._no_sync_depth:
            raise ScheduleError(
                f"{name} was called inside an accumulation window, where gradients are not "
                f"complete. Write: if accelerator.sync_gradients: accelerator.{name}(...)."
            )
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.scaler is not None:
            ids = {id(parameter) for parameter in chosen}
            self.unscale_gradients(
                [
                    optimizer
                    for optimizer in self._optimizers
                    if any(
                        id(p) in ids for group in optimizer.param_groups for p in group["params"]
                    )
                ]
            )
        return chosen
