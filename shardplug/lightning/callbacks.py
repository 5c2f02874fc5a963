"""What the strategy knows about Lightning's callbacks.

Callbacks are recognised by the names of their classes, so that both of Lightning's import names,
and subclasses, are covered.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardplug.errors import ConfigError

__all__ = ["average_models", "refuse", "set_trainable", "trainable"]

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
