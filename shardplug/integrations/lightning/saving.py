"""Saving through the Trainer, in shardplug's one folder format.

`meta.pt` of such a folder is Lightning's checkpoint dictionary without the tensors, so that hooks,
callbacks and loops find what they find with DDP.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardplug.checkpoint import state_of_model, state_of_optimizer, together, write
from shardplug.errors import ConfigError
from shardplug.integrations.common import comm, hyper_parameters
from shardplug.integrations.common import plain_meta as meta
from shardplug.integrations.common.options import refuse_checkpoint_io
from shardplug.integrations.common.paths import local_path
from shardplug.integrations.lightning import callbacks, tensors

if TYPE_CHECKING:
    from shardplug.checkpoint.write.background import Background

    _Base: Any  # Lightning's ParallelStrategy
else:
    _Base = object

__all__ = ["OWN_KEY", "SaveMixin", "combined_loader"]

OWN_KEY = "shardplug"
"""Key of what this adapter adds to Lightning's dictionary."""


class SaveMixin(_Base):  # type: ignore[misc]
    """The part of the strategy that saves."""

    _meeting: comm.Meeting
    _is_running: bool

    def real_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers, without the stand-in for a module that has none."""
        return [o for o in self.optimizers if type(o).__name__ != "_MockOptimizer"]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's tensors, sharded. Collective."""
        self._meeting.wait("save_checkpoint")
        return together(lambda: state_of_model(self.lightning_module), "Saving")

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state by parameter name, sharded."""
        if any(kind.__name__ == "LightningOptimizer" for kind in type(optimizer).__mro__):
            optimizer = optimizer.optimizer
        if type(optimizer).__name__ == "_MockOptimizer":
            return {"state": {}, "param_groups": []}
        return state_of_optimizer([self.lightning_module], optimizer)

    @property
    def checkpoint_io(self) -> Any:
        """Lightning's checkpoint IO, used to remove checkpoints only."""
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        refuse_checkpoint_io(io, "Trainer")
        self._checkpoint_io = io

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write Lightning's checkpoint dictionary as a sharded folder. Collective.

        With `async_save`, a save while `fit` runs returns when the shards are copied; one after it
        is on disk when it returns, as no training goes on then.

        Args:
            checkpoint: What `trainer.save_checkpoint` collected.
            filepath: The folder; rank 0's counts.
            storage_options: Refused.

        Raises:
            ConfigError: For storage options, or a path that is not local.
            CheckpointError: On every rank, when a rank could not write, or when the save before,
                in the background, had failed.
        """
        if storage_options is not None:
            raise ConfigError(
                f"Expected no storage_options, got {storage_options!r}: the zero strategies write "
                "to a local or mounted folder."
            )
        path = local_path(self.broadcast(os.fspath(filepath)))
        names = tensors.Names(self.lightning_module)
        rest = dict(checkpoint)
        models = [names.once(rest.pop("state_dict"))]
        optimizers = [s for s in rest.pop("optimizer_states", []) if s["param_groups"]]
        rest = tensors.take_out(rest, names, models)
        rest["step"] = rest.get("global_step")
        rest[OWN_KEY] = {
            "loaders": self._loader_states(rest),
            "tied": names.tied,
            "trainable": callbacks.trainable(self.lightning_module.trainer, self.lightning_module),
            "accumulate": self.lightning_module.trainer.accumulate_grad_batches,
        }
        write(
            path,
            models=models,
            optimizers=optimizers,
            meta=together(lambda: _encoded(rest), "Saving"),
            run={**self.engine.describe_run(), "framework": "lightning", "step": rest["step"]},
            modules=[self.lightning_module],
            background=self._background_for(path),
        )

    def _background_for(self, path: Path) -> Background | None:
        fitting = self._is_running and self.lightning_module.trainer.state.fn == "fit"
        writer: Background | None = self._writer_of(path, in_background=fitting)
        return writer

    def _loader_states(self, checkpoint: dict[str, Any]) -> list[Any]:
        """Gather each rank's positions in its training data."""
        own = combined_loader(checkpoint)
        trainer = self.lightning_module.trainer
        # Lightning fetches loaders without a length one batch ahead of training.
        ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
        for state in own:
            if "samples_per_batch" in state:
                state["batches"] -= ahead
                state["complete"] = trainer.is_last_batch
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, {"states": own, "ahead": ahead * len(own)})
        return everyone


def _encoded(rest: Mapping[str, Any]) -> dict[str, Any]:
    checkpoint = dict(rest)
    taken = hyper_parameters.take_out(checkpoint)
    checkpoint[OWN_KEY] = {**checkpoint[OWN_KEY], "hyper_parameters": taken}
    encoded: dict[str, Any] = meta.encode(checkpoint)
    return encoded


def combined_loader(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the positions in the training data; empty where there are none."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    states: list[dict[str, Any]] = fit_loop.get("state_dict", {}).get("combined_loader", [])
    return states
