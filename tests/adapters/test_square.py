"""Plain torch in one process and every framework load what each other one saved, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import Reader, state_of_model, state_of_optimizer, write
from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.lightning.modules import pl, trainer

STEPS = 4
NAMES = ("trainer", "fabric", "accelerate", "engine", "unsharded")
STAGES = {"trainer": 1, "fabric": 2, "accelerate": 3, "engine": 1, "unsharded": 3}


class Body(nn.Module):
    """Rows that divide by no number of ranks, a part without gradient, a buffer, a tied weight."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inp = nn.Linear(4, 7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.out = nn.Linear(7, 5)
        self.again = nn.Linear(7, 5, bias=False)
        self.again.weight = self.out.weight
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("table", torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(self.inp(x)))
        return (self.out(hidden) + self.again(hidden)) * self.scale


def make_optimizer(body: nn.Module, lr: float = 3e-2) -> torch.optim.Optimizer:
    """Two groups; options that a loaded checkpoint has to bring."""
    slow = [p for n, p in body.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in body.named_parameters() if not n.endswith("bias") and "frozen" not in n]
    groups = [{"params": rest, "weight_decay": 0.1}, {"params": slow, "lr": lr / 3}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.8, 0.95))


def batch_of(step: int) -> torch.Tensor:
    """This rank's rows of the step's batch of six."""
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
    share = 6 // dist.get_world_size()
    return rows[share * dist.get_rank() :][:share]


def content(body: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    """Everything, whole, by the body's own names. Collective."""

    def full(value: Any) -> Any:
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    weights = {name: full(value) for name, value in body.state_dict().items()}
    state = {
        name: {key: full(value) for key, value in optimizer.state[p].items()}
        for name, p in body.named_parameters()
        if p in optimizer.state
    }
    groups = [
        {k: v for k, v in group.items() if k in ("lr", "weight_decay", "betas")}
        for group in optimizer.param_groups
    ]
    return {"weights": weights, "state": state, "groups": groups, "step": step}


class Module(pl.LightningModule):
    def __init__(self, seed: int, lr: float) -> None:
        super().__init__()
        self.body, self.lr = Body(seed), lr

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.body, self.lr)


