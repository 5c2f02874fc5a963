"""Bytes moved per optimizer step equal the stage table exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardplug import ZeroConfig, ZeroEngine
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool
from tests.support.traffic import Traffic


def count(
    stage: int, micros: int, param_dtype: str | None, replicate_size: int = 1
) -> dict[str, int]:
    """Return the bytes of one optimizer step and the padded parameter count."""
    rank = dist.get_rank()
    model = TinyLM(width=8, hidden=12)
    options: dict[str, Any] = {"stage": stage, "param_dtype": param_dtype}
    engine = ZeroEngine(ZeroConfig(**options, replicate_size=replicate_size))
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    padded = sum(
        -(-p.shape[0] // engine.shard_size) * engine.shard_size * p.numel() // p.shape[0]
        for p in model.parameters()
        if p.ndim
    )
    found: dict[str, int] = {}
    for step in range(2):  # the first one makes optimizer state
        traffic = Traffic()
        with traffic:
            for micro in range(micros):
                with engine.micro_step(last=micro == micros - 1):
                    batch = tokens(step, micro, rank, batch=1, length=4)
                    lm_loss(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = dict(traffic.bytes)
    return {**found, "padded": padded, "managed": sum(1 for p in model.parameters() if p.ndim)}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("param_dtype", [None, "bf16"], ids=["fp32", "bf16"])
def test_bytes_per_step_equal_the_table(
    pool: RankPool, world_size: int, param_dtype: str | None
) -> None:
    sent = 2 if param_dtype else 4
    for stage in (1, 2, 3):
        for micros in (1, 4):
            found = pool.run(count, world_size, stage, micros, param_dtype)[0]
            gathers = 2 * micros if stage == 3 else 1
            reduces = 1 if stage == 1 else micros
            case = (stage, micros, found)
            # Each of N ranks sends (N-1)/N of the whole.
            share = found["padded"] * (world_size - 1) // world_size
            assert found["gather"] == gathers * share * sent, case
            # gradients are reduced in fp32, also where bf16 is computed
            assert found["reduce"] == reduces * share * 4, case
            # To every other rank 8 bytes beside each collective, and 8 bytes a parameter per
            # window (on CPU ranks); the 0-dim parameter is averaged by itself.
            collectives = 4 * (gathers + reduces) + 1
            expected = (collectives + 1 + found["managed"]) * 8 * (world_size - 1)
            assert found["agreement"] == expected, case
            assert found["allreduce_"] == 8, case
            assert set(found) == {
                "gather",
                "reduce",
                "agreement",
                "allreduce_",
                "padded",
                "managed",
            }, case


@pytest.mark.parametrize(("world_size", "replicas"), [(4, 2), (3, 3)])
def test_bytes_with_replicas(pool: RankPool, world_size: int, replicas: int) -> None:
    """What crosses the link between two nodes is the sum of the gradients, and who takes part."""
    found = pool.run(count, world_size, 3, 2, None, replicas)[0]
    shards = world_size // replicas
    inside = found["padded"] * (shards - 1) // shards
    assert found.get("gather", 0) == 4 * inside * 4
    assert found.get("reduce", 0) == 2 * inside * 4
    # As in a ring: (R-1)/R of a shard there, and as much back.
    ring = 2 * 4 * 2 * (found["padded"] // shards) * (replicas - 1) // replicas
    assert found["sum over replicas"] == pytest.approx(ring, abs=4 * 4 * 2 * replicas)
    compared = 4 * (4 + 2) * (shards - 1) + 4 * 2 * (replicas - 1)
    ends = (2 + found["managed"]) * (world_size - 1)
    assert found["agreement"] == 8 * (compared + ends)
