"""Every class of torch.optim with every implementation and option, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardplug import OptimizerError, ZeroConfig, ZeroEngine
from tests.dist.test_own_optimizers import Model, loss_of
from tests.support.parity import assert_close, raises_everywhere, whole
from tests.support.pool import RankPool

STEPS = 2
optim = torch.optim
VARIANTS: dict[type[optim.Optimizer], tuple[dict[str, Any], ...]] = {
    optim.SGD: ({}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.1}),
    optim.Adam: ({}, {"amsgrad": True}, {"weight_decay": 0.1}),
    optim.AdamW: ({}, {"amsgrad": True}),
    optim.Adagrad: ({}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    optim.Adadelta: ({},),
    optim.Adamax: ({},),
    optim.ASGD: ({"t0": 1},),
    optim.NAdam: ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    optim.RAdam: ({}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    optim.RMSprop: ({}, {"momentum": 0.9, "centered": True}),
    optim.Rprop: ({},),
}
HOW: tuple[dict[str, Any], ...] = (
    {},
    {"foreach": True},
    {"foreach": False},
    {"maximize": True},
    {"fused": True},
    {"fused": True, "maximize": True},
    {"lr": torch.tensor(1e-2)},
    {"capturable": True},
)


def steps(model: Any, optimizer: Any, engine: ZeroEngine | None, ranks: int) -> None:
    for step in range(STEPS):
        if engine is None:
            for rank in range(ranks):
                (loss_of(model, step, rank) / ranks).backward()
        else:
            with engine.micro_step():
                loss_of(model, step, engine.rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def compare(kind: type[optim.Optimizer], options: dict[str, Any], stage: int, noise: float) -> str:
    """Train both ways; return "equal", or what one process raises, which the ranks raise too."""

    def make(model: Any) -> Any:
        more: dict[str, Any] = {"lr": 1e-2, **options}
        more["lr"] = more["lr"].clone() if isinstance(more["lr"], torch.Tensor) else more["lr"]
        return kind(model.parameters(), **more)

    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    torch.manual_seed(3)
    alone = Model()
    torch.manual_seed(3)
    model = engine.shard(Model())
    try:
        theirs = make(alone)
        steps(alone, theirs, None, engine.world_size)
    except (AssertionError, RuntimeError, ValueError, TypeError) as error:
        with raises_everywhere(type(error), str(error)[:20]):
            steps(model, engine.prepare_optimizer(make(model)), engine, engine.world_size)
        return type(error).__name__
    ours = engine.prepare_optimizer(make(model))
    steps(model, ours, engine, engine.world_size)
    found = engine.full_state_dict(model, rank0_only=False)
    assert assert_close(found, alone.state_dict(), noise) == 5
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert len(ours.state) == len(theirs.state)
    for parameter, state in ours.state.items():
        expected = theirs.state[alone.get_parameter(names[parameter])]
        assert set(state) == set(expected)
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.allclose(whole(state[key]), value, rtol=noise, atol=noise), key
            else:
                assert state[key] == value
    return "equal"


def run_all(stage: int) -> dict[str, str]:
    found = {}
    for kind, variants in VARIANTS.items():
        takes = kind.__init__.__code__.co_varnames  # type: ignore[misc]
        # Each variant and each way at least once; not every pair of them.
        for options in ({**variants[i % len(variants)], **how} for i, how in enumerate(HOW)):
            if all(name in takes for name in options) and (stage == 3 or "fused" in options):
                noise = 1e-6 if options.get("fused") else 0.0
                case = f"{kind.__name__} {options}"
                try:
                    found[case] = compare(kind, options, stage, noise)
                except Exception as error:
                    raise AssertionError(f"stage {stage}, {case}: {error}") from error
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    model = engine.shard(Model())
    with raises_everywhere(OptimizerError, "got Adam with differentiable=True", "Leave"):
        engine.prepare_optimizer(optim.Adam(model.parameters(), differentiable=True))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_implementations_and_options_equal_one_process(pool: RankPool, stage: int) -> None:
    found = pool.run(run_all, 2, stage)[0]
    equal = [case for case, outcome in found.items() if outcome == "equal"]
    assert len(equal) >= (60 if stage == 3 else 8), found
    assert sum("'fused': True" in case for case in equal) == 8
    # What one process raises: graphs are captured on accelerators only, and so on.
    assert all("capturable" in c or "lr" in c for c in set(found) - set(equal)), found
