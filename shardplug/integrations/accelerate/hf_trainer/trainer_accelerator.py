"""What Hugging Face's Trainer gets for an Accelerator, and the arguments of it that are refused."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from shardplug.checkpoint.state.frozen_base import note_base
from shardplug.collective import together
from shardplug.errors import ConfigError
from shardplug.integrations.accelerate.accelerator import Accelerator
from shardplug.integrations.accelerate.launch_options import LaunchOptions

__all__ = ["TrainerAccelerator", "refuse_arguments"]

_OTHER_ENGINES = {
    "fsdp": "take it out: the YAML of `accelerate launch` names the stage",
    "deepspeed": "take it out: the YAML of `accelerate launch` names the stage, and offloading "
    '("shardplug:zero2_cpu")',
}

# Truthy argument -> why it cannot be honoured and what to do.
_REFUSED = {
    "activation_offloading": "it copies gathered parameters too, whose memory goes while they are "
    'copied. Take it out and write offload_activations=cpu in the YAML ("shardplug:zero3,'
    'offload_activations=cpu")',
    "auto_find_batch_size": "it starts again with smaller batches on a rank that is out of memory, "
    "and the other ranks wait for that one. Take it out and lower per_device_train_batch_size",
    "bf16_full_eval": "it casts the fp32 master weights to bf16 for good. Use bf16=True, which "
    "computes in bf16 in evaluation too",
    "fp16_full_eval": "it casts the fp32 master weights to fp16 for good. Use fp16=True, which "
    "computes in fp16 in evaluation too",
    "torch_compile": "it compiles the model as a whole. Compile its blocks before the Trainer is "
    "made: for block in model.model.layers: block.compile()",
}


def refuse_arguments(arguments: Any) -> None:
    """Refuse TrainingArguments that would sidestep or double the sharding.

    Args:
        arguments: A TrainingArguments whose fields are set and not yet checked.

    Raises:
        ConfigError: Naming the argument and what to write instead.
    """
    for name, instead in _OTHER_ENGINES.items():
        if getattr(arguments, name, None):
            raise ConfigError(
                f"Expected shardplug to be the only engine, got {name}={getattr(arguments, name)!r}"
                f" in {type(arguments).__name__}: {instead}."
            )
    for name, why in _REFUSED.items():
        if getattr(arguments, name, None):
            raise ConfigError(
                f"{name}=True in {type(arguments).__name__} is not available with shardplug: {why}."
            )


class TrainerAccelerator(Accelerator):
    """The Accelerator that a Trainer makes; it takes its configuration from the YAML.

    Args:
        **kwargs: What Trainer passes.

    Raises:
        ConfigError: On every rank, for `async_save=true`, and as its base class does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if LaunchOptions.read(None, os.environ).async_save:
            raise ConfigError(
                "async_save=true is not available with Hugging Face's Trainer, which removes older "
                "checkpoints as soon as a save returns. Take it out of fsdp_sharding_strategy."
            )
        super().__init__(*args, **kwargs)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Shard a model, and note the frozen base that checkpoints leave out.

        Args:
            model: As for the base class.
            device_placement: As for the base class.
            evaluation_mode: As for the base class.
        """
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        together(lambda: note_base(prepared), "Setting up the model")
        return prepared
