"""Buffers that training changes: rank 0's count, on every rank, through every door."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import batch_norm, mse_loss
from torch.utils.data import DataLoader

from shardplug import ZeroConfig, ZeroEngine
from shardplug.errors import ScheduleError
from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.lightning.modules import pl, trainer
from tests.support.parity import raises_everywhere
from tests.support.pool import RankPool

STEPS = 8


class Counted(nn.Module):
    """Running statistics in each way that modules write them."""

    grown: torch.Tensor
    moments: torch.Tensor
    running_mean: torch.Tensor
    running_var: torch.Tensor
    scratch: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("running_mean", torch.zeros(6))  # written by a kernel, not counted
        self.register_buffer("running_var", torch.ones(6))
        self.average = Average()
        self.rows = Rows()
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 6) -> (b, 6)."""
        y: torch.Tensor = self.norm(torch.tanh(self.linear(x)))
        y = batch_norm(y, self.running_mean, self.running_var, training=self.training)
        if self.training:
            self.scratch.copy_(x.detach().sum().reshape(1))
        return self.rows(self.average(y))


class Average(nn.Module):
    """Replaces its buffers instead of writing into them."""

    moments: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("moments", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("full", torch.tensor([False]))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """y: (b, 6) -> (b, 6)."""
        if self.training:
            self.moments = 0.9 * self.moments + 0.1 * y.detach().double().mean(0)
            self.seen = self.seen + (y[:, 0] > 0).sum()
            self.full = y[:1, 0] > 0
        return y - self.moments.to(y.dtype)


class Rows(nn.Module):
    """A cache as long as the longest batch, which differs between ranks."""

    grown: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grown", torch.zeros(1))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        """y: (b, 6) -> (b, 6)."""
        if len(y) > len(self.grown):
            self.grown = torch.arange(len(y), dtype=y.dtype)
        return y


def build() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(Counted(), Counted(), nn.Linear(6, 1))


def batch(step: int, rank: int, micro: int = 0) -> torch.Tensor:
    """Of another distribution and size on each rank: (4 + rank, 6)."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randn(4 + rank, 6, generator=generator) * (1 + rank) + 2 * rank


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), x.sum(1, keepdim=True).cos())


