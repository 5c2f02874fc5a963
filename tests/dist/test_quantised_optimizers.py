"""torchao's optimizers with state in 8 and 4 bits, and what bitsandbytes and torchao quantise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardplug import CheckpointError, ModelError, OptimizerError, ZeroConfig, ZeroEngine
from shardplug.core._torch.tensors import local_tensor
from tests.support.parity import assert_close, raises_everywhere
from tests.support.pool import RankPool

ROWS = {
    "torchao's AdamW8bit": ("equal", "refused"),
    "torchao's AdamW4bit": ("equal", "refused"),
    "torchao's AdamWFp8": ("equal", "refused"),
    "bitsandbytes' AdamW8bit": ("refused", "refused"),
}
"""Rows of the guide's table that are run here, as in `tests.dist.test_optimizer_table`."""

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
STEPS = 3


class Blocks(nn.Module):
    """Matrices of `width` x 64 and 64 x `width`; of width 256 they are whole blocks on two ranks.

    torchao quantises tensors of 4,096 values and more that are a number of blocks of 256 (128 in 4
    bits): the matrices, not the biases, and not the head.
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(64, width)
        self.down = nn.Linear(width, 64)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, 64]; returns [b, 3]."""
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x)))))


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(100 * step + part)
    x, y = torch.randn(4, 64, generator=chance), torch.randn(4, 3, generator=chance)
    return nn.functional.mse_loss(model(x), y)


