"""Writes to parameters while they are gathered, and whole tensors put into shards."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ConfigError, ModelError, OptimizerError, ScheduleError
from tests.support.parity import assert_same_weights, raises_everywhere
from tests.support.pool import RankPool

CLOSE = 1e-6


class Block(nn.Module):
    def __init__(self, rows: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(5, rows)
        self.down = nn.Linear(rows, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Model(nn.Module):
    """Has parameters with uneven and with no rows on a rank, a tied one, a scalar, a teacher."""

    def __init__(self, *, writes: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([Block(), Block(1), Block()])
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.out = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.teacher = Block().requires_grad_(False)
        self.writes = writes

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.out.weight.data.clamp_(-0.1, 0.1)
            with torch.no_grad():
                self.scale.mul_(0.9)
        x = self.embed(indices)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            target = self.teacher(x)
        logits: torch.Tensor = self.out(self.head(x)) * self.scale + target[..., :3]
        return logits


def _write_in_hooks(model: Model) -> None:
    def renew(block: Any, *_: Any) -> None:
        block.up.weight.data.mul_(0.5)  # as momentum teachers do
        block.up.bias.data = torch.arange(5.0, dtype=block.up.bias.dtype) / 5

    def add(block: Any, *_: Any) -> None:
        with torch.no_grad():
            block.down.weight.add_(0.01)

    model.teacher.register_forward_hook(renew)
    model.blocks[1].register_forward_pre_hook(add)


def _batch(step: int, micro: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 7, (4,), generator=generator)


def _loss(model: nn.Module, step: int, micro: int, rank: int, accumulate: int) -> torch.Tensor:
    loss: torch.Tensor = model(_batch(step, micro, rank)).square().mean() / accumulate
    return loss


class Pair:
    """A sharded model and the same one in one process."""

    def __init__(self, model: Model, optimizer: Any = torch.optim.SGD, **config: Any) -> None:
        self.model = model
        self.reference = copy.deepcopy(model)
        self.engine = ZeroEngine(ZeroConfig(**config))
        self.engine.shard(model)
        options = {"lr": 1e-2, "momentum": 0.9}
        self.ours = self.engine.prepare_optimizer(optimizer(model.parameters(), **options))
        self.theirs = optimizer(self.reference.parameters(), **options)

    def micro(self, step: int, micro: int, accumulate: int, *, same_batch: bool = False) -> None:
        world = 1 if same_batch else dist.get_world_size()
        with self.engine.micro_step(last=micro == accumulate - 1):
            rank = 0 if same_batch else self.engine.rank
            _loss(self.model, step, micro, rank, accumulate).backward()
        for rank in range(world):
            (_loss(self.reference, step, micro, rank, accumulate) / world).backward()

    def step(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()

    def compare(self, tolerance: float = CLOSE) -> None:
        assert_same_weights(self.engine, self.model, self.reference, tolerance)


def _tiers(stage: int, folder: str) -> list[dict[str, Any]]:
    nvme = {"nvme_path": folder, "offload_optimizer": "nvme"}
    kinds: list[dict[str, Any]] = [{}, {"offload_optimizer": "cpu"}, nvme]
    return kinds if stage < 3 else [*kinds, {**nvme, "offload_params": "nvme"}]


# ------------------------------------------------------------------ writes in the computation


def _kept() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for stage in (1, 2, 3):
            for tier in _tiers(stage, folder):
                torch.manual_seed(stage)
                pair = Pair(Model(writes=True), stage=stage, **tier)
                _write_in_hooks(pair.model)
                _write_in_hooks(pair.reference)
                teacher = pair.reference.teacher.up.weight.clone()
                for step in range(2):
                    for micro in range(2):  # one batch for all: forwards write once per call
                        pair.micro(step, micro, 2, same_batch=True)
                    pair.step()
                pair.compare()
                assert not torch.equal(pair.reference.teacher.up.weight, teacher)


def _kept_in_bf16(folder: str) -> None:
    """Elements that are written to get the written value; the others keep their fp32 bits."""
    for config in (
        {"stage": 1},
        {"stage": 3},
        {"stage": 3, "offload_params": "nvme", "offload_optimizer": "nvme", "nvme_path": folder},
    ):
        torch.manual_seed(1)
        model = Model()
        before = {name: p.detach().clone() for name, p in model.state_dict().items()}
        engine = ZeroEngine(ZeroConfig(param_dtype="bf16", **config))  # type: ignore[arg-type]
        engine.shard(model)

        def clamp(module: Any, *_: Any) -> None:
            module.weight.data.clamp_(-0.25, 0.25)

        model.out.register_forward_pre_hook(clamp)
        with torch.no_grad():
            model(_batch(0, 0, engine.rank))
        after = engine.full_state_dict(rank0_only=False)
        kept = before["out.weight"].bfloat16().abs() <= 0.25
        assert 0 < kept.sum() < kept.numel()
        expected = before["out.weight"].clamp(-0.25, 0.25).where(~kept, before["out.weight"])
        assert torch.equal(after.pop("out.weight"), expected)
        assert len(after) > 10 and all(torch.equal(after[name], before[name]) for name in after)


def _max_norm() -> None:
    """Each rank's batch uses other rows than the ones that it keeps."""
    for stage in (1, 3):
        torch.manual_seed(3)
        model = Model()
        model.embed = nn.Embedding(7, 5, max_norm=0.5)
        model.head.weight = model.embed.weight
        pair = Pair(model, stage=stage)
        for step in range(3):
            for micro in range(2):
                with pair.engine.micro_step(last=micro == 1):
                    _loss(model, step, micro, pair.engine.rank, 2).backward()
                batch = torch.cat([_batch(step, micro, rank) for rank in range(2)])
                (pair.reference(batch).square().mean() / 2).backward()
            pair.compare()
            assert pair.reference.embed.weight.norm(dim=1).min() <= 0.5 + CLOSE
            pair.step()
        with pair.engine.gathered():  # exchanges nothing, and may run on one rank only
            if pair.engine.rank == 1:
                model(_batch(0, 0, 1))
        pair.compare()


