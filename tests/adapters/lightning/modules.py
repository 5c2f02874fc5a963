"""LightningModules, data and Trainers of the adapter tests."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import shardplug  # noqa: F401  (makes the strategy strings known)

WIDTH = 6
SAMPLES = 48


class Data(Dataset[Any]):
    """Regression samples, each with its index."""

    def __init__(self, size: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, WIDTH, generator=generator)
        self.y = torch.randn(size, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, so that rows never divide evenly."""

    def __init__(self, dropout: float = 0.0, width: int = 11) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 3)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x))


def quiet() -> None:
    """Keep Lightning's messages out of the test's output."""
    warnings.filterwarnings("ignore")
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)


quiet()

import lightning.pytorch as pl  # noqa: E402


class Plain(pl.LightningModule):
    """An unchanged module: calls children, reads raw parameters, never calls itself."""

    def __init__(self, optimizer: str = "adamw", lr: float = 1e-2, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(dropout)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.full((3,), 0.1))
        self.losses: list[float] = []
        self.samples: list[list[int]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        out = nn.functional.linear(self.net.features(x), self.net.head.weight, self.net.head.bias)
        return (out * self.scale + self.shift - y).square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.samples.append(batch[2].tolist())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.hparams["optimizer"], self.parameters(), self.hparams["lr"])


def make_optimizer(name: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=lr, fused=name == "fused")


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def build(make: Any = Plain, **options: Any) -> Any:
    """Build a module whose weights only rank 0 has right: it has to give them to the others."""
    torch.manual_seed(11 + 100 * rank())
    return make(**options)


def reference(make: Any = Plain, **options: Any) -> Any:
    """Build the module that rank 0 starts from."""
    torch.manual_seed(11)
    return make(**options)


def in_order(batch_size: int = 4, size: int = SAMPLES, **options: Any) -> DataLoader[Any]:
    """A loader whose k-th batches of all ranks together are the samples in order."""
    data = Data(size)
    sampler = DistributedSampler(data, world_size(), rank(), shuffle=False)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, **options)


def whole_batches(batch_size: int = 4, size: int = SAMPLES, world: int | None = None) -> list[Any]:
    """The same batches for one process."""
    data, step = Data(size), batch_size * (world or world_size())
    return [
        (data.x[i : i + step], data.y[i : i + step], torch.arange(i, min(i + step, size)))
        for i in range(0, size, step)
    ]


def trainer(strategy: Any = "zero3", package: Any = pl, **options: Any) -> Any:
    """A quiet Trainer over the ranks of the pool."""
    quiet()
    environments = importlib.import_module(f"{package.__name__}.plugins.environments")
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size(),
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "plugins": [environments.TorchElasticEnvironment()],
    }
    return package.Trainer(**{**defaults, **options})


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer, whole. Collective."""
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in module.state_dict().items()
    }


def assert_close(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = 2e-6
) -> None:
    assert left and set(left) == set(right), (sorted(left), sorted(right))
    for name, value in left.items():
        gap = float((value.double() - right[name].double()).abs().max())
        assert gap <= tolerance, f"{name} differs by {gap}"


def assert_moved(module: nn.Module, start: nn.Module) -> None:
    """Every parameter has changed since `start`: a run that trains nothing proves nothing."""
    before = start.state_dict()
    for name, value in whole(module).items():
        assert not torch.equal(value, before[name]), f"{name} did not move"


def assert_at_rest(module: nn.Module) -> None:
    """Every parameter is a shard (or replicated, without a dimension), and trainable still."""
    from torch.distributed.tensor import DTensor

    tensors = [*module.parameters(), *module.buffers()]
    assert tensors
    assert not any(t.is_inference() for t in tensors)
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor) or parameter.ndim == 0, name
