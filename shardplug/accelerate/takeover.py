"""Puts the engine where Hugging Face's Trainer, and what is built on it, look Accelerate up.

A process takes part when the YAML behind it says `fsdp_sharding_strategy: "shardplug:..."`. There
`accelerate.Accelerator` is replaced by ours, and in `transformers.trainer` also the functions that
write and read its checkpoints. TRL's trainers are subclasses of Trainer and need nothing more.
`shardplug.run` does this before a script starts; in a script that imports shardplug, it happens as
the modules are imported.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["adapt", "take_over"]

_CHECKED = "_shardplug_checked"


def take_over() -> None:
    """Replace the names in the modules that are loaded; harmless if repeated."""
    for name in _ADAPTERS:
        module = sys.modules.get(name)
        if module is not None:
            adapt(module)


def adapt(module: ModuleType) -> None:
    """Replace the names in one module; harmless if repeated.

    A module that is still being imported may overwrite them, and is to be adapted again then.
    """
    _ADAPTERS[module.__name__](module)


def _adapt_accelerate(module: Any) -> None:
    from shardplug.accelerate.accelerator import Accelerator

    if not torch.accelerator.is_available():
        # Before anything creates PartialState, which would see no device and start N trainings.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    module.Accelerator = Accelerator
    if hasattr(module, "accelerator"):
        module.accelerator.Accelerator = Accelerator


def _adapt_trainer(module: Any) -> None:
    from shardplug.accelerate import trainer, trainer_folders

    module.Accelerator = trainer.TrainerAccelerator
    module.save_fsdp_model = trainer_folders.save_model_part
    module.save_fsdp_optimizer = trainer_folders.save_all
    module.load_fsdp_model = trainer_folders.load_model
    module.load_fsdp_optimizer = trainer_folders.load_optimizer
    module.get_last_checkpoint = trainer_folders.last_whole_checkpoint


def _adapt_trainer_utils(module: Any) -> None:
    from shardplug.accelerate import trainer_folders

    module.get_last_checkpoint = trainer_folders.last_whole_checkpoint


def _adapt_arguments(module: Any) -> None:
    """Check the arguments first: their own set-up starts DeepSpeed, or fails where there is none.

    A dataclass looks `__post_init__` up on the class, so it is the one place to come first.
    """
    from shardplug.accelerate.trainer import refuse_arguments

    kind = getattr(module, "TrainingArguments", None)
    if kind is None or hasattr(kind, _CHECKED):
        return
    own = kind.__post_init__

    @functools.wraps(own)
    def checked(arguments: Any) -> None:
        refuse_arguments(arguments)
        own(arguments)

    kind.__post_init__ = checked
    setattr(kind, _CHECKED, True)


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    "accelerate": _adapt_accelerate,
    "transformers.trainer": _adapt_trainer,
    "transformers.trainer_utils": _adapt_trainer_utils,
    "transformers.training_args": _adapt_arguments,
}