class Averaged(torch.optim.SGD):
    """Shows other weights between eval() and train(), as schedule-free optimizers do."""

    def eval(self) -> None:
        self._scale(2.0)

    def train(self) -> None:
        self._scale(0.5)

    @torch.no_grad()
    def _scale(self, factor: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(factor)


def _changed_shards() -> None:
    """Shards that change while copies of them are gathered are not overwritten."""
    for stage in (1, 2, 3):
        torch.manual_seed(4)
        pair = Pair(Model(), optimizer=Averaged, stage=stage)
        captured = [p for group in pair.ours.param_groups for p in group["params"]]
        references = [p for group in pair.theirs.param_groups for p in group["params"]]
        for step in range(2):
            pair.micro(step, 0, 2)
            pair.ours.eval()
            pair.theirs.eval()
            with torch.no_grad():
                batch = _batch(9, 0, pair.engine.rank)
                torch.testing.assert_close(pair.model(batch), pair.reference(batch))
            pair.ours.train()
            pair.theirs.train()
            pair.micro(step, 1, 2)
            pair.step()
            pair.compare()
        pair.micro(2, 0, 2)
        for parameter in (*captured, *references):  # by a reference from before, mid-window
            parameter.data.mul_(1.5)
        with torch.no_grad():
            torch.testing.assert_close(pair.model(batch), pair.reference(batch))
        pair.compare()
        pair.engine.reset()


def _refused() -> None:
    for stage in (1, 3):
        _refused_at(stage)


def _refused_at(stage: int) -> None:
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=stage))
    engine.shard(model)

    def call(write: Any) -> None:
        handle = model.out.register_forward_pre_hook(lambda module, _: write(module))
        try:
            with torch.no_grad():
                model(_batch(0, 0, engine.rank))
        finally:
            handle.remove()
            engine.reset()

    def replace(module: Any) -> None:
        module.weight = nn.Parameter(torch.ones(3, 7))

    def resize(module: Any) -> None:
        module.bias.data = torch.ones(4)

    def change_both(module: Any) -> None:
        module.bias.data.add_(1)
        resting.data.add_(2)

    resting = model.out.bias
    before = engine.full_state_dict(rank0_only=False)
    with raises_everywhere(ModelError, "out.weight", "replaced", "modify=True"):
        call(replace)
    with raises_everywhere((ModelError, RuntimeError)):  # torch may notice it first
        call(resize)
    after = engine.full_state_dict(rank0_only=False)
    assert before and all(torch.equal(after[name], before[name]) for name in before)
    if stage == 1:
        with raises_everywhere(ModelError, "out.bias", "shard was changed"):
            call(change_both)
    with raises_everywhere(ModelError, "out.bias", "modify=True"), engine.gathered(model.out):
        if engine.rank == 1:
            model.out.bias.data[0] = 3.0
    assert not (engine.full_state_dict(rank0_only=False)["out.bias"] == 3.0).any()
    with torch.no_grad():
        model(_batch(0, 0, engine.rank))  # goes on