def make(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    import torchao.optim

    # torchao compiles its step; what it computes is the same without, and needs no compiler.
    torch.compiler.set_stance("force_eager")
    optimizer: torch.optim.Optimizer = getattr(torchao.optim, kind)(
        list(model.parameters()), lr=torch.tensor(1e-2)
    )
    return optimizer


def train(
    engine: ZeroEngine, model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int
) -> dict[str, Any]:
    for step in range(first, last):
        with engine.micro_step():
            loss_of(model, step, engine.rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(engine.full_state_dict(model, rank0_only=False))


def alone(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Any]:
    for step in range(STEPS):
        for part in range(2):
            (loss_of(model, step, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def quantised_in(optimizer: torch.optim.Optimizer) -> int:
    values = (v for state in optimizer.state.values() for v in state.values())
    return sum(hasattr(local_tensor(v), "__tensor_flatten__") for v in values)


def start(kind: str, stage: int, width: int = 256, seed: int = 7) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = engine.shard(Blocks(width))
    return engine, model, engine.prepare_optimizer(make(kind, model))


def equal_and_resumed(stage: int, folder: str) -> dict[str, int]:
    held = {}
    for kind in KINDS:
        torch.manual_seed(7)
        whole = Blocks()
        expected = copy.deepcopy(alone(make(kind, whole), whole))
        engine, model, optimizer = start(kind, stage)
        assert assert_close(train(engine, model, optimizer, 0, STEPS), expected, 0.0) == 6
        assert quantised_in(optimizer) == 4  # two values for each of two matrices
        held[kind] = engine.memory()["optimizer_state"]

        engine.save(f"{folder}/{kind}", optimizers=[optimizer])
        on = train(engine, model, optimizer, STEPS, STEPS + 2)
        again, other, fresh = start(kind, stage, seed=8)
        again.load(f"{folder}/{kind}", optimizers=[fresh])
        assert quantised_in(fresh) == 4
        assert assert_close(train(again, other, fresh, STEPS, STEPS + 2), on, 0.0) == 6
        assert again.memory()["optimizer_state"] == held[kind]
        with raises_everywhere(OptimizerError, f"got {kind}", "Use "):
            torch.manual_seed(7)
            offloaded = ZeroEngine(ZeroConfig(stage=3, offload_optimizer="cpu"))
            offloaded.prepare_optimizer(make(kind, offloaded.shard(Blocks())))
    return held


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_state_in_8_and_4_bits_is_that_of_one_process(
    pool: RankPool, tmp_path: Path, stage: int
) -> None:
    """Weights to the last bit, the bytes that are claimed, and a resume that changes nothing."""
    pytest.importorskip("torchao")
    held = pool.run(equal_and_resumed, 2, stage, str(tmp_path))[0]
    values = 2 * 2 * 256 * 64 // 2  # of both moments in the two matrices, on one of two ranks
    for kind, bits, block in (("AdamW8bit", 8, 256), ("AdamW4bit", 4, 128), ("AdamWFp8", 8, 256)):
        codes = values * bits // 8 + 4 * values // block
        # Beside them tables of up to 256 values, and what is too small in fp32.
        assert codes < held[kind] < codes + 4 * 4 * 256 + 6000, (kind, held[kind], codes)


def not_whole_blocks(folder: str) -> None:
    torch.manual_seed(7)
    whole = Blocks(260)
    plain = torch.optim.AdamW(whole.parameters(), lr=1e-2, weight_decay=1e-2)
    expected = alone(plain, whole)
    engine, model, optimizer = start("AdamW8bit", 3, width=260)
    assert assert_close(train(engine, model, optimizer, 0, STEPS), expected, 1e-5) == 6
    assert quantised_in(optimizer) == 0
    del engine, model
    engine, model, optimizer = start("AdamW8bit", 3)
    train(engine, model, optimizer, 0, 1)
    engine.save(f"{folder}/whole", optimizers=[optimizer])


def on_three(folder: str) -> None:
    """Blocks of 256 values do not begin where the rows of the second of three ranks do."""
    engine, _, optimizer = start("AdamW8bit", 3)
    with raises_everywhere(CheckpointError, "block boundary"):
        engine.load(f"{folder}/whole", optimizers=[optimizer])


def test_rows_that_are_no_whole_blocks(pool: RankPool, tmp_path: Path) -> None:
    """Their state stays in fp32, and a checkpoint that would cut blocks is refused."""
    pytest.importorskip("torchao")
    pool.run(not_whole_blocks, 2, str(tmp_path))
    pool.run(on_three, 3, str(tmp_path))


def stances(width: int) -> list[str]:
    """The stance of torch.compile in a step of each of two ranks, beginning with the default."""
    seen: list[str] = []

    class Steps(torch.optim.AdamW):
        __module__ = "torchao.optim.stand_in"

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            eager = torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")
            seen.append("compiled" if eager() else "as it is")

    torch.compiler.set_stance("default")
    torch.manual_seed(7)
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(nn.Linear(64, width))
    optimizer = engine.prepare_optimizer(Steps(model.parameters()))
    with engine.micro_step():
        model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return seen[-1:]  # before it stands that of the plan, on rank 0


def test_a_step_that_compiles_itself_does_not_where_rows_are_uneven(pool: RankPool) -> None:
    """torch's cache of compiled code would give a rank the code of another number of rows."""
    assert pool.run(stances, 2, 4) == [["compiled"]] * 2
    assert pool.run(stances, 2, 5) == [["as it is"]] * 2


class Foreign(torch.optim.Optimizer):
    """Stands for a class that is not installed."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("Expected to be refused before a step.")


def refused() -> None:
    cases = {
        "bitsandbytes.optim.adamw": ("AdamW8bit", "torchao.optim"),
        "torchao.optim.cpu_offload": ("CPUOffloadOptimizer", "offload_optimizer"),
    }
    for module, (name, advice) in cases.items():
        members = {"step": Foreign.step, "__module__": module}
        kind = type(name, (Foreign,), members)
        engine = ZeroEngine(ZeroConfig(stage=3))
        model = engine.shard(nn.Linear(4, 4))
        with raises_everywhere(OptimizerError, f"got {name} of {module}", advice):
            engine.prepare_optimizer(kind(model.parameters()))
    packed = type("Int8Tensor", (torch.Tensor,), {"__module__": "torchao.quantization"})
    model = nn.Linear(4, 4)
    weight: Any = torch.zeros(4, 4).as_subclass(packed)
    model._parameters["weight"] = weight  # where torchao puts them too
    with raises_everywhere(ModelError, "Int8Tensor", "quantised"):
        ZeroEngine(ZeroConfig(stage=3)).shard(model)


def test_what_cannot_be_sharded_is_refused_by_name(pool: RankPool) -> None:
    """Stand-ins of the names of bitsandbytes and torchao; the next test has the real ones."""
    pool.run(refused, 2)


def real_bitsandbytes() -> None:
    import bitsandbytes

    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(nn.Linear(4, 4))
    with raises_everywhere(OptimizerError, "got AdamW8bit of bitsandbytes", "torchao.optim"):
        engine.prepare_optimizer(bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3))
    for name in ("Linear4bit", "Linear8bitLt"):
        with raises_everywhere(ModelError, "weight", "quantised"):
            ZeroEngine(ZeroConfig(stage=3)).shard(getattr(bitsandbytes.nn, name)(64, 64))


def test_bitsandbytes_itself_is_refused_by_name(pool: RankPool) -> None:
    pytest.importorskip("bitsandbytes")
    pool.run(real_bitsandbytes, 2)


def real_torchao() -> None:
    import torchao.quantization as quantization

    model = nn.Sequential(nn.Linear(64, 64))
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    with raises_everywhere(ModelError, "0.weight", "Int8Tensor"):
        ZeroEngine(ZeroConfig(stage=3)).shard(model)


def test_weights_that_torchao_quantised_are_refused_by_name(pool: RankPool) -> None:
    pytest.importorskip("torchao")
    pool.run(real_torchao, 2)
