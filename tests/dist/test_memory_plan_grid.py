"""Plan = the engine's accounting = the storages of all tensors there are, to the byte.

Stage x tier x 1, 2 and 4 ranks x precision, for a model of odd shapes with a scalar, the same with
tied weights, and the same frozen under low-rank adapters. Every case trains two steps of two
micro-batches; the second is compared, at five moments, on the rank that the plan is for.
"""

from __future__ import annotations

import gc
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from recipes.bench.plan_error import LowRank
from shardplug import ZeroConfig, ZeroEngine
from shardplug.memory import MODEL_STATE_KINDS, TIER_KINDS, plan
from shardplug.tiers.protocol import BLOCK_BYTES
from tests.dist.test_memory_curve import _live_bytes
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.pool import RankPool

MICRO_BATCHES = 2
TIERS = {  # name: where optimizer state and parameters live
    "none": ("none", "none"),
    "cpu": ("cpu", "none"),
    "nvme": ("nvme", "none"),
    "all cpu": ("cpu", "cpu"),
    "nvme, parameters cpu": ("nvme", "cpu"),
    "infinity": ("nvme", "nvme"),
}
PRECISIONS: dict[str, dict[str, Any]] = {  # name: what the engine is given
    "32-true": {},
    "bf16-mixed": {"param_dtype": "bf16"},
    "bf16-mixed, reduced in bf16": {"param_dtype": "bf16", "reduce_dtype": "bf16"},
    "bf16-true": {},
}

Books = dict[str, dict[str, int]]


def _model(kind: str, precision: str) -> nn.Module:
    torch.manual_seed(0)
    model = TinyLM(tied=kind == "tied")  # 257 tokens, width 18, 37 inside, a scalar
    if kind == "low rank":
        model.requires_grad_(False)
        if precision != "32-true":
            model.to(torch.bfloat16)
        for block in model.blocks:
            block.down = LowRank(block.down, rank=3)
    return model.to(torch.bfloat16) if precision == "bf16-true" else model


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return lm_loss(model(batch), batch)


def _planned(kind: str, precision: str, world_size: int) -> dict[tuple[int, str], Books]:
    found = plan(
        _model(kind, precision),
        devices=world_size,
        device_memory_gib=4,
        accumulate=MICRO_BATCHES,
        precision=precision.split(",")[0],
        reduce_dtype=torch.bfloat16 if "reduced" in precision else None,
        activation_checkpointing=False,
        device="cpu",
        loop="pytorch",
        batch=tokens(0, 0, 0),
        loss=_loss,
    )
    assert found.traced, found.notes
    names = {tiers: name for name, tiers in TIERS.items()}
    return {
        (c.stage, names[c.offload_optimizer, c.offload_params]): {
            **{phase: held for phase, held in c.timeline.phases.items()},
            "files": {"all": c.disk // world_size},
        }
        for c in found.choices
    }


def _files(states: dict[str, int]) -> int:
    return sum(size for kind, size in states.items() if kind.endswith("_nvme"))


def _settled(states: dict[str, int]) -> int:
    """Bytes of live tensors beyond the accounting, once gloo's threads have let go of theirs."""
    for _ in range(100):
        rest = _live_bytes() - sum(states.values()) + _files(states)
        if rest == 0:
            break
        time.sleep(0.02)
    return rest


def _hold(kind: str, precision: str, stage: int, tier: str, folder: str) -> Books:
    engine = ZeroEngine(
        ZeroConfig(
            stage=stage,  # type: ignore[arg-type]
            offload_optimizer=TIERS[tier][0],  # type: ignore[arg-type]
            offload_params=TIERS[tier][1],  # type: ignore[arg-type]
            nvme_path=folder if "nvme" in TIERS[tier] else None,
            **PRECISIONS[precision],
        )
    )
    gc.collect()
    gc.freeze()  # what is there already is left out
    model = engine.shard(_model(kind, precision))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(trained, lr=1e-3))
    states: Books = {}
    for step in range(2):
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with engine.micro_step(last=last):
                batch = tokens(step, micro, engine.rank)
                loss = _loss(model, batch)
                if micro == 0:
                    states["after_forward"] = engine.memory()
                loss.backward()
                del batch, loss
            states["after_backward" if last else "after_backward_between"] = engine.memory()
        optimizer.step()
        states["after_step"] = engine.memory()
        optimizer.zero_grad()
        states["at_rest"] = engine.memory()
    if tier != "infinity":  # whose parameters are tensors without memory
        assert _settled(states["at_rest"]) == 0, "the accounting are all the tensors there are"
    if engine._offload.optimizer_tier is not None:
        engine._offload.optimizer_tier.close()
    return states


def _hold_all(kind: str, precision: str, folder: str) -> dict[tuple[int, str], Books]:
    warnings.filterwarnings("ignore", message="Training keeps no fp32 master weights")
    found = {}
    for stage in (1, 2, 3):
        for tier in TIERS if stage == 3 else list(TIERS)[:3]:
            try:
                found[stage, tier] = _hold(kind, precision, stage, tier, folder)
            finally:
                gc.unfreeze()
    return found


QUICK = [("plain", "bf16-true"), ("low rank", "bf16-mixed")]
CASES = [(kind, "32-true") for kind in ("plain", "tied", "low rank")]
CASES += [("plain", name) for name in PRECISIONS if name != "32-true"]
CASES += [("low rank", "bf16-mixed"), ("tied", "bf16-mixed")]


@pytest.mark.parametrize(("kind", "precision"), QUICK)
def test_plan_books_and_tensors_are_one(
    pool: RankPool, tmp_path: Any, kind: str, precision: str
) -> None:
    _compare(pool, tmp_path, kind, precision, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("kind", "precision"), CASES)
def test_plan_books_and_tensors_are_one_on_the_whole_grid(
    pool: RankPool, tmp_path: Any, kind: str, precision: str, world_size: int
) -> None:
    _compare(pool, tmp_path, kind, precision, world_size)


def _compare(pool: RankPool, tmp_path: Any, kind: str, precision: str, world_size: int) -> None:
    planned = _planned(kind, precision, world_size)
    held = pool.run(_hold_all, world_size, kind, precision, str(tmp_path))[0]
    assert planned.keys() == held.keys() and len(held) == 3 * 3 + 3
    compared = 0
    for case, states in held.items():
        for phase, found in states.items():
            for name in (*MODEL_STATE_KINDS, *TIER_KINDS):
                if name.endswith("_nvme"):
                    continue  # below, as the plan has one figure for all files
                expected, got = planned[case][phase].get(name, 0), found.get(name, 0)
                if name == "staging" and case[1] == "infinity" and got < expected:
                    # Of the buffers that may be made, as many as were in use at a time.
                    expected -= (expected - got) // BLOCK_BYTES * BLOCK_BYTES
                assert got == expected, (case, phase, name)
                compared += expected > 0
        # At this moment there are gradients too.
        assert _files(states["after_backward"]) == planned[case]["files"]["all"], case
    assert compared > 9 * 5 * 2