def _refused_in_a_reset() -> None:
    """All is at rest after it, though several writes cannot be kept."""
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=1))
    engine.shard(model)

    def replace(module: Any, _: Any) -> None:
        module.weight = nn.Parameter(torch.ones_like(module.weight))
        if module is model.out:
            raise KeyError("out")

    handles = [m.register_forward_pre_hook(replace) for m in (model.blocks[0].up, model.out)]
    with raises_everywhere(KeyError, "out"):
        model(_batch(0, 0, engine.rank))
    for handle in handles:
        handle.remove()
    with raises_everywhere(ModelError, "blocks.0.up.weight", "out.weight", "modify=True"):
        engine.reset()
    with engine.micro_step():
        _loss(model, 0, 0, engine.rank, 1).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def _all_writes(folder: str) -> None:
    _kept_in_bf16(folder)
    _max_norm()
    _changed_shards()
    _refused()
    _refused_in_a_reset()


def test_writes_to_gathered_parameters_are_kept(pool: RankPool) -> None:
    pool.run(_kept, 2)


def test_writes_keep_precision_and_do_not_overwrite_changed_shards(
    pool: RankPool, tmp_path: Any
) -> None:
    pool.run(_all_writes, 2, str(tmp_path))


# ------------------------------------------------------------------ on purpose


def _momentum(model: Model) -> None:
    for ours, theirs in zip(model.teacher.parameters(), model.blocks[0].parameters(), strict=True):
        ours.mul_(0.9).add_(theirs, alpha=0.1)


def _initialise(model: Model) -> None:
    nn.init.constant_(model.blocks[1].down.weight, 0.3)
    model.scale.fill_(0.7)


def _surgery(model: Model) -> None:
    model.blocks[2].load_state_dict(model.blocks[0].state_dict())
    model.out.bias.data = model.out.bias.data * 2


def _clip(model: Model) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.2, 0.2)


_CHANGES = (_momentum, _initialise, _surgery, _clip)


def _modified(folder: str) -> None:
    for stage in (1, 2, 3):
        for tier in _tiers(stage, folder):
            torch.manual_seed(5)
            pair = Pair(Model(), stage=stage, **tier)
            for step, change in enumerate(_CHANGES):
                for micro in range(2):
                    pair.micro(step, micro, 2)
                    with pair.engine.gathered(modify=True, src=1 if micro else None):
                        if not micro or pair.engine.rank == 1:
                            change(pair.model)
                    with torch.no_grad():
                        change(pair.reference)
                pair.compare()
                pair.step()
            pair.compare()


