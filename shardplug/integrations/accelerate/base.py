"""What an Accelerator is made of: its configuration, Accelerate's state, the engine."""

from __future__ import annotations

import inspect
import logging
import os
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from shardplug._messages import show_messages
from shardplug.config import ZeroConfig
from shardplug.core.mesh import build_mesh
from shardplug.engine import ZeroEngine
from shardplug.integrations.accelerate.distributed import (
    process_group_handler,
    refuse_too_many_ranks,
    switch_to_fsdp,
    wants_cpu,
)
from shardplug.integrations.accelerate.launch_options import LaunchOptions
from shardplug.integrations.accelerate.mixed import grad_scaler
from shardplug.integrations.accelerate.options import (
    make_plugin,
    refuse_settings,
    with_plugin,
    with_precision,
)
from shardplug.listeners import default_listeners
from shardplug.plan.run.announce import Announcement

__all__ = ["AcceleratorBase", "engine_of"]

_ENGINE = "_shardplug_engine"


def engine_of(model: nn.Module) -> ZeroEngine | None:
    """Return the engine that shards a prepared model, or None."""
    engine: ZeroEngine | None = getattr(model, _ENGINE, None)
    return engine


# Kept by name: `shardplug.run` puts our class in the place of `accelerate.Accelerator`.
_Stock = accelerate.Accelerator


class AcceleratorBase(_Stock):  # type: ignore[misc, valid-type]
    """Sets Accelerate up for the engine; see `shardplug.accelerate.Accelerator`."""

    scaler: torch.amp.GradScaler | None
    """Loss scaler of fp16 mixed precision."""

    def __init__(
        self,
        *args: Any,
        zero: str | ZeroConfig | None = None,
        async_save: bool | None = None,
        **kwargs: Any,
    ) -> None:
        signature = inspect.signature(_Stock.__init__)
        arguments = dict(signature.bind_partial(self, *args, **kwargs).arguments)
        del arguments["self"]
        options = LaunchOptions.read(zero, os.environ, async_save)
        self._budget, self._async_save = options.budget, bool(options.async_save)
        refuse_settings(arguments, os.environ)
        plugin = make_plugin(arguments.pop("fsdp_plugin", None), os.environ)
        config = with_plugin(options.config, plugin)
        cpu = wants_cpu(arguments.pop("cpu", False), os.environ)
        refuse_too_many_ranks(cpu, os.environ)
        arguments["kwargs_handlers"] = process_group_handler(
            arguments.get("kwargs_handlers"), cpu, os.environ
        )
        if arguments.get("dataloader_config") is None:
            arguments["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        super().__init__(cpu=cpu, fsdp_plugin=None if cpu else plugin, **arguments)
        switch_to_fsdp(self.state, plugin, os.environ)
        if self.mixed_precision == "fp16":
            self.native_amp = True
            self.scaler = grad_scaler(self.device, self.scaler_handler)
        self.zero_config: ZeroConfig = with_precision(config, self.mixed_precision)
        self.completed_steps = 0
        """Optimizer steps done by the first prepared optimizer; restored by `load_state`."""
        self._engine: ZeroEngine | None = None
        self._announcement: Announcement | None = None
        self._unsharded_optimizers: list[torch.optim.Optimizer] = []
        self._expected: list[Any] = []
        self._no_sync_depth = 0
        show_messages()
        if self.is_main_process:
            logging.getLogger("shardplug").info(self._description())

    @property
    def engine(self) -> ZeroEngine:
        """The engine that shards every model prepared here."""
        if self._engine is None:
            mesh = build_mesh(self.zero_config.replicate_size, self.device.type)
            listeners = default_listeners("accelerate", self.project_dir)
            self._engine = ZeroEngine(self.zero_config, mesh, listeners=listeners)
            self._announcement = Announcement(
                self._engine, accumulate=lambda: self.gradient_accumulation_steps
            )
        return self._engine

    def _remember(self, model: nn.Module) -> None:
        setattr(model, _ENGINE, self.engine)
        if self._announcement is not None:
            self._announcement.follow_models()

    def _description(self) -> str:
        config = self.zero_config
        stage = "found when the model is prepared" if self._budget else f"{config.stage}"
        replicas = f", {config.replicate_size} replicas" if config.replicate_size > 1 else ""
        return (
            f"ZeRO stage {stage} over {self.num_processes} ranks{replicas} "
            f"({self.device.type}, {dist.get_backend()}), mixed precision {self.mixed_precision}"
        )
