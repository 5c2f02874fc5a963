"""The plan of adapters, made from the base alone, against a real PEFT model on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import MODEL_STATE_KINDS, Choice, CountedAllocations, Lora, plan
from tests.support.pool import RankPool

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

MICRO_BATCHES = 2
LORA = Lora(rank=3, target_modules=("q_proj", "down_proj"))  # 3 rows on 2 ranks: one of padding


def _config(dtype: torch.dtype) -> Any:
    return transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )


def _adapted(dtype: torch.dtype) -> nn.Module:
    """What a user trains: a base in its own dtype, with PEFT's adapters."""
    import peft

    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(_config(dtype)).to(dtype)
    config = peft.LoraConfig(r=LORA.rank, target_modules=list(LORA.target_modules or ()))
    return peft.get_peft_model(base, config)


def _batch(rank: int, length: int = 9) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    ids = torch.randint(0, 257, (2, length))
    return {"input_ids": ids, "labels": ids}


def _planned(low: bool, stage: int, world_size: int, **options: Any) -> Choice:
    found = plan(
        _config(torch.bfloat16 if low else torch.float32),
        devices=world_size,
        device_memory_gib=4,
        micro_batch=2,
        precision="bf16-mixed" if low else "32-true",
        lora=LORA,
        stage=stage,  # type: ignore[arg-type]
        offload=False,
        device="cpu",
        loop="pytorch",
        **{"seq_length": 9, "activation_checkpointing": False, **options},
    )
    assert found.traced, found.notes
    return found.choices[0]


def _hold(low: bool, stage: int) -> dict[str, Any]:
    """Train two steps; return the accounts of the second by phase, and what the parameters are."""
    param_dtype = "bf16" if low else None
    engine = ZeroEngine(ZeroConfig(stage=stage, param_dtype=param_dtype))  # type: ignore[arg-type]
    model = engine.shard(_adapted(torch.bfloat16 if low else torch.float32))
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(trained, lr=1e-3))
    states: dict[str, dict[str, int]] = {}
    for _ in range(2):
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with engine.micro_step(last=last):
                loss = model(**_batch(engine.rank)).loss
                if not micro:
                    states["after_forward"] = engine.memory()
                loss.backward()
                del loss
            states["after_backward" if last else "after_backward_between"] = engine.memory()
        assert all(p.grad is None for p in frozen) and all(p.grad is not None for p in trained)
        optimizer.step()
        states["after_step"] = engine.memory()
        optimizer.zero_grad()
        states["at_rest"] = engine.memory()
    assert all(isinstance(p, DTensor) for p in frozen)
    return {
        "books": states,
        "frozen": (len(frozen), {p.dtype for p in frozen}, sum(p.numel() for p in frozen)),
        "trained": (len(trained), {p.dtype for p in trained}, sum(p.numel() for p in trained)),
    }


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("low", [False, True])
def test_states_are_the_plans_to_the_byte(
    pool: RankPool, low: bool, stage: int, world_size: int
) -> None:
    choice = _planned(low, stage, world_size, accumulate=MICRO_BATCHES)
    found = pool.run(_hold, world_size, low, stage)[0]  # the plan's rank
    compared = 0
    for phase, held in found["books"].items():
        for kind in MODEL_STATE_KINDS:
            assert held[kind] == choice.timeline.phases[phase][kind], (phase, kind)
            compared += held[kind] > 0
    assert compared > 10


def test_a_low_frozen_base_stays_low_and_has_no_gradients(pool: RankPool) -> None:
    """Case 18: base in bf16 / W, and 4 + 4 + 8 bytes / W for what is trained."""
    world_size = 2
    for found in pool.run(_hold, world_size, True, 3):
        count, dtypes, base = found["frozen"]
        assert count == 21 and dtypes == {torch.bfloat16}
        count, dtypes, trained = found["trained"]
        assert count == 8 and dtypes == {torch.float32}
        assert 0.005 < trained / base < 0.05
        held = sum(found["books"]["after_step"][kind] for kind in MODEL_STATE_KINDS)
        assert held == pytest.approx((2 * base + (4 + 4 + 8) * trained) / world_size, rel=0.05)


def _peak(stage: int, checkpointing: bool, length: int) -> int:
    with CountedAllocations() as counted:
        engine = ZeroEngine(
            ZeroConfig(stage=stage, activation_checkpointing=checkpointing)  # type: ignore[arg-type]
        )
        model = engine.shard(_adapted(torch.float32))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = engine.prepare_optimizer(torch.optim.AdamW(trained))
        batch = _batch(engine.rank, length)
        for step in range(2):
            with counted.stretch(f"step {step}"):
                with engine.micro_step():
                    model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    engine.forget(model)
    return counted.peak("step 1")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_peaks_are_the_plans(pool: RankPool, stage: int, checkpointing: bool) -> None:
    for world_size in (1, 2):
        choice = _planned(
            False, stage, world_size, seq_length=128, activation_checkpointing=checkpointing
        )
        measured = pool.run(_peak, world_size, stage, checkpointing, 128)[0]
        assert measured > 2**20
        assert abs(choice.timeline.peak.total / measured - 1) < 0.05