def _modified_in_bf16(folder: str) -> None:
    """The masters are changed in fp32, also where they rest in files."""
    for config in (
        {"stage": 2},
        {"stage": 3},
        {"stage": 3, "offload_params": "nvme", "offload_optimizer": "nvme", "nvme_path": folder},
    ):
        torch.manual_seed(6)
        model = Model()
        expected = copy.deepcopy(model)
        engine = ZeroEngine(ZeroConfig(param_dtype="bf16", **config))  # type: ignore[arg-type]
        engine.shard(model)
        batch = _batch(0, 0, 0)
        optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        model(batch).sum().backward()
        optimizer.step()  # there are low-precision copies now
        optimizer.zero_grad()
        for change in _CHANGES:
            with engine.gathered(modify=True):
                assert model.out.weight.dtype == torch.float32
                change(model)
            with torch.no_grad():
                change(expected)
        assert_same_weights(engine, model, expected, 0.0)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(
                model(batch).float(), expected(batch).float(), atol=0.03, rtol=0.03
            )


def _modify_fails() -> None:
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=3))
    engine.shard(model)
    before = engine.full_state_dict(rank0_only=False)

    def interrupt() -> None:
        with engine.gathered(modify=True):
            _initialise(model)
            if engine.rank == 0:
                raise KeyError("only here")

    kind: Any = KeyError if engine.rank == 0 else ScheduleError
    with raises_everywhere(kind, "only here"):
        interrupt()
    for change, name in (
        (lambda: setattr(model.out, "weight", nn.Parameter(torch.ones(2, 7))), "out.weight"),
        (lambda: setattr(model.out.bias, "data", torch.ones(3).double()), "out.bias"),
        (lambda: delattr(model.blocks[0].up, "bias"), "blocks.0.up.bias"),
    ):
        with (
            raises_everywhere(ModelError, name, "Nothing was changed"),
            engine.gathered(modify=True),
        ):
            _initialise(model)
            change()
    for arguments, error in (
        ({"modify": False, "src": 0}, ConfigError),
        ({"modify": True, "src": 7}, ConfigError),
        ({"modify": True, "src": engine.rank}, ConfigError),
    ):
        with raises_everywhere(error, "src"), engine.gathered(**arguments):  # type: ignore[arg-type]
            pass
    with (
        raises_everywhere(ScheduleError, "modify=True"),
        engine.gathered(model.blocks, modify=True),
    ):
        model(_batch(0, 0, 0))
    with raises_everywhere(ScheduleError, "within another"), engine.gathered():
        with engine.gathered(modify=True):
            pass
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with raises_everywhere(ScheduleError, "outside of gathered"), engine.gathered(modify=True):
        optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    assert before and all(torch.equal(after[name], before[name]) for name in before)


