"""Puts the engine where Hugging Face's Trainer, and what is built on it, look Accelerate up.

A process takes part when the YAML behind it says `fsdp_sharding_strategy: "shardplug:..."`. There
`accelerate.Accelerator` is replaced by ours, and in `transformers.trainer` also the functions that
write and read its checkpoints; models note with which `device_map` they were loaded. TRL's trainers
are subclasses of Trainer and need nothing more. `shardplug.run` does this before a script starts;
in a script that imports shardplug, it happens as the modules are imported.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from shardplug.integrations.accelerate.hf_trainer.spread import SPREAD, SPREADING

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
    from shardplug.integrations.accelerate.accelerator import Accelerator

    if not torch.accelerator.is_available():
        # Before anything creates PartialState, which would see no device and start N trainings.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    module.Accelerator = Accelerator
    if hasattr(module, "accelerator"):
        module.accelerator.Accelerator = Accelerator


def _adapt_trainer(module: Any) -> None:
    from shardplug.integrations.accelerate.hf_trainer import trainer_accelerator as trainer
    from shardplug.integrations.accelerate.hf_trainer import trainer_folders

    module.Accelerator = trainer.TrainerAccelerator
    module.save_fsdp_model = trainer_folders.skip_model_save
    module.save_fsdp_optimizer = trainer_folders.save_all
    module.load_fsdp_model = trainer_folders.load_model
    module.load_fsdp_optimizer = trainer_folders.load_optimizer
    module.get_last_checkpoint = trainer_folders.last_whole_checkpoint


def _adapt_trainer_utils(module: Any) -> None:
    from shardplug.integrations.accelerate.hf_trainer import trainer_folders

    module.get_last_checkpoint = trainer_folders.last_whole_checkpoint


def _adapt_arguments(module: Any) -> None:
    """Check the arguments first: their own set-up starts DeepSpeed, or fails where there is none.

    A dataclass looks `__post_init__` up on the class, so it is the one place to come first.
    """
    from shardplug.integrations.accelerate.hf_trainer.trainer_accelerator import refuse_arguments

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


def _adapt_models(module: Any) -> None:
    """Note which models Accelerate was to spread: where there is one device, nothing shows it."""
    kind = getattr(module, "PreTrainedModel", None)
    if kind is None or hasattr(kind, _CHECKED):
        return
    own = kind.from_pretrained.__func__

    @functools.wraps(own)
    def noting(cls: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = own(cls, *args, **kwargs)
        if kwargs.get("device_map") in SPREADING:
            model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
            setattr(model, SPREAD, kwargs["device_map"])
        return loaded

    kind.from_pretrained = classmethod(noting)
    setattr(kind, _CHECKED, True)


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    "accelerate": _adapt_accelerate,
    "transformers.modeling_utils": _adapt_models,
    "transformers.trainer": _adapt_trainer,
    "transformers.trainer_utils": _adapt_trainer_utils,
    "transformers.training_args": _adapt_arguments,
}
