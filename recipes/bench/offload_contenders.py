"""One rank of a contender of against_deepspeed.py, which starts it and tells it when to step.

The model is a 25 M parameter Llama in fp32, with the same weights, data and AdamW on both sides.
What DeepSpeed needs to be compared with: `gradient_clipping` is 1.0 unless it is set to 0;
parameters are swapped as bf16 unless the model is built under `zero.Init` without a dtype; and
there the model's own initial weights are lost, so that they are written into it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from turns import Turns

VOCAB, LENGTH, BATCH, LR, DECAY = 2048, 128, 2, 1e-3, 0.01

Step = Callable[[int], float]
"""Trains on one batch and returns its loss."""

OURS: dict[str, dict[str, Any]] = {
    "zero2_cpu": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_cpu": {"stage": 3, "offload_optimizer": "cpu"},
    "zero3, optimizer in files": {"stage": 3, "offload_optimizer": "nvme"},
    "zero3_infinity": {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme"},
}

_FITTED = {"buffer_size": 1_200_000, "buffer_count": 30}
"""Parameter buffers of about the largest weight; by default they are 5 of 400 MB. With
max_in_cpu=0, which would keep parameters out of memory, DeepSpeed 0.19.8 ends here with an
assertion."""

THEIRS: dict[str, dict[str, Any]] = {
    "ZeRO-Offload, stage 2": {"stage": 2, "optimizer": "cpu"},
    "ZeRO-Offload, stage 3": {"stage": 3, "optimizer": "cpu"},
    "ZeRO-Infinity, optimizer": {"stage": 3, "optimizer": "nvme"},
    "ZeRO-Infinity, optimizer, small groups": {
        "stage": 3, "optimizer": "nvme", "sub_group_size": 2_000_000,
    },
    "ZeRO-Infinity": {"stage": 3, "optimizer": "nvme", "params": {}},
    "ZeRO-Infinity, fitted buffers": {
        "stage": 3, "optimizer": "nvme", "params": _FITTED, "sub_group_size": 2_000_000,
    },
}  # fmt: skip


def batch(step: int) -> Any:
    import torch

    seed = 1000 * (step % 4) + int(os.environ["RANK"])  # few batches, so that the loss falls
    return torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def our_step(name: str, path: str) -> Step:
    import torch
    import torch.distributed as dist
    from step_contenders import llama

    from shardplug import ZeroConfig, ZeroEngine

    dist.init_process_group("gloo")
    fields = OURS[name]
    in_files = "nvme" in fields.values()
    engine = ZeroEngine(ZeroConfig(**fields, nvme_path=path if in_files else None))
    model = engine.shard(llama())
    optimizer = engine.prepare_optimizer(
        torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)
    )

    def step(index: int) -> float:
        tokens = batch(index)
        with engine.micro_step():
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def their_step(name: str, path: str) -> Step:
    import deepspeed
    from step_contenders import llama

    deepspeed.init_distributed(dist_backend="gloo")
    fields = THEIRS[name]
    files = {"device": "nvme", "nvme_path": path, "pin_memory": False}
    zero: dict[str, Any] = {
        "stage": fields["stage"],
        "offload_optimizer": {"device": "cpu", "pin_memory": False}
        if fields["optimizer"] == "cpu"
        else {**files, "buffer_count": 4},
    }
    if "sub_group_size" in fields:
        zero["sub_group_size"] = fields["sub_group_size"]
    if "params" in fields:
        zero["offload_param"] = {**files, **fields["params"]}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": False},
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "aio": {
            "block_size": 2**20, "queue_depth": 8, "intra_op_parallelism": 1,
            "single_submit": False, "overlap_events": True,
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": DECAY},
        },
    }  # fmt: skip
    model = under_init(deepspeed, config) if "params" in fields else llama()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )

    def step(index: int) -> float:
        tokens = batch(index)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def under_init(deepspeed: Any, config: dict[str, Any]) -> Any:
    """Build the model in parts, with the weights that it has when it is built whole."""
    from step_contenders import llama

    values = {name: value.detach() for name, value in llama().named_parameters()}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = llama()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if os.environ["RANK"] == "0":
                parameter.data.copy_(values[name])
    return model


def worker(name: str, path: str) -> None:
    """Step when the parent says so."""
    turns = Turns()
    step = (our_step if name in OURS else their_step)(name, path)
    for index in turns:
        turns.loss(step(index))


if __name__ == "__main__":
    worker(*sys.argv[1:])
