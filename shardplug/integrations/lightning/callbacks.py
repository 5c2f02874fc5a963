"""What the strategy knows about Lightning's callbacks.

Callbacks are recognised by the names of their classes, so that both of Lightning's import names,
and subclasses, are covered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from shardplug.errors import ConfigError

__all__ = [
    "average_models",
    "follow_saves",
    "refuse",
    "set_trainable",
    "swap_back",
    "trainable",
    "unfollow",
    "watch_swaps",
]

_SWAPPED = "_shardplug_swapped"

_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")

_REFUSED = {
    "ModelPruning": (
        "it replaces parameters by masked ones, which the shards would not follow; prune the "
        "model before training, or on a checkpoint loaded with "
        "shardplug.lightning.load_from_checkpoint"
    ),
    "OnExceptionCheckpoint": (
        "it saves on the rank that failed, while a sharded checkpoint needs all ranks and would "
        "wait for them for ever; use ModelCheckpoint(every_n_train_steps=...) and "
        'fit(ckpt_path="last")'
    ),
}


def refuse(trainer: Any, module: nn.Module) -> None:
    """Refuse callbacks that cannot work on a sharded model.

    Raises:
        ConfigError: Naming the callback and what to use instead.
    """
    for callback in list(trainer.callbacks):
        kinds = _kinds(callback)
        refused = next((name for name in _REFUSED if name in kinds), None)
        on_exception = getattr(callback, "save_on_exception", False)
        if refused or on_exception:
            trainer.callbacks.remove(callback)  # or it would save because of this very exception
        if refused:
            raise ConfigError(
                f"{refused} cannot be used with the zero strategies: {_REFUSED[refused]}."
            )
        if on_exception:
            raise ConfigError(
                f"{type(callback).__name__}(save_on_exception=True) cannot be used with the zero "
                f"strategies: {_REFUSED['OnExceptionCheckpoint']}."
            )
        averaging = kinds.intersection(_AVERAGING)
        sharded_before = "_shardplug_engine" in vars(module)
        if averaging and sharded_before and trainer.state.fn == "fit":
            raise ConfigError(
                f"{averaging.pop()} copies the module when fit begins, and a module that is "
                "sharded already cannot be copied. Fit a newly built module, with ckpt_path to go "
                "on from an earlier fit, or leave the callback out."
            )


def follow_saves(
    trainer: Any, is_being_saved: Callable[[Path], bool], link: Callable[[Path, Path], None]
) -> None:
    """Let ModelCheckpoint know of a save that is still being written.

    Its link to the last checkpoint is made once that one is there, so that a run that is killed
    before finds the one before; and a name that is being written counts as taken.

    Args:
        trainer: The Trainer.
        is_being_saved: Whether a folder is being written.
        link: Makes a link (first argument) to a folder, now or later.
    """

    def file_exists(of_class: Callable[..., bool], path: Any, trainer: Any) -> bool:
        return is_being_saved(Path(path)) or of_class(path, trainer)

    def make_link(trainer: Any, path: Any, link_path: Any) -> None:
        link(Path(link_path), Path(path))
        trainer.strategy.barrier()

    for callback in trainer.callbacks:
        if "ModelCheckpoint" in _kinds(callback):
            callback.file_exists = functools.partial(file_exists, callback.file_exists)
            callback._link_checkpoint = make_link


def watch_swaps(trainer: Any) -> None:
    """Keep count of whether WeightAveraging has the average in the module, for `swap_back`."""

    def swap(callback: Any, of_class: Callable[[Any], None], module: Any) -> None:
        of_class(module)
        vars(callback)[_SWAPPED] = not vars(callback).get(_SWAPPED, False)

    for callback in trainer.callbacks:
        if "WeightAveraging" in _kinds(callback):
            callback._swap_models = functools.partial(swap, callback, callback._swap_models)


def swap_back(trainer: Any, module: nn.Module) -> None:
    """Put the current weights back, where a validation that failed has left the average."""
    for callback in trainer.callbacks:
        if vars(callback).get(_SWAPPED):
            callback._swap_models(module)


def unfollow(trainer: Any) -> None:
    """Give the callbacks their own methods back."""
    for callback in trainer.callbacks:
        for name in ("file_exists", "_link_checkpoint", "_swap_models", _SWAPPED):
            vars(callback).pop(name, None)


def average_models(trainer: Any) -> list[nn.Module]:
    """Return the copies of the module that averaging callbacks made in their setup hook."""
    found: list[nn.Module] = []
    for callback in trainer.callbacks:
        kinds = _kinds(callback)
        copy = getattr(callback, "_average_model", None)
        if isinstance(copy, nn.Module) and kinds.intersection(_AVERAGING):
            # WeightAveraging keeps torch's AveragedModel, which holds the copy.
            found.append(copy.module if "WeightAveraging" in kinds else copy)  # type: ignore[arg-type]
    return found


def trainable(trainer: Any, module: nn.Module) -> list[str] | None:
    """Name the parameters that a finetuning callback has unfrozen; None without such a callback.

    Lightning saves the callback's parameter groups, but not which parameters are frozen, and asks
    the callback again only when an epoch begins.
    """
    if not any("BaseFinetuning" in _kinds(callback) for callback in trainer.callbacks):
        return None
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def set_trainable(trainer: Any, module: nn.Module, names: list[str] | None) -> None:
    """Freeze and unfreeze as the saved run's finetuning callback had done."""
    if names is None or trainable(trainer, module) is None:
        return
    chosen = set(names)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in chosen)


def _kinds(callback: object) -> set[str]:
    return {kind.__name__ for kind in type(callback).__mro__}
