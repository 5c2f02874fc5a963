"""LoRA on a frozen bf16 base: what is held, in which dtype, what is sent, and that it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import local_tensor
from shardplug.errors import ModelError
from tests.support.models import VOCAB, tokens
from tests.support.parity import raises_everywhere, whole
from tests.support.pool import RankPool
from tests.support.traffic import Traffic

pytest.importorskip("peft")
pytest.importorskip("transformers")


def lora(*, dtype: torch.dtype = torch.bfloat16) -> Any:
    import peft
    import transformers

    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    base = transformers.LlamaForCausalLM(config).to(dtype)
    options = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # else half of the adapter has no gradient at first
    )
    return peft.get_peft_model(base, options)


def padded(parameter: nn.Parameter, world_size: int) -> int:
    """Elements of this rank's part with its padding."""
    return -(-parameter.shape[0] // world_size) * parameter.numel() // parameter.shape[0]


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    batch = tokens(step, 0, rank)
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def held_and_sent(stage: int) -> None:
    model, reference = lora(), lora(dtype=torch.float32)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    shapes = {n: (p.shape, p.requires_grad) for n, p in model.named_parameters()}
    assert len(trained) == 9 and len(shapes) > 25
    config = ZeroConfig(stage=stage, param_dtype="bf16")  # type: ignore[arg-type]
    engine = ZeroEngine(config)
    engine.shard(model)
    world = engine.world_size
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    assert {p.dtype for p in trainable} == {torch.float32}
    at_rest = sum(padded(p, world) * 2 for p in frozen)
    at_rest += sum(padded(p, world) * 4 for p in trainable)
    assert engine.memory()["master_shards"] == at_rest
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(trainable, lr=1e-3))
    largest = 0

    def look(phase: str) -> None:
        nonlocal largest
        if phase == "after_backward":
            largest = max(largest, engine.memory()["gradients"])

    engine.add_phase_listener(look)
    losses = []
    for step in range(3):
        traffic = Traffic()
        with traffic:
            loss = loss_of(model, step, engine.rank)
            loss.backward()
        losses.append(loss.detach().float())
        everything = sum(padded(p, world) for p in model.parameters()) * (world - 1)
        # Twice in stage 3, but for units that its backward does not reach: nothing is trained
        # below the first adapter.
        assert (
            2 * everything <= traffic.bytes["gather"] <= 2 * everything * (2 if stage == 3 else 1)
        )
        assert traffic.bytes["reduce"] == sum(padded(p, world) * 4 for p in trainable) * (world - 1)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        assert engine.clip_grad_norm(1.0) > 0
        optimizer.step()
        optimizer.zero_grad()
    assert largest == sum(padded(p, world) * 4 for p in trainable)
    assert engine.memory()["optimizer_state"] <= 8 * sum(
        local_tensor(p).numel() for p in trainable
    ) + 4 * len(trainable)
    for name, parameter in model.named_parameters():
        same = torch.equal(whole(parameter), before[name].to(parameter.dtype))
        assert same == (name not in trained), name
    check_losses(engine, reference, losses)


def check_losses(engine: ZeroEngine, reference: Any, losses: list[torch.Tensor]) -> None:
    """As one process in fp32 does, as closely as bf16 (8 bits) tells a loss of 6."""
    optimizer = torch.optim.AdamW((p for p in reference.parameters() if p.requires_grad), lr=1e-3)
    for step, loss in enumerate(losses):
        dist.all_reduce(loss)
        expected = 0.0
        for rank in range(engine.world_size):
            part = loss_of(reference, step, rank) / engine.world_size
            part.backward()
            expected += part.item()
        assert loss.item() / engine.world_size == pytest.approx(expected, rel=1e-2)
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accumulating(stage: int) -> None:
    """Between micro-batches, whole gradients of what is trained at the most."""
    model = lora()
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype="bf16"))  # type: ignore[arg-type]
    engine.shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    held = []
    for last in (False, True):
        with engine.micro_step(last=last):
            loss_of(model, int(last), engine.rank).backward()
        held.append(engine.memory()["gradients"])
    size = sum(p.numel() for p in trained) if stage == 1 else sum(padded(p, 2) for p in trained)
    assert 0 < held[0] <= 4 * size
    assert held[1] == 4 * sum(padded(p, 2) for p in trained)


class Params4bit(nn.Parameter):
    """Named, and kept, as bitsandbytes does."""

    quant_state = None


def quantised() -> None:
    def four_bits(model: nn.Module) -> nn.Module:
        packed = torch.zeros(16, 1, dtype=torch.uint8)
        model.up.weight = packed.as_subclass(Params4bit)  # type: ignore[union-attr, assignment]
        model.up.weight.requires_grad_(False)  # type: ignore[union-attr]
        return model

    def by_hugging_face(model: nn.Module) -> nn.Module:
        model.quantization_method = "gptq"  # type: ignore[assignment]
        model.is_quantized = True  # type: ignore[assignment]
        return model

    cases: list[tuple[Callable[[nn.Module], nn.Module], tuple[str, ...]]] = [
        (four_bits, ("up.weight", "Params4bit", "bf16")),
        (by_hugging_face, ("quantised", "gptq", "bf16")),
    ]
    for change, parts in cases:
        model = nn.ModuleDict({"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)})
        with raises_everywhere(ModelError, *parts):
            ZeroEngine(ZeroConfig(stage=3)).shard(change(model))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_parameters_stay_in_bf16_and_have_no_gradients(pool: RankPool, stage: int) -> None:
    pool.run(held_and_sent, 2, stage)
    pool.run(accumulating, 2, stage)


def test_quantised_parameters_are_refused_by_name(pool: RankPool) -> None:
    pool.run(quantised, 2)