def _modified_over_replicas() -> None:
    """Replicas that write different values hold the same ones afterwards."""
    torch.manual_seed(8)
    pair = Pair(Model(writes=True), stage=3, replicate_size=2)
    with pair.engine.gathered(pair.model.out, modify=True):
        pair.model.out.weight.fill_(0.05 + (pair.engine.rank // 2))
        assert not isinstance(pair.model.out.weight, type(pair.model.blocks[0].up.weight))
    with torch.no_grad():
        pair.reference.out.weight.fill_(0.05)
    for micro in range(2):
        pair.micro(0, micro, 2, same_batch=True)
    pair.step()
    pair.compare()


def _all_modified(folder: str) -> None:
    _modified(folder)
    _modified_in_bf16(folder)
    _modify_fails()


def test_weights_are_changed_on_purpose(pool: RankPool, tmp_path: Any) -> None:
    pool.run(_all_modified, 2, str(tmp_path))


def test_weights_are_changed_on_purpose_over_replicas(pool: RankPool) -> None:
    pool.run(_modified_over_replicas, 4)


# ------------------------------------------------------------------ whole tensors from elsewhere


def _loaded(folder: str) -> None:
    for stage in (1, 2, 3):
        for tier in _tiers(stage, folder):
            torch.manual_seed(9)
            pair = Pair(Model(), stage=stage, **tier)
            model, reference = pair.model, pair.reference
            new = Model().state_dict()
            for state, assign in (
                (new, False),
                (Model().state_dict(), True),
                ({"out.bias": torch.ones(3).double(), "scale": torch.tensor(2.0)}, False),
                ({"teacher.up.bias": torch.ones(5)}, True),
            ):
                pair.micro(0, 0, 2)  # copies are gathered at stages 1 and 2
                found = model.load_state_dict(state, strict=len(state) > 2, assign=assign)
                expected = reference.load_state_dict(dict(state), strict=len(state) > 2)
                assert found == expected
                pair.compare()
                pair.micro(0, 1, 2)
                pair.step()
                pair.compare()
            model.blocks[0].load_state_dict(reference.blocks[2].state_dict())
            reference.blocks[0].load_state_dict(reference.blocks[2].state_dict())
            shards = {name: p.detach() * 0.5 for name, p in model.state_dict().items()}
            model.load_state_dict(shards, assign=tier == {})
            for parameter in reference.parameters():
                parameter.data = parameter.data * 0.5
            model.out.weight.data = torch.full((3, 7), 0.3)  # at rest
            reference.out.weight.data = torch.full((3, 7), 0.3)
            model.out.bias.data = model.out.bias.data + 1
            reference.out.bias.data = reference.out.bias.data + 1
            pair.micro(1, 0, 1)
            pair.step()
            pair.compare()
            for wrong in (torch.ones(2, 7), torch.ones(3, 7).double()):
                with raises_everywhere(ModelError, "out.weight", "(3, 7)"):
                    model.out.weight.data = wrong
            text = (
                r"Missing key.*scale(.|\n)*Unexpected key.*other(.|\n)*size mismatch for out.bias"
            )
            with pytest.raises(RuntimeError, match=text):
                model.load_state_dict({"out.bias": torch.ones(4), "other": torch.ones(1)})
    with raises_everywhere(ScheduleError, "load_state_dict"), pair.engine.gathered():
        model.load_state_dict(new)


def test_plain_state_dicts_are_loaded_into_shards(pool: RankPool, tmp_path: Any) -> None:
    pool.run(_loaded, 2, str(tmp_path))


# ------------------------------------------------------------------ parameters that come late


def _late() -> None:
    for stage in (1, 3):
        for place in ("new", "embed", "blocks.0.lora"):
            model = Model()
            engine = ZeroEngine(ZeroConfig(stage=stage))
            engine.shard(model)
            parent, _, name = place.rpartition(".")
            added: nn.Module = nn.Embedding(7, 5) if name == "embed" else nn.Linear(2, 2)
            setattr(model.get_submodule(parent), name, added)
            with raises_everywhere(ModelError, f"{place}.weight", "before the model is sharded"):
                model(_batch(0, 0, engine.rank))
            added.requires_grad_(False)
            for count in ((engine.rank == 0) * (name != "embed"), 0):  # listed once
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if name == "embed":
                        break  # its shards are gone from the model
                    model(_batch(0, 0, engine.rank)).sum().backward()
                listed = [str(w.message) for w in caught if f"{place}.weight" in str(w.message)]
                assert len(listed) == count
            with pytest.raises(OptimizerError):
                engine.prepare_optimizer(torch.optim.SGD(added.parameters(), lr=0.1))


def _untrained() -> None:
    model = Model()
    engine = ZeroEngine(ZeroConfig(stage=2))
    engine.shard(model)
    first = engine.prepare_optimizer(torch.optim.SGD(model.blocks.parameters(), lr=0.1))
    said: list[list[str]] = []
    for step in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.requires_grad_(step != 0)  # as loops with several optimizers do
            model.blocks.requires_grad_(True)
            model.teacher.requires_grad_(False)
            model.out.bias.requires_grad_(False)
            model(_batch(step, 0, engine.rank)).sum().backward()
            first.step()
            model.zero_grad()
        said.append([str(w.message) for w in caught if "No optimizer trains" in str(w.message)])
        if step == 0:  # prepared late
            engine.prepare_optimizer(torch.optim.SGD(model.embed.parameters(), lr=0.1))
    assert [len(one) for one in said] == [0, int(engine.rank == 0), 0, 0]
    if engine.rank == 0:
        assert "out.weight" in said[1][0] and "scale" in said[1][0]
        assert not any(name in said[1][0] for name in ("embed", "blocks", "teacher", "out.bias"))


def _late_and_untrained() -> None:
    _late()
    _untrained()


def test_late_and_untrained_parameters_are_named(pool: RankPool) -> None:
    pool.run(_late_and_untrained, 2)


def _written_at_rest(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3))
    engine = ZeroEngine(ZeroConfig(stage=stage))  # type: ignore[arg-type]
    engine.shard(model)
    table, weight = model[0].weight, model[1].weight
    before = weight.full_tensor()
    old = weight.data  # exchanged for other values, as averages of weights are, and put back
    weight.data = torch.zeros(3, 4)
    assert not weight.full_tensor().any() and torch.equal(old.full_tensor(), before)
    weight.data = old
    assert torch.equal(weight.full_tensor(), before)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: table[2:4].mul_(0.5),
        lambda: table.data[7].fill_(1.0),
        lambda: table.narrow(0, 1, 2).zero_(),
        lambda: nn.init.orthogonal_(weight),
        lambda: table.__setitem__(0, 0.0),
        lambda: table.index_add_(0, torch.tensor([1]), torch.ones(1, table.shape[1])),
        lambda: weight.fill_diagonal_(1.0),
        lambda: weight.add_(torch.randn_like(weight)),
        lambda: nn.functional.dropout(weight, 0.5),
        lambda: model[1].reset_parameters(),
    )
    for change in changes:
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"gathered\(part, modify=True"):
            change()
    assert torch.equal(weight.full_tensor(), before)
    with torch.no_grad():
        table.clamp_(-0.1, 0.1)
        nn.init.ones_(weight)
    assert table.full_tensor().abs().max() <= 0.1 and (weight.full_tensor() == 1).all()
    with engine.gathered(model, modify=True, src=0):
        nn.init.normal_(model[0].weight)
    assert not torch.equal(*table.full_tensor().chunk(2))


