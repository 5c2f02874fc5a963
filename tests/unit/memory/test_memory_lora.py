"""Adapters in a plan: what is asked for, what is refused, and what is left as it was."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug.cli.plan import add_arguments, run
from shardplug.errors import ConfigError
from shardplug.memory import Lora, as_dict, as_text, plan

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def _module() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def _plan(model: nn.Module, lora: Lora) -> Any:
    return plan(model, devices=2, device_memory_gib=4, lora=lora, batch=torch.empty(2, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank of LoRA to be an integer >= 1, got 0"),
        ({"rank": True}, "got True"),
        ({"target_modules": "q_proj"}, r"write \('q_proj',\)"),
        ({"target_modules": ()}, "hold names of modules"),
        ({"target_modules": ("",)}, "hold names of modules"),
    ],
)
def test_impossible_adapters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Lora(**options)


def test_names_that_the_model_lacks_are_refused() -> None:
    pytest.importorskip("peft")
    # PEFT itself would pass over a name as long as another one is found.
    with pytest.raises(ConfigError, match=r"got 'up' \(no module ends so\).* end in 0, 2"):
        _plan(_module(), Lora(target_modules=("0", "up")))
    with pytest.raises(ConfigError, match="Please specify `target_modules`"):
        _plan(_module(), Lora())


def test_a_model_with_adapters_is_refused_and_planned_as_it_is() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(_module(), peft.LoraConfig(r=2, target_modules=["0"]))
    with pytest.raises(ConfigError, match="leave lora out"):
        _plan(model, Lora(rank=2, target_modules=("0",)))
    found = plan(model, devices=2, device_memory_gib=4, batch=torch.empty(2, 8))
    assert found.layout.num_trainable == 2 * (8 + 16)


def test_peft_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install peft"):
        _plan(_module(), Lora())


def test_the_model_is_left_as_it_was() -> None:
    pytest.importorskip("peft")
    model = _module()
    before = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    classes = [type(module) for module in model.modules()]
    found = _plan(model, Lora(rank=2, target_modules="all-linear"))
    assert found.traced and found.fits
    assert found.layout.num_trainable == 2 * (8 + 16) + 2 * (16 + 4)
    assert [(name, id(p), p.requires_grad) for name, p in model.named_parameters()] == before
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.parametrize(
    ("precision", "base", "adapters"),
    [
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
        ("32-true", torch.bfloat16, torch.float32),
    ],
)
def test_the_base_keeps_its_dtype_and_adapters_have_masters(
    precision: str, base: torch.dtype, adapters: torch.dtype
) -> None:
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    fields = {name: value for name, value in LLAMA.items() if name != "model_type"}
    found = plan(
        transformers.LlamaConfig(**fields),
        devices=2,
        device_memory_gib=4,
        seq_length=16,
        precision=precision,
        lora=Lora(rank=2, target_modules=("q_proj",)),
    )
    assert found.traced, found.notes
    masters = {p.trainable: p.master for p in found.layout.parameters}
    assert masters == {False: base, True: adapters}
    assert "the base is frozen, in bfloat16" in as_text(found)
    assert "were all parameters trained" in as_text(found)
    assert as_dict(found)["lora"] == {"rank": 2, "target_modules": ["q_proj"]}
    smallest = min(found.choices, key=lambda choice: choice.device)
    state = 2 * adapters.itemsize * found.layout.num_trainable // 2 + 4 * 4  # and four counters
    assert smallest.timeline.phases["at_rest"]["optimizer_state"] <= state


def _command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def test_the_command_plans_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    common = (str(path), "--devices", "2", "--device-memory", "8", "--seq-length", "16")
    options = ("--lora", "4", "--lora-targets", "q_proj,v_proj")
    assert _command(*common, *options) == 0
    assert "adapters: peft.LoraConfig(r=4, target_modules=" in capsys.readouterr().out
    assert _command(*common, *options, "--auto") == 0
    line = next(s for s in capsys.readouterr().out.splitlines() if "get_peft_model" in s)
    assert eval(line.partition("model, ")[2][:-1], {"peft": peft}).r == 4
    assert _command(*common, "--lora-targets", "q_proj") == 2
    assert "Expected --lora RANK with --lora-targets" in capsys.readouterr().err
    assert _command(*common, "--lora", "4", "--lora-targets", "nothing") == 2
    assert "Expected target_modules that LlamaForCausalLM has" in capsys.readouterr().err
