"""Where the stage comes from, and settings that are refused by name."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
)
from accelerate.utils.dataclasses import TorchDynamoPlugin

from shardplug import ConfigError, ZeroConfig
from shardplug.integrations.accelerate.distributed import (
    process_group_handler,
    refuse_lone_tasks,
    refuse_too_many_ranks,
    wants_cpu,
)
from shardplug.integrations.accelerate.launch_options import LaunchOptions
from shardplug.integrations.accelerate.options import (
    make_plugin,
    refuse_settings,
    with_plugin,
    with_precision,
)
from tests.adapters.accelerate.common import WORLD, accelerator, fresh
from tests.support.pool import RankPool

LAUNCHED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_stage_from_python_or_the_yaml() -> None:
    launched = {"FSDP_SHARDING_STRATEGY": "shardplug:stage=2,replicate_size=2"}
    assert LaunchOptions.read("zero1", {}).config == ZeroConfig(stage=1)
    assert LaunchOptions.read("shardplug:zero1", {}).config == ZeroConfig(stage=1)
    assert LaunchOptions.read(ZeroConfig(stage=2), {}).config == ZeroConfig(stage=2)
    assert LaunchOptions.read(None, launched).config == ZeroConfig(stage=2, replicate_size=2)
    assert LaunchOptions.read("stage=2,replicate_size=2", launched).config.replicate_size == 2
    # Plain FSDP strategies in the YAML are not ours, and do not matter when Python says a stage.
    assert LaunchOptions.read("zero3", {"FSDP_SHARDING_STRATEGY": "FULL_SHARD"}).config.stage == 3


@pytest.mark.parametrize(
    ("zero", "strategy", "message"),
    [
        (None, "", "Expected a ZeRO stage"),
        (None, "FULL_SHARD", r"got fsdp_sharding_strategy 'FULL_SHARD'.*shardplug:zero3"),
        (None, "shardplug:zero4", "Expected a preset out of"),
        (None, "shardplug:stage=3,bucket=5", "got bucket"),
        ("zero9", "", "Expected a preset out of"),
        (3, "", "a string or a ZeroConfig, got int"),
        ("zero2", "shardplug:zero3", "Expected one ZeRO configuration"),
    ],
)
def test_a_missing_or_wrong_stage_is_refused(zero: Any, strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LaunchOptions.read(zero, {"FSDP_SHARDING_STRATEGY": strategy})


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ({"deepspeed_plugin": object()}, {}, "got deepspeed_plugin"),
        ({"megatron_lm_plugin": object()}, {}, "got megatron_lm_plugin"),
        ({"parallelism_config": object()}, {}, "got parallelism_config"),
        ({"torch_tp_plugin": object()}, {}, "got torch_tp_plugin"),
        ({}, {"ACCELERATE_USE_DEEPSPEED": "true"}, "distributed_type: DEEPSPEED"),
        ({}, {"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({}, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        (
            {"kwargs_handlers": [DistributedDataParallelKwargs(comm_hook="bf16")]},
            {},
            "comm_hook='bf16'",
        ),
        ({"dynamo_backend": "inductor"}, {}, "dynamo_backend='inductor'"),
        ({"dynamo_plugin": TorchDynamoPlugin(backend="inductor")}, {}, "dynamo_backend"),
        ({}, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend"),
    ],
)
def test_other_engines_are_refused(
    arguments: dict[str, Any], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        refuse_settings(arguments, environment)


def test_harmless_settings_pass() -> None:
    refuse_settings(
        {
            "dynamo_plugin": TorchDynamoPlugin(backend="no"),
            "kwargs_handlers": [DistributedDataParallelKwargs(find_unused_parameters=True)],
        },
        {"ACCELERATE_DYNAMO_BACKEND": "no", "ACCELERATE_USE_DEEPSPEED": "false"},
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_offload": True}, "Expected fsdp_offload_params: false"),
        ({"ignored_modules": "embed.*"}, "fsdp_ignored_modules"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, "SIZE_BASED_WRAP is not available"),
        ({"mixed_precision_policy": "bf16"}, "mixed_precision_policy"),
    ],
)
def test_plugin_settings_that_are_not_served_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
    with pytest.raises(ConfigError, match=message):
        make_plugin(plugin, {})


def test_fsdp_version_1_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp_version: 2 under fsdp_config"):
        make_plugin(None, {**LAUNCHED, "FSDP_VERSION": "1"})
    with pytest.raises(ConfigError, match="Expected fsdp_version 2, got 1"):
        make_plugin(FullyShardedDataParallelPlugin(fsdp_version=1), {})
    with pytest.raises(ConfigError, match="FullyShardedDataParallelPlugin, got dict"):
        make_plugin({}, {})


def test_ram_efficient_loading_is_told_to_have_no_effect(monkeypatch: Any) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.warns(UserWarning, match="no effect with shardplug"):
        make_plugin(None, LAUNCHED)


def test_plugin_names_units_and_checkpointing() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["Block"],
        activation_checkpointing=True,
    )
    config = with_plugin(ZeroConfig(stage=2), plugin)
    assert config == ZeroConfig(stage=2, units=("Block",), activation_checkpointing=True)
    plugin.activation_checkpointing_offload = True  # a field since accelerate 1.15
    assert with_plugin(ZeroConfig(stage=2), plugin) == dataclasses.replace(
        config, offload_activations="cpu"
    )
    own = ZeroConfig(stage=2, units=("Other",))
    assert with_plugin(own, plugin).units == ("Other",)
    keeps = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
    assert with_plugin(ZeroConfig(stage=2), keeps) == ZeroConfig(stage=2)
    with pytest.raises(ConfigError, match="fsdp_reshard_after_forward: true with stage 3"):
        with_plugin(ZeroConfig(stage=3), keeps)


def test_mixed_precision_sets_the_compute_dtype() -> None:
    assert with_precision(ZeroConfig(), "no") == ZeroConfig()
    assert with_precision(ZeroConfig(), "bf16").param_dtype is torch.bfloat16
    assert with_precision(ZeroConfig(param_dtype="fp16"), "fp16").param_dtype is torch.float16
    with pytest.raises(ConfigError, match="Expected one compute dtype"):
        with_precision(ZeroConfig(param_dtype="bf16"), "fp16")
    with pytest.raises(ConfigError, match="'no', 'bf16' or 'fp16', got 'fp8'"):
        with_precision(ZeroConfig(), "fp8")


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    refuse_too_many_ranks(False, {"LOCAL_WORLD_SIZE": "1"})
    refuse_too_many_ranks(True, {"LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="got 2 ranks on 1 devices"):
        refuse_too_many_ranks(False, {"LOCAL_WORLD_SIZE": "2"})


def test_tasks_that_each_train_alone_are_refused() -> None:
    """Case 83: srun starts four tasks, and nothing tells Accelerate of the others."""
    four = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "2"}
    with pytest.raises(ConfigError, match="4 ranks, as srun .* got 4 trainings of 1 rank.*srun --"):
        refuse_lone_tasks(1, four)
    refuse_lone_tasks(4, four)
    refuse_lone_tasks(1, {})
    refuse_lone_tasks(1, four | {"SLURM_STEP_NUM_TASKS": "1"})  # srun --pty, or one task a node
    refuse_lone_tasks(1, four | {"SLURM_JOB_NAME": "bash"})
    refuse_lone_tasks(1, four | {"WORLD_SIZE": "1"})
    script = "from shardplug.accelerate import Accelerator; Accelerator(zero='zero3', cpu=True)"
    root = Path(__file__).resolve().parents[3]
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    clean = {key: value for key, value in os.environ.items() if key not in launched}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**clean, **four, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and "got 4 trainings of 1 rank" in done.stderr, done.stderr


def test_the_cpu_is_used_when_asked_for_or_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not wants_cpu(False, {})
    assert wants_cpu(True, {}) and wants_cpu(False, {"ACCELERATE_USE_CPU": "true"})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert wants_cpu(False, {})


def test_gpu_ranks_also_get_a_gloo_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    launched = {"LOCAL_RANK": "0"}
    handlers = process_group_handler(None, False, launched)
    assert handlers is not None and handlers[0].backend == "cuda:nccl,cpu:gloo"
    own = [InitProcessGroupKwargs(backend="nccl")]
    assert process_group_handler(own, False, launched) is own  # the user's choice stays
    assert process_group_handler(None, True, launched) is None
    assert process_group_handler(None, False, {}) is None


def state_made_for_something_else() -> None:
    import accelerate

    fresh()
    accelerate.PartialState()  # sees no device: one process out of two
    with pytest.raises(ConfigError, match="Expected 2 ranks.*set up for 1"):
        accelerator_again()
    acc = accelerator(zero="zero3", cpu=True)
    assert acc.num_processes == WORLD and acc.device.type == "cpu"
    assert str(acc.distributed_type) == "DistributedType.FSDP"
    second = accelerator_again()  # as a script and a Trainer in it both make one
    assert second.state.fsdp_plugin is acc.state.fsdp_plugin
    assert second.engine is not acc.engine
    assert acc.gather(torch.tensor([acc.process_index])).tolist() == [0, 1]


def accelerator_again() -> Any:
    from shardplug.accelerate import Accelerator

    return Accelerator(zero="zero3")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without accelerator")
def test_a_state_that_saw_one_process_is_refused(pool: RankPool) -> None:
    pool.run(state_made_for_something_else, WORLD)


def announces(zero: str) -> str:
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        accelerator(zero=zero, mixed_precision="bf16")
    return output.getvalue()


def test_rank_0_says_which_engine_is_active(pool: RankPool) -> None:
    first, second = pool.run(announces, WORLD, "zero2")
    assert first == "shardplug: ZeRO stage 2 over 2 ranks (cpu, gloo), mixed precision bf16\n"
    assert second == ""
