"""LoRA adapters under Accelerate: saved whole, resumed, loaded onto an unsharded base (case 37)."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.adapters.accelerate.common import WORLD, accelerator
from tests.support.models import tokens
from tests.support.pool import RankPool

pytest.importorskip("peft")
pytest.importorskip("transformers")


def base_model() -> Any:
    import transformers

    torch.manual_seed(2)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
        )
    )


def with_adapters() -> Any:
    import peft

    torch.manual_seed(3)  # the adapters' own weights
    config = peft.LoraConfig(
        r=3,  # more ranks than rows are left for
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base_model(), config)


def train(acc: Any, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        batch = tokens(step, 0, dist.get_rank())
        acc.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def build() -> tuple[Any, Any, Any]:
    acc = accelerator(zero="zero3")
    model = with_adapters()
    trained = [p for p in model.parameters() if p.requires_grad]
    return acc, *acc.prepare(model, torch.optim.AdamW(trained, lr=1e-2))


def save_adapters(root: str) -> Any:
    acc, model, optimizer = build()
    train(acc, model, optimizer, range(2))
    acc.save_state(f"{root}/state")
    train(acc, model, optimizer, range(2, 4))
    state = acc.get_state_dict(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT: whether the vocabulary was resized is not known
        if acc.is_main_process:
            acc.unwrap_model(model).save_pretrained(f"{root}/adapter", state_dict=state)
        acc.save_model(model, f"{root}/whole")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        logits = model(input_ids=tokens(9, 0, 0)).logits
    acc, model, optimizer = build()
    acc.load_state(f"{root}/state")
    assert acc.completed_steps == 2
    train(acc, model, optimizer, range(2, 4))
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens(9, 0, 0)).logits, logits)
    return trained, logits


# PEFT reads a name that transformers gives up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_saved_whole(pool: RankPool, tmp_path: Path) -> None:
    import peft

    trained, logits = pool.run(save_adapters, WORLD, str(tmp_path))[0]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(
        os.listdir(tmp_path / "adapter")
    )
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(value.numel() for value in written.values())
    assert sum(value.numel() for value in written.values()) == trained, "and nothing of the base"
    kinds = ("lora_A", "lora_B", "embed_tokens", "lm_head")
    assert {kind: sum(kind in name for name in written) for kind in kinds} == {
        "lora_A": 4,
        "lora_B": 4,
        "embed_tokens": 1,
        "lm_head": 1,
    }
    loaded = peft.PeftModel.from_pretrained(base_model(), tmp_path / "adapter")
    with torch.no_grad():
        found = loaded(input_ids=tokens(9, 0, 0)).logits
        unchanged = base_model()(input_ids=tokens(9, 0, 0)).logits
    assert float((found - logits).abs().max()) <= 1e-5
    assert float((found - unchanged).abs().max()) > 1e-3
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    expected = with_adapters().state_dict()
    assert {name: value.shape for name, value in whole.items()} == {
        name: value.shape for name, value in expected.items()
    }
