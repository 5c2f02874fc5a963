"""A sharded model that is converted is refused by name, wherever its state is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ModelError
from tests.support.models import TinyLM, lm_loss, tokens
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool

CONVERSIONS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "half": (lambda model: model.half(), "torch.float16 on cpu, not torch.float32 on cpu"),
    "bfloat16": (lambda model: model.bfloat16(), "torch.bfloat16 on cpu"),
    "dtype": (lambda model: model.to(torch.float64), "torch.float64 on cpu"),
    "device": (lambda model: model.to("meta"), "torch.float32 on meta"),
    "part": (lambda model: model.head.half(), "head.weight as it was sharded"),  # type: ignore[operator, union-attr]
}
HARMLESS: dict[str, Callable[[nn.Module], object]] = {
    "device": lambda model: model.to("cpu"),
    "dtype": lambda model: model.to(torch.float32),
    "float": lambda model: model.float(),
    "there and back": lambda model: model.double().float(),
}


class _Run:
    """An engine, a model and an optimizer, which nobody else keeps."""

    def __init__(self, **options: Any) -> None:
        self.engine = ZeroEngine(ZeroConfig(**options))
        self.model = self.engine.shard(TinyLM())
        self.optimizer = self.engine.prepare_optimizer(torch.optim.AdamW(self.model.parameters()))

    def step(self, number: int) -> None:
        batch = tokens(number, 0, self.engine.rank)
        with self.engine.micro_step():
            lm_loss(self.model(batch), batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _converted(options: dict[str, Any]) -> int:
    refused = 0
    for convert, text in CONVERSIONS.values():
        for evaluate in (False, True):
            run = _Run(**options)
            run.step(0)
            convert(run.model)
            with raises_everywhere(ModelError, text, "before it is sharded", "param_dtype"):
                with torch.set_grad_enabled(not evaluate):
                    run.model(tokens(1, 0, run.engine.rank))
            refused += 1
    for harmless in HARMLESS.values():
        run = _Run(**options)
        run.step(0)
        harmless(run.model)
        run.step(1)
    return refused


@pytest.mark.parametrize(
    "options",
    ({"stage": 1}, {"stage": 3}, {"stage": 2, "replicate_size": 2}),
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_a_converted_model_is_refused(pool: RankPool, options: dict[str, Any]) -> None:
    assert pool.run(_converted, 2, options) == [2 * len(CONVERSIONS)] * 2


def _converted_in_files(folder: Path) -> None:
    options = {"offload_optimizer": "nvme", "offload_params": "nvme", "nvme_path": folder}
    run = _Run(**options)
    run.step(0)
    run.model.to("cpu").float()
    run.step(1)
    with raises_everywhere(ModelError, "to rest in a tier", "before it is sharded"):
        run.model.half()


def test_parameters_in_files(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_converted_in_files, 2, tmp_path)
