"""What ZeroConfig accepts, reads from text, and refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug import ZeroConfig
from shardplug.config import PRESETS
from shardplug.errors import ConfigError, ShardplugError


def test_defaults_are_stage_3_on_the_device() -> None:
    config = ZeroConfig()
    assert config.stage == 3 and config.units == "auto" and config.replicate_size == 1
    assert config.param_dtype is None and config.reduce_dtype is None
    assert config.prefetch == 1 and config.activation_checkpointing is False


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_presets_of_each_stage(stage: int) -> None:
    assert ZeroConfig.preset(f"zero{stage}") == ZeroConfig(stage=stage)  # type: ignore[arg-type]
    assert ZeroConfig.preset(f"ZeRO{stage}", prefetch=2).prefetch == 2
    assert ZeroConfig.parse(f"zero{stage}") == ZeroConfig.parse(f"stage={stage}")


def test_preset_names() -> None:
    assert PRESETS == (
        "zero1",
        "zero2",
        "zero3",
        "zero1_cpu",
        "zero2_cpu",
        "zero3_cpu",
        "zero3_infinity",
        "zero2_offload",
        "zero3_offload",
    )


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_presets_with_optimizer_state_on_the_cpu(stage: int) -> None:
    expected = ZeroConfig(stage=stage, offload_optimizer="cpu")  # type: ignore[arg-type]
    assert ZeroConfig.preset(f"zero{stage}_cpu") == expected
    if stage > 1:
        assert ZeroConfig.preset(f"zero{stage}_offload") == expected


def test_optimizer_state_in_files() -> None:
    config = ZeroConfig(stage=1, offload_optimizer="nvme", nvme_path=Path("/mnt/a"))  # type: ignore[arg-type]
    assert config.nvme_path == "/mnt/a"
    assert ZeroConfig.parse("zero1,offload_optimizer=nvme,nvme_path=/mnt/a") == config
    assert ZeroConfig(offload_optimizer="nvme").nvme_path is None  # the environment may name it


def test_a_budget_of_cpu_memory_before_files() -> None:
    config = ZeroConfig(offload_optimizer="nvme", offload_cpu_gib=1.5)
    assert config.offload_cpu_gib == 1.5
    assert ZeroConfig.parse("zero3,offload_optimizer=nvme,offload_cpu_gib=1.5") == config
    assert ZeroConfig.parse("zero3,offload_cpu_gib=none").offload_cpu_gib is None
    assert ZeroConfig(offload_optimizer="nvme", offload_cpu_gib=0).offload_cpu_gib == 0


def test_parameters_on_a_tier() -> None:
    config = ZeroConfig.preset("zero3_infinity", nvme_path="/mnt/a")
    assert (config.stage, config.offload_optimizer, config.offload_params) == (3, "nvme", "nvme")
    mixed = ZeroConfig(offload_optimizer="cpu", offload_params="nvme", nvme_path="/mnt/a")
    assert mixed.nvme_path == "/mnt/a"
    with pytest.raises(ConfigError, match="has no effect with"):
        ZeroConfig(offload_optimizer="cpu", offload_params="cpu", nvme_path="/mnt/a")
    for stage in (1, 2):
        with pytest.raises(ConfigError, match=f"Expected stage 3 with .*got stage {stage}"):
            ZeroConfig(stage=stage, offload_params="cpu")  # type: ignore[arg-type]


def test_parse_reads_every_field() -> None:
    text = (
        "zero3, stage=2,replicate_size=2, units=LlamaDecoderLayer+Foo, param_dtype=bf16,"
        "reduce_dtype=float32,activation_checkpointing=True,prefetch=0,nvme_path=none,"
        "offload_params=none,offload_optimizer=none"
    )
    assert ZeroConfig.parse(text) == ZeroConfig(
        stage=2,
        replicate_size=2,
        units=("LlamaDecoderLayer", "Foo"),
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        activation_checkpointing=True,
        prefetch=0,
    )
    assert ZeroConfig.parse("units=auto,param_dtype=None") == ZeroConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expected a preset"),
        (",", "Expected a preset"),
        ("zero4", "got 'zero4'"),
        ("zero3,fast", "option=value, got 'fast'"),
        ("stage=three", "stage to be an integer, got 'three'"),
        ("stage=4", "stage 1, 2 or 3, got 4"),
        ("zero3,stge=2", "got stge"),
        ("zero3,prefetch=1,prefetch=2", "'prefetch' is given twice"),
        ("activation_checkpointing=yes", "true or false, got 'yes'"),
        ("param_dtype=int8", "param_dtype out of bf16"),
        ("prefetch=-1", "prefetch to be an integer >= 0, got -1"),
        ("replicate_size=0", "replicate_size to be an integer >= 1, got 0"),
        ("zero2,offload_optimizer=disk", 'offload_optimizer "none", "cpu" or "nvme", got \'disk\''),
        ("zero2,nvme_path=/mnt", "nvme_path='/mnt' has no effect with offload_optimizer='none'"),
        ("zero2_cpu,nvme_path=/mnt", "nvme_path='/mnt' has no effect with offload_optimizer='cpu'"),
        ("offload_optimizer=nvme,nvme_path= ", "nvme_path to name a folder, got ''"),
        ("offload_optimizer=nvme,offload_cpu_gib=-1", "GiB of at least 0, got -1"),
        ("offload_optimizer=nvme,offload_cpu_gib=inf", "GiB of at least 0, got inf"),
        ("offload_optimizer=nvme,offload_cpu_gib=nan", "GiB of at least 0, got nan"),
        ("offload_optimizer=nvme,offload_cpu_gib=2GB", "to be a number, got '2GB'"),
        ("zero3,offload_cpu_gib=1", "offload_cpu_gib=1.0 has no effect with .*'none'"),
        ("zero3_cpu,offload_cpu_gib=0", "offload_cpu_gib=0.0 has no effect with .*'cpu'"),
        ("zero2_infinity", "out of zero1, .*zero3_offload, got 'zero2_infinity'"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ZeroConfig.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stage": 0}, "got 0"),
        ({"stage": True}, "got True"),
        ({"stage": "3"}, "got '3'"),
        ({"units": "Block"}, r"write \('Block',\)"),
        ({"units": ("Block", 3)}, "hold class names"),
        ({"units": ("",)}, "hold class names"),
        ({"param_dtype": torch.int8}, "bf16, fp16 or fp32, got torch.int8"),
        ({"reduce_dtype": "half"}, "reduce_dtype out of"),
        ({"replicate_size": 2.0}, "integer >= 1, got 2.0"),
        ({"prefetch": True}, "integer >= 0, got True"),
        ({"activation_checkpointing": 1}, "true or false, got 1"),
        ({"offload_activations": "nvme"}, "or \"cpu\", got 'nvme': .* is too much for files"),
        ({"offload_activations": True}, 'got True: write "cpu" to keep them in CPU memory'),
        ({"offload_params": "nvme"}, "Expected offload_optimizer too with offload_params='nvme'"),
        ({"offload_optimizer": None}, "got None"),
        ({"offload_optimizer": "nvme", "offload_cpu_gib": "1"}, "GiB of at least 0, got '1'"),
        ({"offload_optimizer": "nvme", "offload_cpu_gib": True}, "GiB of at least 0, got True"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ZeroConfig(**fields)
    assert isinstance(caught.value, (ShardplugError, ValueError))


def test_unknown_presets_and_fields_are_refused() -> None:
    with pytest.raises(ConfigError, match="out of zero1, .*got 'zero9'"):
        ZeroConfig.preset("zero9")
    with pytest.raises(ConfigError, match="got bucket, stages"):
        ZeroConfig.preset("zero3", stages=2, bucket=1)
    with pytest.raises(TypeError):
        ZeroConfig(3)  # type: ignore[misc]


def test_is_frozen_hashable_and_normalised() -> None:
    config = ZeroConfig(units=["Block"], param_dtype="BF16")  # type: ignore[arg-type]
    assert config.units == ("Block",) and config.param_dtype is torch.bfloat16
    assert hash(config) == hash(ZeroConfig(units=("Block",), param_dtype=torch.bfloat16))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.stage = 1  # type: ignore[misc]
    assert dataclasses.replace(config, stage=1).units == ("Block",)


def test_every_field_can_be_written_in_text() -> None:
    values = {"units": "A+B", "param_dtype": "bf16", "reduce_dtype": "fp32", "prefetch": "2"}
    values |= {"stage": "1", "replicate_size": "2", "activation_checkpointing": "true"}
    values |= {"watchdog": "report", "silence_seconds": "30", "stall_seconds": "1800"}
    for field in dataclasses.fields(ZeroConfig):
        text = f"{field.name}={values.get(field.name, 'none')}"
        parsed = ZeroConfig.parse(text)
        changed = getattr(parsed, field.name) != field.default
        assert changed == (field.name in values), text
