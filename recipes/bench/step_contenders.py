"""The 25 M parameter Llama and the ways of training it that step_time.py and peers.py compare.

In fp32, as bf16 has no hardware on most CPUs. Each maker is called on every rank, under a process
group, and returns a step of its own model and optimizer, which start from the same weights.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

VOCAB, LENGTH, BATCH = 2048, 128, 2


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)


Seconds = tuple[float, float]
"""Wall seconds and CPU seconds of this process, all its threads."""

Step = Callable[[torch.Tensor], torch.Tensor]
"""Trains on one batch of tokens and returns its loss."""

Steps = Callable[[int], list[Seconds]]
"""Runs so many steps and returns what each took."""


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def since(start: Seconds, end: Seconds) -> Seconds:
    return end[0] - start[0], end[1] - start[1]


def timed(step: Step) -> Steps:
    def run(count: int) -> list[Seconds]:
        times = []
        for index in range(count):
            tokens = batch(index)
            start = now()
            step(tokens)
            times.append(since(start, now()))
        return times

    return run


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ddp() -> Step:
    model = nn.parallel.DistributedDataParallel(llama(), gradient_as_bucket_view=True)
    return plain_step(model, adamw(model))


def shard_by_hand(model: nn.Module, mesh: DeviceMesh, reshard: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)


def fsdp2(reshard: bool) -> Step:
    model = llama()
    shard_by_hand(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard)
    return plain_step(model, adamw(model))


def engine(stage: int) -> Step:
    from shardplug import ZeroConfig, ZeroEngine

    zero = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = zero.shard(llama())
    optimizer = zero.prepare_optimizer(adamw(model))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with zero.micro_step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def lightning_module(shard: Callable[[nn.Module, DeviceMesh], None] | None = None) -> Any:
    """The model as a LightningModule, which shards itself in `configure_model` if told how."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()

        def configure_model(self) -> None:
            if shard is not None:
                shard(self.model, self.device_mesh["data_parallel"])

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    return Module()


def lightning_trainer(strategy: Any, max_steps: int, callback: Any) -> Any:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    import shardplug  # noqa: F401  (registers the strategies)

    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        plugins=[TorchElasticEnvironment()],
        max_steps=max_steps,
        callbacks=[callback],
        logger=False,
        use_distributed_sampler=False,  # every rank's batches are its own already
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning(stage: int) -> Steps:
    import lightning.pytorch as pl

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.ticks: list[Seconds] = []

        def on_train_batch_start(self, *args: object) -> None:
            self.ticks.append(now())

        def on_train_end(self, *args: object) -> None:
            self.ticks.append(now())

    class Batches(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return (batch(index) for index in range(1_000_000))

    module = lightning_module()

    def run(count: int) -> list[Seconds]:
        clock = Clock()
        trainer = lightning_trainer(f"zero{stage}", count + 1, clock)
        trainer.fit(module, torch.utils.data.DataLoader(Batches(), batch_size=None))
        ticks = clock.ticks[1:]  # the first step makes optimizer state
        return [since(start, end) for start, end in zip(ticks, ticks[1:], strict=False)]

    return run


def accelerate(accelerator: Any) -> Step:
    """The native loop of Accelerate, with its own Accelerator or with ours."""
    model = llama()
    model, optimizer = accelerator.prepare(model, adamw(model))

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


def our_accelerator(stage: int) -> Any:
    from shardplug.accelerate import Accelerator

    return Accelerator(zero=f"zero{stage}", cpu=True)