def reference(world_size: int, accumulate: int, steps: int = STEPS) -> nn.Sequential:
    """One process: gradients over all ranks' batches, buffers by those of rank 0."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(steps):
        for micro in range(accumulate):
            for rank in reversed(range(world_size)):
                before = {name: value.clone() for name, value in model.named_buffers()}
                loss = loss_of(model, batch(step, rank, micro)) / world_size / accumulate
                loss.backward()
                if rank:
                    for name, value in before.items():
                        owner, _, own = name.rpartition(".")
                        setattr(model.get_submodule(owner), own, value)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def assert_as_reference(model: nn.Module, expected: nn.Module) -> None:
    """Compare an evaluation, then each buffer, without any exchange between the ranks."""
    model.eval()
    with torch.no_grad():
        found = loss_of(model, batch(500, 0))
        torch.testing.assert_close(found, loss_of(expected, batch(500, 0)), rtol=1e-4, atol=1e-6)
    compared = 0
    theirs = dict(expected.named_buffers())
    for name, value in model.named_buffers():
        if not name.endswith(("scratch", "grown")):
            wanted = theirs[name.removeprefix("net.")]
            torch.testing.assert_close(value, wanted, rtol=1e-4, atol=1e-5, msg=name)
            compared += 1
    assert compared == 16
    model.train()


def engine_trains(stage: int, accumulate: int) -> None:
    engine, model = ZeroEngine(ZeroConfig(stage=stage)), build()
    engine.shard(model)
    optimizer = engine.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.02))
    rank, world_size = engine.rank, engine.world_size
    for step in range(STEPS):
        for micro in range(accumulate):
            with engine.micro_step(last=micro == accumulate - 1):
                (loss_of(model, batch(step, rank, micro)) / accumulate).backward()
            # At rest all ranks hold the same, before any evaluation.
            assert_equal_on_all_ranks(model[0].norm.running_mean)
        optimizer.step()
        optimizer.zero_grad()
    assert_as_reference(model, reference(world_size, accumulate))
    # What is not in the state_dict, or has another shape on each rank, is each rank's own.
    assert model[0].scratch.item() == batch(STEPS - 1, rank, accumulate - 1).sum().item()
    assert torch.equal(model[0].rows.grown, torch.arange(4.0 + rank))
    recalibrates(engine, model)


def recalibrates(engine: ZeroEngine, model: nn.Module) -> None:
    """Statistics are taken anew without gradients, and evaluated, also with parameters held."""
    expected = build()
    expected.load_state_dict(
        {
            name: torch.zeros(1) if name.endswith("grown") else value
            for name, value in engine.full_state_dict(rank0_only=False).items()
        }
    )
    for hold in (False, True):
        with torch.no_grad():
            expected.train()(batch(700 + hold, 0))
            model.train()(batch(700 + hold, engine.rank))
        expected.eval()
        if hold:
            model.eval()
            with engine.gathered():
                for _ in range(1 + engine.rank):
                    assert_as_reference(model, expected)
        else:
            assert_as_reference(model, expected)


def assert_equal_on_all_ranks(value: torch.Tensor) -> None:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.detach().clone())
    assert value.abs().sum() > 0
    for other in values:
        assert torch.equal(other, value)


def two_graphs_at_once() -> None:
    """Buffers are sent between two backwards whose forwards came before both."""
    engine, model = ZeroEngine(ZeroConfig(stage=3)), build()
    engine.shard(model)
    first, second = (loss_of(model, batch(step, engine.rank)) for step in (0, 1))
    with engine.micro_step(last=False):
        first.backward()
    with engine.micro_step():
        second.backward()
    assert model[0].linear.weight.grad is not None


def evaluates_alone() -> None:
    """A rank that evaluates by itself is told so, and so are the others."""
    engine, model = ZeroEngine(ZeroConfig(stage=3)), build()
    engine.shard(model)
    with engine.micro_step():
        loss_of(model, batch(0, engine.rank)).backward()
    with raises_everywhere(ScheduleError, "rank 0 began an evaluation"):
        if engine.rank == 0:
            model.eval()
            with torch.no_grad():
                model(batch(0, 0))
        else:
            loss_of(model, batch(1, 1)).backward()


def goes_on_alone() -> None:
    """A rank with more to do than the others, which are sharing buffers already, is told so."""
    engine, model = ZeroEngine(ZeroConfig(stage=3)), build()
    engine.shard(model)
    with raises_everywhere(ScheduleError, "rank 1"), engine.micro_step(last=False):
        loss_of(model, batch(0, engine.rank)).backward()
        if engine.rank == 1:
            model(batch(1, 1))


def on_engine() -> None:
    for stage, accumulate in ((1, 2), (2, 1), (3, 2)):
        engine_trains(stage, accumulate)
    two_graphs_at_once()
    evaluates_alone()


def test_buffers_of_rank_0_count_on_every_rank(pool: RankPool) -> None:
    pool.run(on_engine, 2)
    pool.run(goes_on_alone, 2)  # with connections of its own: those before are broken


def on_accelerate() -> tuple[nn.Module, nn.Module]:
    run = accelerator(zero="zero3", cpu=True)
    made = build()
    model, optimizer = run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.02))
    for step in range(STEPS):
        run.backward(loss_of(model, batch(step, dist.get_rank())))
        optimizer.step()
        optimizer.zero_grad()
    return model, reference(2, 1)


def on_fabric() -> tuple[nn.Module, nn.Module]:
    run = fabric("zero2")
    made = build()
    model, optimizer = run.setup(made, torch.optim.SGD(made.parameters(), lr=0.02))
    for step in range(STEPS):
        run.backward(loss_of(model, batch(step, run.global_rank)))
        optimizer.step()
        optimizer.zero_grad()
    return model.module, reference(2, 1)


class Fitted(pl.LightningModule):
    """Looks at the buffers when the validation starts, in the middle of a window too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()
        self.compared = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (b, 6) -> (b, 1)."""
        y: torch.Tensor = self.net(x)
        return y

    def training_step(self, step: torch.Tensor, index: int) -> torch.Tensor:
        return loss_of(self.net, batch(int(step) // 2, self.global_rank, int(step) % 2))

    def on_validation_start(self) -> None:
        if self.trainer.global_step or self.compared:
            assert_equal_on_all_ranks(self.net[0].norm.running_mean)
        self.compared += 1

    def validation_step(self, step: torch.Tensor, index: int) -> None:
        loss_of(self.net, batch(500, 0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def on_lightning() -> tuple[nn.Module, nn.Module]:
    module = Fitted()
    steps = DataLoader(range(2 * STEPS), batch_size=None)  # type: ignore[arg-type]
    trainer(
        "zero1",
        max_epochs=1,
        accumulate_grad_batches=2,
        val_check_interval=5,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
    ).fit(module, steps, steps)
    assert module.compared == 3
    return module, reference(2, 2)


def through_doors() -> None:
    for door in (on_accelerate, on_fabric, on_lightning):
        assert_as_reference(*door())


def test_one_rule_through_every_door(pool: RankPool) -> None:
    pool.run(through_doors, 2)
