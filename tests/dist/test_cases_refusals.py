"""Bad input: one clear error, on every rank, before training."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ConfigError, ModelError
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.parity import (
    GRADIENTS,
    assert_close,
    gradients,
    raises_everywhere,
    reference_window,
    sharded_window,
)
from tests.support.pool import RankPool


def _wrapped_models() -> None:
    engine = ZeroEngine(ZeroConfig())
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with raises_everywhere(ModelError, "DistributedDataParallel", "pass the module it wraps"):
        engine.shard(ddp)
    with raises_everywhere(ModelError, "0 inside DistributedDataParallel"):
        engine.shard(nn.Sequential(ddp))
    sharded = nn.Sequential(nn.Linear(4, 4))
    fully_shard(sharded[0])
    with raises_everywhere(ModelError, "sharded already", "fully_shard"):
        engine.shard(sharded)
    known = engine.shard(TinyLM())
    assert engine.shard(known) is known
    with raises_everywhere(ModelError, "sharded already"):
        ZeroEngine(ZeroConfig()).shard(known)
    with raises_everywhere(ModelError, "lazy"):
        engine.shard(nn.LazyLinear(3))
    with raises_everywhere(ModelError, "torch.nn.Module", "dict"):
        engine.shard({})  # type: ignore[type-var]
    with raises_everywhere(ModelError, "compiled", "block.compile()"):
        engine.shard(torch.compile(nn.Linear(3, 3)))
    with raises_everywhere(ModelError, "no 'Missing'", "Block"):
        ZeroEngine(ZeroConfig(units=("Missing",))).shard(TinyLM())
    with raises_everywhere(ModelError, "plain container"):
        ZeroEngine(ZeroConfig(units=("ModuleList",))).shard(TinyLM())
    with raises_everywhere(ModelError, "repeated blocks", "units"):
        ZeroEngine(ZeroConfig(activation_checkpointing=True)).shard(nn.Linear(3, 3))
    with raises_everywhere(ModelError, "method 'training_step'"):
        engine.shard(nn.Linear(3, 3), forward_methods=("training_step",))


def _different_models() -> None:
    """One rank's model has another shape, name, dtype, freeze or buffer."""
    last = dist.get_rank() == dist.get_world_size() - 1
    engine = ZeroEngine(ZeroConfig())
    model = TinyLM(width=18 + 2 * last)
    with raises_everywhere(ModelError, "same model on every rank", "embed.weight", "(257, 20)"):
        engine.shard(model)
    model = TinyLM()
    if last:
        model.late = nn.Linear(2, 2)
    with raises_everywhere(ModelError, "late.weight", "nothing"):
        engine.shard(model)
    model = TinyLM()
    if last:
        model.head.requires_grad_(False)
    with raises_everywhere(ModelError, "head.weight", "trainable"):
        engine.shard(model)
    model = TinyLM()
    model.norm.to(torch.bfloat16 if last else torch.float32)
    with raises_everywhere(ModelError, "norm.weight", "bfloat16"):
        engine.shard(model)
    model = TinyLM()
    model.register_buffer("table", torch.zeros(3 + last))
    with raises_everywhere(ModelError, "table"):
        engine.shard(model)
    assert engine.models == []
    engine.shard(TinyLM())
    dist.barrier()  # the ranks are still together


def _bad_meshes() -> None:
    with raises_everywhere(ConfigError, "replicate_size=3 divides", "world size 2"):
        ZeroEngine(ZeroConfig(replicate_size=3))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    with raises_everywhere(ConfigError, "replicate_size=2 replicas", "got one with 1"):
        ZeroEngine(ZeroConfig(replicate_size=2), mesh)
    with raises_everywhere(ConfigError, "ZeroConfig", "dict"):
        ZeroEngine({"stage": 3})  # type: ignore[arg-type]
    cube = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    with raises_everywhere(ConfigError, "3 axes"):
        ZeroEngine(ZeroConfig(), cube)
    assert ZeroEngine(ZeroConfig(), mesh).shard_size == 2


def _tied_after_sharding(stage: int) -> None:
    """Tying sharded weights would be undone at the next gather: refused."""
    torch.manual_seed(7)
    reference = TinyLM(tied=True)
    model = TinyLM()
    model.load_state_dict(reference.state_dict())
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)
    own, model.head.weight = model.head.weight, model.embed.weight

    def loss(model: nn.Module, step: int, micro: int, rank: int) -> torch.Tensor:
        batch = tokens(step, micro, rank)
        return lm_loss(model(batch), batch)

    with raises_everywhere(ModelError, "head.weight", "before engine.shard(model)"):
        sharded_window(engine, model, loss, 0)
    model.head.weight = own
    reference = TinyLM()
    reference.load_state_dict(engine.full_state_dict(model, rank0_only=False))
    sharded_window(engine, model, loss, 0)
    reference_window(reference, loss, 0)
    assert_close(gradients(model), gradients(reference), GRADIENTS)


def test_models_that_are_wrapped_or_unknown(pool: RankPool) -> None:
    pool.run(_wrapped_models, 2)


@pytest.mark.parametrize("world_size", (2, 3))
def test_models_that_differ_between_ranks(pool: RankPool, world_size: int) -> None:
    pool.run(_different_models, world_size)


def test_meshes_that_contradict_the_configuration(pool: RankPool) -> None:
    pool.run(_bad_meshes, 2)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_weights_tied_after_sharding(pool: RankPool, stage: int) -> None:
    """Case 69."""
    pool.run(_tied_after_sharding, 2, stage)


def test_engine_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="init_process_group"):
        ZeroEngine(ZeroConfig())
