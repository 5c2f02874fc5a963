"""Activations in CPU memory in what is planned, recommended and chosen."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from shardplug import ConfigError, ZeroConfig
from shardplug.cli import main
from shardplug.memory import OptimizerKind, accelerate_yaml, as_text, lightning_line, plan
from shardplug.oom.remedies import Headroom, remedies
from shardplug.plan.auto import AutoBudget, auto_config
from shardplug.plan.choices import GIB
from shardplug.plan.run.observed import Call, Running
from shardplug.plan.trace.meta_copy import meta_copy, shapes_of
from tests.support.models import TinyLM, lm_loss, tokens

BATCH = tokens(0, 0, 0, batch=64, length=129)


class Trained(TinyLM):
    """Returns its loss."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return lm_loss(super().forward(ids), ids)


def model() -> nn.Module:
    return Trained(width=64, hidden=512)


def running(config: ZeroConfig, device: str = "cuda") -> Running:
    return Running(
        config=config,
        meta_model=meta_copy(model()),
        call=Call("forward", (shapes_of(BATCH),), {}),
        devices=2,
        nodes=1,
        device=device,
        optimizer=OptimizerKind(),
        accumulate=1,
        loop="pytorch",
    )


def test_a_gpu_out_of_memory_is_told_of_it() -> None:
    run = running(ZeroConfig(stage=3))
    found = run.plan()
    now = run.choice(found)
    assert now is not None
    what = {r.what: r for r in remedies(run, found, Headroom(capacity=int(0.6 * now.device)))}
    away = what['offload_activations="cpu"']
    assert away.freed > 0 and away.single and away.slower > 1
    assert 'offload_activations="cpu"' in "\n".join(away.lines)
    assert "offload_activations=cpu" in "\n".join(away.lines)  # the YAML
    on_cpu = running(ZeroConfig(stage=3), "cpu")
    words = remedies(on_cpu, on_cpu.plan(), Headroom(capacity=1))
    assert words and not any("offload_activations" in remedy.what for remedy in words)


def test_a_run_that_has_it_is_found_in_its_plan() -> None:
    run = running(ZeroConfig(stage=2, offload_activations="cpu", activation_checkpointing=True))
    found = run.choice(run.plan())
    assert found is not None and found.name == "zero2 checkpointing activations_cpu"
    assert found.timeline.activations_out > 0


def test_zero_auto_keeps_it() -> None:
    base = ZeroConfig(offload_activations="cpu")
    budget = AutoBudget(device_memory_gib=8, host_memory_gib=8)
    device = torch.device("cuda", 0)
    found = auto_config(model(), budget, batch=BATCH, base=base, device=device)
    assert found.offload_activations == "cpu"
    assert auto_config(model(), budget, batch=BATCH, device=device).offload_activations == "none"


def test_lines_and_refusals() -> None:
    found = plan(
        model(),
        devices=2,
        device_memory_gib=8,
        host_memory_gib=8,
        precision="32-true",
        offload_activations="cpu",
        stage=3,
        offload=False,
        batch=BATCH,
    )
    best = found.best
    assert best is not None and best.offload_activations == "cpu"
    assert 'offload_activations="cpu"' in lightning_line(found, best).replace("'", '"')
    assert ",offload_activations=cpu" in accelerate_yaml(found, best)
    assert "activations_cpu" in as_text(found)
    with pytest.raises(ConfigError, match='offload_activations "none", "cpu" or None, got True'):
        plan(model(), devices=2, device_memory_gib=8, batch=BATCH, offload_activations=True)  # type: ignore[arg-type]
    tight = plan(
        model(),
        devices=2,
        device_memory_gib=8,
        host_memory_gib=best.host / GIB / 2,
        precision="32-true",
        offload_activations="cpu",
        activation_checkpointing=best.activation_checkpointing,
        stage=3,
        offload=False,
        batch=BATCH,
    )
    assert not tight.fits and tight.choices[0].over == pytest.approx(best.host / 2, rel=0.01)
    assert any("with zero3" in line or "least" in line for line in tight.advice)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    path = "recipes/configs/llama-3.1-8b/config.json"
    words = f"plan {path} --devices 8 --device-memory 40 --seq-length 4096 --stage 3 --json"
    words += " --checkpointing on"
    assert main([*words.split(), "--offload-activations", "both"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    by_name = {choice["name"]: choice for choice in choices}
    there, away = by_name["zero3 checkpointing"], by_name["zero3 checkpointing activations_cpu"]
    assert away["offload_activations"] == "cpu" and there["offload_activations"] == "none"
    # The inputs of 32 layers, 4096 tokens of 4096 numbers in bf16: 1 GiB.
    assert away["host_bytes"] - there["host_bytes"] == pytest.approx(8 * GIB, rel=1e-4)
    assert there["peak_bytes"]["activations"] - away["peak_bytes"]["activations"] > 0.9 * GIB
    assert away["seconds"]["activations"] == pytest.approx(2 * GIB / 20e9, rel=1e-4)
