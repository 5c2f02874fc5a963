"""Optimizer state outside the device through Accelerate: the same weights, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from shardplug import ZeroConfig
from shardplug.integrations.accelerate.launch_options import ENVIRONMENT_NAME, LaunchOptions
from tests.adapters.accelerate.common import MAX_NORM, accelerator, loader, samples, seeded_model
from tests.support.activations import small_ones_move
from tests.support.models import lm_loss
from tests.support.pool import RankPool


def zero(tier: str, root: str) -> str:
    files = f",offload_optimizer=nvme,nvme_path={root}"
    more = {"none": "", "cpu": "_cpu", "nvme": files, "both": f"{files},offload_cpu_gib=3e-5"}
    if tier == "infinity":
        return f"zero3_infinity,nvme_path={root}"
    return "zero3" + more[tier]


def train(
    tier: str, root: str, precision: str, *, optimizer_first: bool
) -> dict[str, torch.Tensor]:
    acc = accelerator(
        zero=zero(tier, root), gradient_accumulation_steps=3, mixed_precision=precision
    )
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    batches = acc.prepare(loader(samples()))
    if optimizer_first:
        optimizer = acc.prepare(optimizer)
        model, scheduler = acc.prepare(model, scheduler)
    else:
        model, optimizer, scheduler = acc.prepare(model, optimizer, scheduler)
    for epoch in range(2):
        for batch in batches:
            with acc.accumulate(model):
                acc.backward(lm_loss(model(batch), batch))
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            acc.save_state(f"{root}/{tier}-{precision}")
    if tier == "nvme":  # back to the middle, from where the state was on the device
        acc.load_state(f"{root}/none-{precision}")
        for batch in batches:
            with acc.accumulate(model):
                acc.backward(lm_loss(model(batch), batch))
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    assert acc.completed_steps == 6
    if tier == "both":
        states = acc.engine.memory()
        assert 0 < states["optimizer_state_cpu"] <= 3e-5 * 2**30 and states["optimizer_state_nvme"]
    return acc.engine.full_state_dict(rank0_only=False)


def train_with(zero: str) -> tuple[dict[str, torch.Tensor], float]:
    acc = accelerator(zero=zero, gradient_accumulation_steps=2)
    model = seeded_model()
    model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for batch in samples().split(4)[:4]:
        with acc.accumulate(model):
            acc.backward(lm_loss(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
    return acc.engine.full_state_dict(rank0_only=False), acc.engine.traffic()["bytes_read"]


def activations() -> None:
    with small_ones_move():
        for options in ("zero3", "zero1,activation_checkpointing=true"):
            expected, none = train_with(options)
            ours, moved = train_with(f"{options},offload_activations=cpu")
            assert moved > none == 0
            assert ours and all(torch.equal(ours[name], expected[name]) for name in expected)


def test_activations_in_cpu_memory(pool: RankPool) -> None:
    pool.run(activations, 2)


def compare(root: str) -> None:
    for precision, optimizer_first in (("no", False), ("fp16", True)):
        expected = train("none", root, precision, optimizer_first=optimizer_first)
        for tier in ("cpu", "nvme", "both", "infinity"):
            ours = train(tier, root, precision, optimizer_first=optimizer_first)
            assert ours and all(torch.equal(ours[name], expected[name]) for name in expected), tier


def test_accelerate(pool: RankPool, tmp_path: Path) -> None:
    pool.run(compare, 2, str(tmp_path))


def test_the_yaml_string_names_the_tier() -> None:
    text = "shardplug:stage=3,offload_optimizer=nvme,nvme_path=/mnt/nvme"
    expected = ZeroConfig(stage=3, offload_optimizer="nvme", nvme_path="/mnt/nvme")
    assert LaunchOptions.read(None, {ENVIRONMENT_NAME: text}).config == expected
    assert (
        LaunchOptions.read(None, {ENVIRONMENT_NAME: "shardplug:zero1_cpu"}).config.offload_optimizer
        == "cpu"
    )
    infinity = LaunchOptions.read(
        None, {ENVIRONMENT_NAME: "shardplug:zero3_infinity,nvme_path=/mnt/nvme"}
    ).config
    assert infinity == replace(expected, offload_params="nvme")
    text += ",offload_cpu_gib=2"
    assert LaunchOptions.read(None, {ENVIRONMENT_NAME: text}).config.offload_cpu_gib == 2