def with_trainer(folder: str, load: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_start(self, run: Any, module: Any) -> None:
            optimizer = run.optimizers[0]
            found.update(content(module.body, optimizer, run.global_step))

    module = Module(*((70, 1.0) if load else (3, 3e-2)))
    run = trainer(
        f"zero{STAGES['trainer']}",
        max_steps=STEPS + load,
        max_epochs=-1,
        callbacks=[Look()] if load else [],
        use_distributed_sampler=False,
    )
    batches: Any = DataLoader([batch_of(step) for step in range(STEPS)], batch_size=None)
    run.fit(module, batches, ckpt_path=folder if load else None)
    if not load:
        found = content(module.body, run.optimizers[0], run.global_step)
        run.save_checkpoint(folder)
    return found


def train(body: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]) -> None:
    for step in range(STEPS):
        backward(body(batch_of(step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def with_fabric(folder: str, load: bool) -> dict[str, Any]:
    run = fabric(f"zero{STAGES['fabric']}")
    body = Body(70 if load else 3)
    model, optimizer = run.setup(body, make_optimizer(body, 1.0 if load else 3e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0 if load else STEPS}
    if load:
        run.load(folder, state)
    else:
        train(model, optimizer, run.backward)
        run.save(folder, state)
    return content(body, optimizer.optimizer, state["step"])


def with_accelerate(folder: str, load: bool) -> dict[str, Any]:
    acc = accelerator(zero=f"zero{STAGES['accelerate']}")
    body = Body(70 if load else 3)
    body, optimizer = acc.prepare(body, make_optimizer(body, 1.0 if load else 3e-2))
    if load:
        acc.load_state(folder)
    else:
        train(body, optimizer, acc.backward)
        acc.save_state(folder)
    return content(body, optimizer.optimizer, acc.completed_steps)


def with_engine(folder: str, load: bool) -> dict[str, Any]:
    engine = ZeroEngine(ZeroConfig(stage=STAGES["engine"]))
    body = engine.shard(Body(70 if load else 3))
    optimizer = engine.prepare_optimizer(make_optimizer(body, 1.0 if load else 3e-2))
    if load:
        step = engine.load(folder, optimizers=[optimizer])["step"]
    else:
        train(body, optimizer, lambda loss: loss.backward())
        step = STEPS
        engine.save(folder, optimizers=[optimizer], extra={"step": step})
    return content(body, optimizer, step)


def with_nothing(folder: str, load: bool) -> dict[str, Any]:
    """Plain torch in one process."""
    body = Body(70 if load else 3)
    optimizer = make_optimizer(body, 1.0 if load else 3e-2)
    if load:
        Reader(folder, alone=True).load([body], [optimizer])
        meta = Reader(folder, alone=True).meta
        return content(body, optimizer, meta["step"] if "step" in meta else meta["extra"]["step"])
    train(body, optimizer, lambda loss: loss.backward())
    write(
        folder,
        models=[state_of_model(body)],
        optimizers=[state_of_optimizer([body], optimizer)],
        meta={"step": STEPS},
        run={"step": STEPS},
        modules=[body],
    )
    return content(body, optimizer, STEPS)


RUNS = dict(
    zip(NAMES, (with_trainer, with_fabric, with_accelerate, with_engine, with_nothing), strict=True)
)


def save_all(root: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: RUNS[name](f"{root}/{name}", False) for name in names}


def load_all(
    root: str, readers: tuple[str, ...], writers: tuple[str, ...]
) -> dict[tuple[str, str], Any]:
    found = {}
    for reader in readers:
        for writer in writers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Accelerate: no schedulers in others' folders
                found[writer, reader] = RUNS[reader](f"{root}/{writer}", True)
    return found


def assert_equal(left: Any, right: Any, where: str) -> int:
    """Compare nested values bit by bit; return how many tensors there were."""
    if isinstance(left, torch.Tensor):
        assert left.dtype == right.dtype and torch.equal(left, right), where
        return 1
    if isinstance(left, dict):
        assert left.keys() == right.keys(), (where, sorted(left), sorted(right))
        return sum(assert_equal(left[key], right[key], f"{where}/{key}") for key in left)
    if isinstance(left, list):
        assert len(left) == len(right), where
        pairs = enumerate(zip(left, right, strict=True))
        return sum(assert_equal(a, b, f"{where}[{i}]") for i, (a, b) in pairs)
    assert left == right, (where, left, right)
    return 0


@pytest.fixture(scope="module")
def saved(pool: Any, tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("square")
    found = pool.run(save_all, 2, str(root), NAMES[:-1])[0]
    found |= pool.run(save_all, 1, str(root), NAMES[-1:])[0]
    start = Body().state_dict()
    for name, entry in found.items():
        assert entry["step"] == STEPS and len(entry["state"]) == 5, name
        assert float(entry["state"]["inp.weight"]["step"]) == STEPS
        assert not torch.equal(entry["weights"]["inp.weight"], start["inp.weight"])
        assert torch.equal(entry["weights"]["frozen.weight"], start["frozen.weight"])
    return root, found


@pytest.mark.parametrize(
    ("world", "readers", "writers"),
    [(3, NAMES[:-1], NAMES[-1:]), (1, NAMES, NAMES)],
    ids=["3", "1"],
)
def test_each_loads_what_each_other_saved(
    pool: Any,
    saved: tuple[Path, dict[str, Any]],
    world: int,
    readers: tuple[str, ...],
    writers: tuple[str, ...],
) -> None:
    root, expected = saved
    found = pool.run(load_all, world, str(root), readers, writers)[0]
    assert len(found) == len(readers) * len(writers)
    for (writer, reader), entry in found.items():
        compared = assert_equal(expected[writer], entry, f"{writer} -> {reader}")
        assert compared == 8 + 3 * 5, (writer, reader)
