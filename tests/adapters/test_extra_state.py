"""Extra state of modules that differs between ranks, through every door that saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardplug.checkpoint import Reader
from tests.adapters.accelerate.common import accelerator
from tests.adapters.fabric.test_fabric import fabric
from tests.adapters.hf_trainer.common import build as build_llama
from tests.adapters.hf_trainer.common import launched
from tests.adapters.hf_trainer.common import run as run_trainer
from tests.adapters.lightning.modules import Net, Plain, build, in_order, rank, trainer


class Seen(nn.Module):
    """Keeps what this rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = None

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def mine() -> dict[str, Any]:
    return {"rows": list(range(3 + 30 * rank())), "sum": torch.tensor(float(rank()))}


def with_seen(model: Any, seen: Any) -> Any:
    model.inner = nn.Sequential(Seen())
    model.inner[0].seen = seen
    return model


def with_lightning(folder: str, **options: Any) -> Any:
    from shardplug.lightning import ZeroStrategy

    module = with_seen(build(Plain), mine())
    run = trainer(ZeroStrategy(stage=2, **options), max_steps=1)
    run.fit(module, in_order())
    run.save_checkpoint(folder)
    again = with_seen(build(Plain), None)
    trainer("zero3", max_steps=2).fit(again, in_order(), ckpt_path=folder)
    return again


def with_fabric(folder: str) -> Any:
    run = fabric("zero2")
    run.save(folder, {"model": run.setup_module(with_seen(build(Net), mine()))})
    again = with_seen(build(Net), None)
    run.load(folder, {"model": run.setup_module(again)})
    return again


def with_accelerate(folder: str) -> Any:
    run = accelerator(cpu=True, zero="zero3")
    model = run.prepare(with_seen(build(Net), mine()))
    run.save_state(folder)
    model.inner[0].seen = None
    run.load_state(folder)
    return model


def with_trainer(folder: str) -> Any:
    with launched("zero3"):
        model = with_seen(build_llama(), mine())
        run_trainer(Path(folder), model, world_size=2, max_steps=2)
    with launched("zero1"):
        again = with_seen(build_llama(), None)
        resume = f"{folder}/checkpoint-2"
        run_trainer(Path(folder), again, world_size=2, max_steps=3, resume=resume)
    return again


def through_every_door(root: str) -> None:
    doors = (with_lightning, with_fabric, with_accelerate, with_trainer)
    for door in doors:
        found = door(f"{root}/{door.__name__}").inner[0].seen
        assert found["rows"] == mine()["rows"] and found["sum"].item() == rank(), door
    found = with_lightning(f"{root}/async", async_save=True).inner[0].seen
    assert found["rows"] == mine()["rows"]
    for name in ("with_lightning", "with_fabric", "with_accelerate"):
        entry = Reader(f"{root}/{name}").manifest["models"][0]["inner.0._extra_state"]
        assert len(entry["rank_bytes"]) == 2, name


def test_each_rank_gets_its_own_back(pool: Any, tmp_path: Path) -> None:
    pool.run(through_every_door, 2, str(tmp_path))
