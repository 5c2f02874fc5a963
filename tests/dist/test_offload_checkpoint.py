"""Checkpoints from any tier to any tier, and what `optimizer.state` is when it is elsewhere."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor

from shardplug import OptimizerError, ZeroEngine
from tests.dist.test_offload import (
    OPTIMIZERS,
    Flat,
    config,
    run,
    same_state,
    same_weights,
    train,
    use_small_blocks,
)
from tests.support.pool import RankPool

TIERS = ("none", "cpu", "nvme", "infinity")


def fresh(tier: str, folder: str, name: str, stage: int = 3, seed: int = 9):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    engine = ZeroEngine(config(stage, tier, folder))
    if tier != "none":
        use_small_blocks(engine)
    model = engine.shard(Flat())
    return engine, model, engine.prepare_optimizer(OPTIMIZERS[name](model.parameters()))


def any_to_any(root: str) -> None:
    for name in ("adamw", "sgd"):
        expected = train(3, "none", None, name, flat=True, steps=6)
        for tier in TIERS:
            engine, model, optimizer = train(3, tier, root, name, flat=True, steps=3)
            in_background = name == "sgd"
            path = f"{root}/{name}-{tier}"
            engine.save(path, optimizers=[optimizer], async_save=in_background)
            run(engine, model, optimizer, range(3, 6))  # saving has changed nothing
            engine.wait_for_save()
            same_weights((engine, model), expected[:2])
        for before, after in itertools.product(TIERS, TIERS):
            engine, model, optimizer = fresh(after, root, name)
            engine.load(f"{root}/{name}-{before}", optimizers=[optimizer])
            run(engine, model, optimizer, range(3, 6))
            same_weights((engine, model), expected[:2])
            assert same_state(optimizer, expected[2])


def test_checkpoints_from_any_tier_to_any_tier(pool: RankPool, tmp_path: Path) -> None:
    pool.run(any_to_any, 2, str(tmp_path))
    left = [path for path in tmp_path.rglob("*.swap") if "small" not in path.parent.name]
    assert not left


def write_at(root: str) -> None:
    engine, _, optimizer = train(3, "nvme", root, "adamw", flat=True, steps=3)
    engine.save(f"{root}/two", optimizers=[optimizer])


def read_at(root: str) -> None:
    plain, ours = fresh("none", root, "adamw"), fresh("nvme", root, "adamw")
    for engine, _, optimizer in (plain, ours):
        engine.load(f"{root}/two", optimizers=[optimizer])
    same_weights(plain[:2], ours[:2])
    assert same_state(ours[2], plain[2])
    for engine, model, optimizer in (plain, ours):
        run(engine, model, optimizer, range(3, 5))
    same_weights(plain[:2], ours[:2])


def test_another_world_size_reads_it(pool: RankPool, tmp_path: Path) -> None:
    pool.run(write_at, 2, str(tmp_path))
    pool.run(read_at, 1, str(tmp_path))


def state_is_real(root: str) -> None:
    plain = train(3, "none", None, "adamw", flat=True, steps=2)
    for tier in TIERS[1:]:
        engine, model, optimizer = train(3, tier, root, "adamw", flat=True, steps=2)
        parameter = model.parts[-1]
        state = optimizer.state[parameter]
        assert parameter in optimizer.state
        assert len(optimizer.state) == len(list(model.parameters()))
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        assert isinstance(state["exp_avg"], DTensor) and state["exp_avg"].device.type == "cpu"
        assert float(state["exp_avg"].full_tensor().abs().max()) > 0
        # Torch's own way out and in again.
        saved = copy.deepcopy(optimizer.state_dict())
        assert len(saved["state"]) == len(list(model.parameters()))
        part = state["exp_avg"].to_local()
        assert float(part.view(-1)[1:].split(7)[0].abs().max()) > 0
        part.view(-1)[1:].split(7)[0].mul_(0)
        assert float(optimizer.state[parameter]["exp_avg"].to_local()[1:8].abs().max()) == 0
        assert float(optimizer.state[parameter]["exp_avg"].to_local()[8:].abs().max()) > 0
        state["exp_avg"].mul_(0)
        assert float(optimizer.state[parameter]["exp_avg"].full_tensor().abs().max()) == 0
        optimizer.load_state_dict(saved)
        assert same_state(optimizer, plain[2])
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        assert float(optimizer.state[parameter]["exp_avg"].full_tensor().abs().max()) == 0
        optimizer.load_state_dict(saved)
        assert same_state(optimizer, plain[2])
        run(engine, model, optimizer, range(2, 4))
        again = train(3, "none", None, "adamw", flat=True, steps=4)
        same_weights((engine, model), again[:2])
        del optimizer.state[parameter]
        assert parameter not in optimizer.state and not optimizer.state[parameter]
        with pytest.raises(OptimizerError, match="none of its groups"):
            optimizer.state[torch.zeros(3)]["exp_avg"] = torch.zeros(3)
        with pytest.raises(OptimizerError, match=r"this rank's shape .* got \(2, 2\)"):
            optimizer.state[parameter]["exp_avg"] = torch.zeros(2, 2)
        optimizer.state.clear()
        assert not optimizer.state


def test_state_is_real(pool: RankPool, tmp_path: Path) -> None:
    pool.run(state_is_real, 2, str(tmp_path))


def made_before(root: str) -> None:
    """State made before sharding moves into the tier."""
    results = []
    for tier in TIERS:
        torch.manual_seed(5)
        model = Flat()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model(torch.tensor(0.3)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        engine = ZeroEngine(config(3, tier, root))
        engine.shard(model)
        engine.prepare_optimizer(optimizer)
        run(engine, model, optimizer, range(2))
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 2.5e-3
        results.append((engine, model, optimizer))
    for ours in results[1:]:
        same_weights(ours[:2], results[0][:2])
        assert same_state(ours[2], results[0][2])


def test_state_and_schedulers_made_before_sharding(pool: RankPool, tmp_path: Path) -> None:
    pool.run(made_before, 2, str(tmp_path))


def unused(root: str) -> None:
    """Parameters that get no gradient for a while, groups that come later, kept zero gradients."""
    for to_none in (True, False):
        results = []
        for tier in TIERS:
            torch.manual_seed(5)
            engine = ZeroEngine(config(3, tier, root))
            model = engine.shard(Flat())
            first, *others = model.parts
            for part in others:
                part.requires_grad_(False)
            optimizer = engine.prepare_optimizer(
                torch.optim.AdamW([first, model.scale], lr=1e-2, weight_decay=0.3)
            )
            for step in range(6):
                if step == 2:
                    for part in others:
                        part.requires_grad_(True)
                    optimizer.add_param_group({"params": others, "lr": 5e-2})
                if step == 4:
                    first.requires_grad_(False)
                with engine.micro_step():
                    model(torch.tensor(0.2 * step + engine.rank)).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=to_none)
            results.append((engine, model, optimizer))
        for ours in results[1:]:
            same_weights(ours[:2], results[0][:2])
            assert same_state(ours[2], results[0][2])


def test_parameters_that_come_and_go(pool: RankPool, tmp_path: Path) -> None:
    pool.run(unused, 2, str(tmp_path))


def with_closure(root: str, tier: str) -> tuple[ZeroEngine, torch.nn.Module]:
    torch.manual_seed(5)
    engine = ZeroEngine(config(2, tier, root))
    model = engine.shard(Flat())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor(0.5 + engine.rank))
        loss.backward()
        calls.append("closure")
        return loss

    for _ in range(2):
        assert float(optimizer.step(closure)) != 0  # type: ignore[arg-type]
    assert calls == ["before", "closure", "after"] * 2
    return engine, model


def hooks_and_closures(root: str) -> None:
    plain = with_closure(root, "none")
    for tier in ("cpu", "nvme"):
        same_weights(with_closure(root, tier), plain)


def test_hooks_and_closures(pool: RankPool, tmp_path: Path) -> None:
    pool.run(hooks_and_closures, 2, str(tmp_path))


def refusals(root: str) -> None:
    engine = ZeroEngine(config(2, "cpu", root))
    model = engine.shard(Flat())
    for optimizer in (
        torch.optim.Adafactor(model.parameters()),
        torch.optim.LBFGS(model.parameters()),
        torch.optim.SparseAdam(model.parameters()),
    ):
        with pytest.raises(OptimizerError, match=f"got {type(optimizer).__name__}"):
            engine.prepare_optimizer(optimizer)

    class Own(torch.optim.AdamW):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            return super().step(closure)

    with pytest.raises(OptimizerError, match="got Own"):
        engine.prepare_optimizer(Own(model.parameters()))
    optimizer = torch.optim.AdamW(model.parameters())
    old_step = optimizer.step
    engine.prepare_optimizer(optimizer)
    with engine.micro_step():
        model(torch.tensor(0.5)).backward()
    with pytest.raises(OptimizerError, match="Look `step` up again"):
        old_step()
    wrapped = torch.optim.AdamW(model.parameters())
    wrapped.step = lambda: None  # type: ignore[method-assign,assignment]
    with pytest.raises(OptimizerError, match="before wrapping it"):
        engine.prepare_optimizer(wrapped)


def test_what_cannot_be_streamed_is_named(pool: RankPool, tmp_path: Path) -> None:
    pool.run(refusals, 2, str(tmp_path))
