"""Activations in CPU memory in training: gradients bit for bit, and the bytes that were planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from recipes.bench.plan_error import Case, run
from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import plan
from tests.support.models import VOCAB, TinyLM, lm_loss, tokens
from tests.support.parity import whole
from tests.support.pool import RankPool

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Gradients = dict[str, torch.Tensor]


def batch_of(step: int, micro: int, rank: int) -> torch.Tensor:
    return tokens(step, micro, rank, batch=4, length=33)


def tiny() -> nn.Module:
    torch.manual_seed(5)
    return TinyLM(width=32, hidden=64)


def tiny_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return lm_loss(model(batch), batch)


def llama(*, adapters: bool = False, **config: Any) -> Any:
    import transformers

    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 40}
    heads = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    made = transformers.LlamaConfig(**sizes, **heads, use_cache=False, **config)
    model = transformers.LlamaForCausalLM(made)
    if adapters:
        import peft

        options = peft.LoraConfig(
            r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
        )
        model = peft.get_peft_model(model, options)
    return model.train()


def causal_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def train(
    model: nn.Module,
    loss_of: Loss,
    config: ZeroConfig,
    *,
    accumulate: int = 2,
    before: Callable[[Any], None] = lambda _: None,
) -> tuple[list[Gradients], dict[str, float], list[int]]:
    """Train two steps; return their gradients, the traffic, and the bytes after each forward."""
    engine = ZeroEngine(config)
    engine.shard(model)
    before(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = engine.prepare_optimizer(torch.optim.SGD(trained, lr=0.1))
    found, held = [], []
    for step in range(2):
        for micro in range(accumulate):
            with engine.micro_step(last=micro == accumulate - 1):
                loss = loss_of(model, batch_of(step, micro, engine.rank)) / accumulate
                held.append(engine.memory().get("activations_cpu", 0))
                loss.backward()
                assert not engine.memory().get("activations_cpu", 0)
        found.append({n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # an evaluation moves nothing
            loss_of(model, batch_of(9, 0, engine.rank))
    return found, engine.traffic(), held


def compare(
    make: Callable[[], nn.Module],
    loss_of: Loss,
    config: dict[str, Any],
    *,
    recomputed: bool,
    before: Callable[[Any], None] = lambda _: None,
) -> int:
    """Compare with the same run without offload and with its plan; return the bytes moved."""
    expected, none, _ = train(make(), loss_of, ZeroConfig(**config), before=before)
    away = ZeroConfig(**config, offload_activations="cpu")
    found, traffic, held = train(make(), loss_of, away, before=before)
    assert not any(none.values())
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys() and ours
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    choice = plan(
        make(),
        devices=2,
        device_memory_gib=1,
        accumulate=2,
        precision="32-true",
        stage=away.stage,
        activation_checkpointing=recomputed,
        offload_activations="cpu",
        offload=False,
        device="cpu",
        loop="pytorch",
        batch=batch_of(0, 0, 0),
        loss=loss_of,
    ).choices[0]
    assert traffic["bytes_written"] == traffic["bytes_read"] == choice.timeline.activations_out > 0
    assert set(held) == {choice.timeline.activations_out // 2}
    assert choice.timeline.phases["after_forward"]["activations_cpu"] == held[0]
    return held[0]


def grid(stage: int) -> None:
    plain = {"stage": stage}
    everything = compare(tiny, tiny_loss, plain, recomputed=False)
    inputs = compare(tiny, tiny_loss, {**plain, "activation_checkpointing": True}, recomputed=True)
    assert inputs == 3 * 4 * 33 * 32 * 4  # of three blocks
    assert everything == 6 * inputs


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_stages_with_and_without_recomputation(pool: RankPool, stage: int) -> None:
    pool.run(grid, 2, stage)


def checkpointed(model: Any) -> None:
    model.activation_checkpointing_enable()


def hugging_face() -> None:
    inputs = compare(llama, causal_loss, {"stage": 3}, recomputed=True, before=checkpointed)
    assert inputs == 6 * 4 * 33 * 32 * 4
    everything = compare(llama, causal_loss, {"stage": 1}, recomputed=False)
    assert everything > 10 * inputs


def test_hugging_face_checkpointing_switched_on_by_the_user(pool: RankPool) -> None:
    pytest.importorskip("transformers")
    pool.run(hugging_face, 2)


def adapted() -> Any:
    return llama(adapters=True)


def adapters() -> None:
    compare(adapted, causal_loss, {"stage": 2}, recomputed=False)


def test_adapters_on_a_frozen_base(pool: RankPool) -> None:
    pytest.importorskip("peft")
    pool.run(adapters, 2)


def peak() -> tuple[int, int]:
    found = run(Case("llama", 3, False, 2, 128, size="small", offload_activations="cpu"))
    return found.measured, found.predicted


def test_the_measured_peak_is_the_planned_one(pool: RankPool) -> None:
    """A copy that stayed beside its original, or two of them, would show."""
    pytest.importorskip("transformers")
    measured, predicted = pool.run(peak, 2)[0]
    assert abs(predicted / measured - 1) < 0.05


def test_on_gpus_device_bytes_fall_and_host_bytes_and_time_rise() -> None:
    batch = tokens(0, 0, 0, batch=64, length=65)
    found = plan(
        tiny(),
        devices=2,
        device_memory_gib=1,
        reserve_gib=0,
        precision="32-true",
        stage=3,
        offload=False,
        activation_checkpointing=False,
        offload_activations=None,
        loop="pytorch",
        batch=batch,
        loss=tiny_loss,
    )
    by_name = {choice.name: choice for choice in found.choices}
    there, away = by_name["zero3"], by_name["zero3 activations_cpu"]
    assert (there.offload_activations, away.offload_activations) == ("none", "cpu")
    assert away.device < there.device
    out = away.timeline.activations_out
    assert away.host >= 2 * out > 0 == there.host  # of both devices, rounded up
    after = [choice.timeline.phases["after_forward"]["activations"] for choice in (there, away)]
    assert after[0] - after[1] == out - batch.nbytes  # which the embedding saves, and the loop
    assert away.time.activations == pytest.approx(2 * out / 20e9) and not there.time.activations
    assert away.time.total > there.time.total