def _other_parts_on_each_rank() -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    before = engine.full_state_dict(rank0_only=False)
    with raises_everywhere(ScheduleError, "got 0 on rank 0, 1 on rank 1"):
        with engine.gathered(model[engine.rank], modify=True):
            model[engine.rank].weight.mul_(2)
    with raises_everywhere(ModelError, "Expected a module of a sharded model, got list"):
        with engine.gathered([model[0]], modify=True):  # type: ignore[arg-type]
            pass
    with raises_everywhere(ConfigError, "Expected src to be a rank"):
        with engine.gathered(model, modify=True, src=True):
            pass
    with raises_everywhere(ModelError, "was frozen or unfrozen"):
        with engine.gathered(model, modify=True):
            model[0].requires_grad_(False)
    now = engine.full_state_dict(rank0_only=False)
    assert before and all(torch.equal(value, now[name]) for name, value in before.items())
    with engine.gathered(model[1], modify=True):
        model[1].weight.mul_(2)
    now = engine.full_state_dict(rank0_only=False)
    assert torch.equal(now["1.weight"], 2 * before["1.weight"])


def test_parts_that_differ_between_ranks_are_refused(pool: RankPool) -> None:
    pool.run(_other_parts_on_each_rank, 2)


def _written_at_rest_in_stages() -> None:
    for stage in (1, 3):
        _written_at_rest(stage)


def test_writes_to_shards_count_or_are_refused(pool: RankPool) -> None:
    pool.run(_written_at_rest_in_stages, 2)
