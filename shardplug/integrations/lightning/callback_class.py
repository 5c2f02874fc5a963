"""Callbacks for both of Lightning's names: each is made as a subclass of that name's own class."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

__all__ = ["callback_class", "remade", "wandb_runs"]


@cache
def callback_class(body: type, namespace: str) -> type[Any]:
    """Make a callback class for one of Lightning's two names.

    Args:
        body: What the callback does; its name without the underscore is the class's.
        namespace: "lightning.pytorch" or "pytorch_lightning"; the class has it as `_namespace`.

    Returns:
        A subclass of `body` and that namespace's `Callback`; the same one for each call.
    """
    callback = importlib.import_module(f"{namespace}.callbacks").Callback
    attributes = {
        "_namespace": namespace,
        "__doc__": body.__doc__,
        "__module__": "shardplug.lightning",
    }
    return type(body.__name__.lstrip("_"), (body, callback), attributes)


def remade(body: type, namespace: str, state: dict[str, Any]) -> Any:
    """Make a callback again that was pickled: its class is made at run time, and has no place.

    Args:
        body: As for `callback_class`.
        namespace: As for `callback_class`.
        state: The callback's attributes.
    """
    made = object.__new__(callback_class(body, namespace))
    made.__dict__.update(state)
    return made


def wandb_runs(trainer: Any, namespace: str) -> list[Any]:
    """Return the `wandb.Run` of each WandbLogger; on rank 0 only, elsewhere none."""
    if not trainer.is_global_zero:
        return []
    logger_class = importlib.import_module(f"{namespace}.loggers").WandbLogger
    return [logger.experiment for logger in trainer.loggers if isinstance(logger, logger_class)]
