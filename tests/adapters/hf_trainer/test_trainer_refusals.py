"""What would sidestep or double the sharding is refused by name, on every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Trainer
from transformers.distributed import DistributedConfig

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ConfigError, ShardplugError
from shardplug.hf import MemoryCurve
from shardplug.integrations.accelerate.hf_trainer.trainer_accelerator import refuse_arguments
from tests.adapters.hf_trainer.common import arguments, build, launched, rows, run
from tests.support.pool import RankPool

ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"fsdp": True}, "got fsdp=True in Seq2SeqTrainingArguments: take it out"),
    "fsdp_text": ({"fsdp": "full_shard auto_wrap"}, "got fsdp='full_shard auto_wrap'"),
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "got deepspeed={'zero_opt"),
    "batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size=True in"),
    "full_eval": ({"bf16_full_eval": True}, "bf16_full_eval=True in .* Use bf16=True"),
    "compile": ({"torch_compile": True}, "torch_compile=True in .* block.compile()"),
}
OFFLOADED = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm"), "cpu") | {
    "lm_head": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
}


def sharded_by_hand(base: Path, rank: int) -> nn.Module:
    model = build()
    for module in (*model.model.layers, model):
        fully_shard(module)
    return model


MODELS: dict[str, tuple[Callable[[Path, int], nn.Module], str]] = {
    "ddp": (lambda base, rank: DistributedDataParallel(build()), "inside DistributedDataParallel"),
    "fully_shard": (sharded_by_hand, "Take the fully_shard / FSDP call out"),
    "engine": (
        lambda base, rank: ZeroEngine(ZeroConfig(stage=3)).shard(build()),
        "is sharded already",
    ),
    "distributed_config": (
        lambda base, rank: AutoModelForCausalLM.from_pretrained(
            base, distributed_config=DistributedConfig(fsdp_size=2)
        ),
        "Take distributed_config out of from_pretrained",
    ),
    "device_map": (
        lambda base, rank: AutoModelForCausalLM.from_pretrained(
            base, device_map=OFFLOADED, offload_folder=str(base / f"offload{rank}")
        ),
        "Load it without device_map",
    ),
    "device_map_auto": (
        lambda base, rank: AutoModelForCausalLM.from_pretrained(base, device_map="auto"),
        "LlamaForCausalLM loaded with device_map='auto' on 2 ranks.*Load it without device_map",
    ),
    "device_map_inside": (
        lambda base, rank: get_peft_model(
            AutoModelForCausalLM.from_pretrained(
                base, device_map="balanced", output_loading_info=True
            )[0],
            LoraConfig(target_modules=["q_proj"]),
        ),
        "loaded with device_map='balanced' on 2 ranks",
    ),
    "compiled": (lambda base, rank: torch.compile(build()), "not compiled as a whole"),
}


def test_an_offload_that_would_move_parameters_is_refused() -> None:
    trl = pytest.importorskip("trl")
    assert "activation_offloading" in {field.name for field in dataclasses.fields(trl.SFTConfig)}
    settings = SimpleNamespace(activation_offloading=True)
    with pytest.raises(ConfigError, match="activation_offloading=True in .*activations=cpu"):
        refuse_arguments(settings)


def refused(act: Callable[[], object]) -> str:
    try:
        act()
    except ShardplugError as error:
        return str(error)
    return "not refused"


def messages(out: Path, base: Path) -> dict[str, str]:
    import torch.distributed as dist

    found = {}
    with launched("zero3"):
        arguments(out, 2).device  # noqa: B018 - sets the process group up as Trainer does
        for name, (changes, _) in ARGUMENTS.items():
            found[name] = refused(lambda changes=changes: arguments(out, 2, **changes))
        for name, (make, _) in MODELS.items():
            model = make(base, dist.get_rank())
            settings = arguments(out, 2, save_strategy="no")
            trainer = Trainer(model=model, args=settings, train_dataset=rows())
            found[name] = refused(trainer.train)
    with launched("zero3,async_save=true"):
        found["async_save"] = refused(lambda: run(out, build(), world_size=2))
    return found


def test_refused_by_name_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    import re

    build().save_pretrained(tmp_path / "base")
    found = pool.run(messages, 2, tmp_path, tmp_path / "base")
    expected = {name: text for name, (_, text) in (ARGUMENTS | MODELS).items()}
    expected["async_save"] = "async_save=true is not available with Hugging Face's Trainer"
    for result in found:
        assert result.keys() == expected.keys()
        for name, text in expected.items():
            assert re.search(text, result[name]), f"{name}: {result[name]}"


def places_that_are_fine(out: Path, base: Path) -> int:
    """One device by name on any ranks, and a choice that one rank makes, train."""
    import torch.distributed as dist

    world = dist.get_world_size()
    places = ("cpu", {"": "cpu"}, torch.device("cpu")) + (("auto",) if world == 1 else ())
    with launched("zero3"):
        for place in places:
            model = AutoModelForCausalLM.from_pretrained(base, device_map=place)
            run(out, model, world_size=world, max_steps=1, save_strategy="no")
    return len(places)


@pytest.mark.parametrize(("world_size", "count"), ((1, 4), (2, 3)))
def test_a_device_named_is_no_spread(
    pool: RankPool, tmp_path: Path, world_size: int, count: int
) -> None:
    build().save_pretrained(tmp_path / "base")
    found = pool.run(places_that_are_fine, world_size, tmp_path, tmp_path / "base")
    assert found == [count] * world_size


def test_memory_curve_needs_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ShardplugError, match="a Trainer that shards with shardplug for MemoryCur"):
        run(tmp_path, build(), callbacks=(MemoryCurve(),), save_strategy="no")
    with pytest.raises(ShardplugError, match="every_n_steps >= 1, got 0"):
        MemoryCurve(every_n_steps=0)
