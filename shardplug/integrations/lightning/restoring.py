"""Restoring through the Trainer: from a sharded folder, or from an ordinary Lightning file.

Loading returns Lightning's checkpoint dictionary with the tensors in it, sharded; what
`on_load_checkpoint` changes there is what is loaded.
"""

from __future__ import annotations

import importlib
import os
import warnings
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from shardplug.checkpoint import Reader, load_model, load_optimizer
from shardplug.checkpoint.format.manifest import FORMAT
from shardplug.checkpoint.state.rank_rng import read_rng
from shardplug.errors import CheckpointError, ConfigError
from shardplug.integrations.common import hyper_parameters, opening
from shardplug.integrations.common import plain_meta as meta
from shardplug.integrations.common.paths import local_path
from shardplug.integrations.common.scoped_rng import replaying, rng_state, set_rng_state
from shardplug.integrations.data.even import fetch_in_step, reads_in_step
from shardplug.integrations.data.loader import is_resumable, resumable
from shardplug.integrations.lightning import callbacks, tensors
from shardplug.integrations.lightning.saving import OWN_KEY, combined_loader

if TYPE_CHECKING:
    _Base: Any  # Lightning's ParallelStrategy
else:
    _Base = object

__all__ = ["LoadMixin", "read_meta"]


class LoadMixin(_Base):  # type: ignore[misc]
    """The part of the strategy that restores."""

    _namespace: str
    _pending_rng: dict[str, Any] | None = None
    _fetches_before_rng = 0
    _trainable: list[str] | None = None
    _saved_accumulate: int | None = None
    _is_running = False
    """Between the end of set-up and teardown."""

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a folder of shardplug's, or an ordinary Lightning file. Collective.

        Args:
            checkpoint_path: Folder or file; rank 0's counts.
            weights_only: True refuses pickled objects, False unpickles them. None, for a folder,
                leaves pickled hyper-parameters out (training does not need them) and refuses
                others; for a file it means what it means to `torch.load`.

        Returns:
            Lightning's checkpoint dictionary, with sharded tensors.

        Raises:
            CheckpointError: On every rank, when there is no checkpoint at the path.
        """
        if self.lightning_module is None:
            raise ConfigError("Expected a module to load the checkpoint for: call trainer.fit etc.")
        path = local_path(self.broadcast(os.fspath(checkpoint_path)))
        with self._reading(path):
            is_file = self.broadcast(path.is_file())
            self.shard_module()
            return self._load(path, is_file, weights_only)

    def _load(self, path: Path, is_file: bool, weights_only: bool | None) -> Any:
        return (self._load_file if is_file else self._load_folder)(path, weights_only)

    def _load_folder(self, path: Path, weights_only: bool | None) -> dict[str, Any]:
        module = self.lightning_module
        assert module is not None
        names, reader = tensors.Names(module), self._open(path)
        checkpoint = read_meta(reader, weights_only)
        own = checkpoint.pop(OWN_KEY, {})

        def read(index: int) -> dict[str, torch.Tensor]:
            # Further ones are averages in callbacks, which may hold a part of the names.
            strict, warn = module.strict_loading and index == 0, index == 0
            return names.all(reader.model_state(index, module, strict=strict, warn=warn))

        checkpoint = tensors.put_back(checkpoint, read)
        checkpoint["state_dict"] = read(0)
        version = importlib.import_module(self._namespace).__version__
        checkpoint.setdefault("pytorch-lightning_version", version)
        if module.trainer.state.fn == "fit":
            # Optimizers do not exist yet: hooks run in the order they have with DDP.
            states = [reader.optimizer_state(i, [module]) for i in range(reader.num_optimizers)]
            if states:
                checkpoint["optimizer_states"] = states
            self._plan_continuation(reader, checkpoint, own)
        return dict(checkpoint)

    def _load_file(self, path: Path, weights_only: bool | None) -> Any:
        checkpoint = torch.load(
            path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=weights_only
        )
        progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress")
        in_epoch = progress and progress["current"]["ready"] and not progress.get("is_last_batch")
        if in_epoch and not combined_loader(checkpoint) and self.is_global_zero:
            warnings.warn(
                f"{path} was saved in the middle of an epoch and does not say where in the data: "
                "training goes on from the beginning of the epoch's data.",
                UserWarning,
                stacklevel=2,
            )
        if self._rename:
            state = opening.renamed(path, checkpoint["state_dict"], self._rename)
            checkpoint = {**checkpoint, "state_dict": state}
        return tensors.distribute(checkpoint, tensors.Names(self.lightning_module))

    def _plan_continuation(
        self, reader: Reader, checkpoint: dict[str, Any], own: Mapping[str, Any]
    ) -> None:
        """Prepare each rank's random numbers and data position for the first training batch."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        same_world = reader.manifest["world_size"] == world_size
        loaders = own.get("loaders", [])
        self._trainable = own.get("trainable")
        self._saved_accumulate = own.get("accumulate")
        if same_world:
            # Read now, as the folder may be gone by then (ModelCheckpoint's top k).
            self._pending_rng = read_rng(reader.path, rank)
            if self._is_running:  # a tuner goes back to where it began
                self.restore_rng()
        if same_world and loaders:
            self._fetches_before_rng = loaders[rank]["ahead"]
            if loaders[rank]["states"]:
                fit_loop = checkpoint["loops"]["fit_loop"]
                fit_loop["state_dict"]["combined_loader"] = loaders[rank]["states"]
        if "loops" not in checkpoint:
            self._adopt_step(checkpoint, opening.steps_done(reader))
            self._warn_of_fresh_start(reader, checkpoint)

    def _adopt_step(self, checkpoint: dict[str, Any], step: int | None) -> None:
        """Take the step count over from a folder that another framework has written."""
        checkpoint.setdefault("lr_schedulers", [])
        if step is not None:
            self._count_from(step)

    def go_back(self, folder: str | os.PathLike[str]) -> None:
        """Return weights, optimizers, schedulers and the step count to a checkpoint. Collective.

        The data goes on: what led away from the checkpoint is not repeated.

        Raises:
            CheckpointError: On every rank, when the folder does not match.
        """
        module = self.lightning_module
        reader = self._open(local_path(self.broadcast(os.fspath(folder))))
        reader.load(self.engine, self.real_optimizers(), strict=module.strict_loading)
        saved = meta.decode(reader.meta.get("lr_schedulers", []), unpickle=False)
        for config, state in zip(module.trainer.lr_scheduler_configs, saved, strict=False):
            config.scheduler.load_state_dict(state)
        step = reader.meta.get("global_step", opening.steps_done(reader))
        if step is not None:
            self._count_from(step)

    def _count_from(self, step: int) -> None:
        epoch_loop = self.lightning_module.trainer.fit_loop.epoch_loop
        automatic = epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
        manual = epoch_loop.manual_optimization.optim_step_progress.total
        for counter in (automatic, manual):
            counter.ready = counter.completed = step
        epoch_loop._batches_that_stepped = step

    def _warn_of_fresh_start(self, reader: Reader, checkpoint: Mapping[str, Any]) -> None:
        if reader.manifest["format"] != FORMAT and self.is_global_zero:
            found = [f"{len(checkpoint['state_dict'])} tensors of the model"]
            found += ["the optimizer's state"] if "optimizer_states" in checkpoint else []
            warnings.warn(
                f"{reader.path} was not saved by shardplug: loaded are {' and '.join(found)}. "
                "Steps, epochs, schedulers, callbacks and the data begin anew.",
                UserWarning,
                stacklevel=2,
            )

    def on_train_start(self) -> None:
        """Freeze what was frozen, where a finetuning callback is not asked in mid-epoch."""
        names, self._trainable = self._trainable, None
        callbacks.set_trainable(self.lightning_module.trainer, self.lightning_module, names)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Keep the ranks' loaders in step, and make training ones resumable within an epoch."""
        module = self.lightning_module
        if module is None or not isinstance(dataloader, DataLoader):
            return dataloader
        trainer = module.trainer
        limit = getattr(trainer, f"limit_{trainer.state.stage.dataloader_prefix}_batches")
        together = fetch_in_step(dataloader, limit)
        if together is not None and (not trainer.training or is_resumable(dataloader)):
            return reads_in_step(dataloader, together)
        if not trainer.training:
            return dataloader
        return resumable(
            dataloader, self._before_fetch, self._before_epoch, self._count_batches, together
        )

    def _count_batches(self, saved: int, skipped: int) -> None:
        """Count the epoch's batches in this run's size, from which accumulation windows follow.

        Args:
            saved: Batches that the saved run had used of the epoch.
            skipped: Batches of this run that hold the same samples.

        Raises:
            CheckpointError: When training would go on in the middle of an accumulation window.
        """
        trainer = self.lightning_module.trainer
        accumulate = trainer.accumulate_grad_batches
        changed = skipped != saved or self._saved_accumulate not in (None, accumulate)
        if changed and skipped % accumulate:
            raise CheckpointError(
                f"Expected the {skipped} batches used of this epoch to be whole windows of "
                f"accumulate_grad_batches={accumulate}: the first window after resuming would be "
                "short, and its gradient too small. Resume with a number that divides it, or from "
                "the end of an epoch."
            )
        current = trainer.fit_loop.epoch_loop.batch_progress.current
        # Lightning tells from the differences between these where in a batch the save was.
        for counter in ("ready", "started", "processed", "completed"):
            setattr(current, counter, getattr(current, counter) + skipped - saved)

    def _before_fetch(self) -> None:
        if self._fetches_before_rng:
            self._fetches_before_rng -= 1
        else:
            self.restore_rng()

    @contextmanager
    def _before_epoch(self) -> Generator[None, None, None]:
        """Begin an epoch's data from the saved run's random numbers, and continue from there.

        Hooks that run between this and the first batch draw from the present ones.
        """
        if self._pending_rng is None:
            yield
            return
        with replaying(self._pending_rng):
            yield
            self._pending_rng = rng_state()

    def restore_rng(self) -> None:
        """Go on with the saved run's random numbers; does nothing the second time."""
        state = self._pending_rng
        self.forget_rng()
        if state is not None:
            set_rng_state(state)

    def forget_rng(self) -> None:
        """Give up random numbers that were to be restored."""
        self._pending_rng = None
        self._fetches_before_rng = 0

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load `checkpoint["state_dict"]`, sharded or whole, into the module."""
        load_model(self.lightning_module, checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load `checkpoint["optimizer_states"]`, sharded or whole, by name or by position."""
        states = [s for s in checkpoint["optimizer_states"] if s["param_groups"]]
        optimizers = self.real_optimizers()
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"Expected the state of {len(optimizers)} optimizers, as configure_optimizers "
                f"returned, got {len(states)} in the checkpoint."
            )
        for optimizer, state in zip(optimizers, states, strict=True):
            load_optimizer([self.lightning_module], optimizer, state, copy=False)


def read_meta(reader: Reader, weights_only: bool | None) -> dict[str, Any]:
    """Read a folder's metadata, treating pickled objects as `load_checkpoint` says.

    Raises:
        CheckpointError: For pickled objects that may not be unpickled, naming them.
    """
    checkpoint = dict(reader.meta)
    own = checkpoint[OWN_KEY] = dict(checkpoint.get(OWN_KEY, {}))
    hyper_parameters.put_back(checkpoint, own.pop("hyper_parameters", None))
    if weights_only is None:
        for key in hyper_parameters.KEYS:
            left_out = meta.pickled_entries(checkpoint.get(key), key)
            if not left_out:
                continue
            entries = checkpoint.pop(key)
            if key not in left_out:
                checkpoint[key] = {k: v for k, v in entries.items() if not meta.pickled_entries(v)}
            warnings.warn(
                f"Left out of {reader.path}, because they are pickled objects: "
                f"{', '.join(left_out)}. Training does not need them; pass weights_only=False to "
                "read them, if you trust where the checkpoint comes from.",
                UserWarning,
                stacklevel=3,
            )
    decoded: dict[str, Any] = meta.decode(checkpoint, unpickle=weights_only is False)
    return decoded
