"""One rank of a contender of peers.py, which starts it and tells it when to step.

All train the model of step_contenders.py with the same weights, data and AdamW. Two of them have to
be made comparable: Accelerate ignores its FSDP plugin on CPU ranks and trains as DDP, so that its
state is changed to what it has on GPUs; and DeepSpeed clips gradients to 1.0 unless told not to.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from step_contenders import (
    BATCH,
    Step,
    accelerate,
    adamw,
    batch,
    ddp,
    engine,
    fsdp2,
    lightning_module,
    lightning_trainer,
    llama,
    our_accelerator,
    shard_by_hand,
)
from turns import Turns

Train = Callable[[Turns], None]
"""Trains, one step for each index it is given."""


def tokens_of(index: int) -> torch.Tensor:
    """The rank's batch of a step: four in turn, so that the loss falls."""
    return batch(index % 4)


def loop(make: Callable[[], Step]) -> Train:
    """Train by calling a step."""

    def train(turns: Turns) -> None:
        dist.init_process_group("gloo")
        step = make()
        for index in turns:
            turns.loss(step(tokens_of(index)))

    return train


def accelerate_fsdp2(reshard: bool) -> Step:
    """Accelerate's FSDP2, which it uses on GPUs only, made to run on CPU ranks."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        reshard_after_forward=reshard,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    state: Any = accelerator.state
    state._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
    state._shared_state["fsdp_plugin"] = state.fsdp_plugin = plugin
    return sharded(accelerate(accelerator), accelerator)


def sharded(step: Step, accelerator: Any) -> Step:
    """The step, of a model that is sharded indeed."""
    from torch.distributed.tensor import DTensor

    (model,) = accelerator._models
    if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RuntimeError("Expected Accelerate to shard the model, got whole parameters.")
    return step


def deepspeed(stage: int) -> Step:
    """DeepSpeed with the optimizer of the others."""
    import deepspeed as peer

    model = llama()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": False},
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    runner, *_ = peer.initialize(model=model, optimizer=adamw(model), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = runner(input_ids=tokens, labels=tokens).loss
        runner.backward(loss)
        runner.step()
        return loss.detach()

    return step


def deepspeed_loop(stage: int) -> Train:
    def train(turns: Turns) -> None:
        import deepspeed as peer

        peer.init_distributed(dist_backend="gloo")
        step = deepspeed(stage)
        for index in turns:
            turns.loss(step(tokens_of(index)))

    return train


def through_lightning(strategy: Callable[[], Any], reshard: bool | None = None) -> Train:
    """One `Trainer.fit`, whose data come when the parent says so.

    Args:
        strategy: Makes the strategy, or gives its name.
        reshard: With a value the module shards itself, as ModelParallelStrategy wants it to.
    """

    def train(turns: Turns) -> None:
        import lightning.pytorch as pl

        class Batches(torch.utils.data.Dataset[torch.Tensor]):
            """Has a length, as the Trainer asks for a batch in advance where there is none."""

            def __init__(self) -> None:
                self.indices: Any = None

            def __len__(self) -> int:
                return 1_000_000

            def __getitem__(self, _: int) -> torch.Tensor:
                self.indices = self.indices or iter(turns)
                return tokens_of(next(self.indices))

        class Losses(pl.Callback):
            def on_train_batch_end(self, _: Any, __: Any, outputs: Any, *args: object) -> None:
                turns.loss(outputs["loss"].detach())

        def shard(model: torch.nn.Module, mesh: Any) -> None:
            shard_by_hand(model, mesh, bool(reshard))

        module = lightning_module(None if reshard is None else shard)
        trainer = lightning_trainer(strategy(), 1_000_000, Losses())
        trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))

    return train


def model_parallel() -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    world = int(os.environ["WORLD_SIZE"])
    return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)


HAND = "FSDP2 by hand"
LIGHTNING = "Lightning, its FSDP2"
ACCELERATE = "Accelerate, its FSDP2"


def contenders(stage: int) -> dict[str, Train]:
    """All that do the schedule of a stage, the base of comparison first."""
    reshard = stage == 3
    return {
        "DDP": loop(ddp),
        HAND: loop(lambda: fsdp2(reshard)),
        LIGHTNING: through_lightning(model_parallel, reshard),
        ACCELERATE: loop(lambda: accelerate_fsdp2(reshard)),
        f"DeepSpeed stage {stage}": deepspeed_loop(stage),
        f"shardplug zero{stage}": loop(lambda: engine(stage)),
        f"shardplug zero{stage}, Lightning": through_lightning(lambda: f"zero{stage}"),
        f"shardplug zero{stage}, Accelerate": loop(lambda: accelerate(our_accelerator(stage))),
    }


def main(arguments: Iterable[str]) -> None:
    name, stage = arguments
    turns = Turns()
    contenders(int(stage))[name](turns)


if __name__ == "__main__":
    main(sys.argv[1:])
