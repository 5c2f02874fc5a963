"""The Lightning callback, on a Trainer whose strategy has a stand-in engine."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardplug.errors import ConfigError
from shardplug.integrations.lightning.memory_curve import make_memory_curve
from shardplug.memory import KINDS, PHASES, read_jsonl
from tests.unit.memory.fakes import FakeEngine
from tests.unit.memory.wandb_file import read_history

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers:UserWarning",
    "ignore:.*smaller than the logging interval:UserWarning",
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _curve(namespace: str) -> Any:
    """A curve without a plan, for which a stand-in for the engine has too little."""
    return make_memory_curve(namespace)(plan=None)


@pytest.fixture(params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> str:
    for name in (request.param, "wandb"):
        pytest.importorskip(name)
    return str(request.param)


def _trainer(namespace: str, folder: Path, engine: FakeEngine | None, **options: Any) -> Any:
    pl = importlib.import_module(namespace)
    strategies = importlib.import_module(f"{namespace}.strategies")
    strategy = strategies.SingleDeviceStrategy(device="cpu")
    if engine is not None:
        strategy.engine = engine
    return pl.Trainer(
        strategy=strategy,
        default_root_dir=folder,
        enable_model_summary=False,
        enable_checkpointing=options.pop("enable_checkpointing", False),
        logger=options.pop("logger", False),
        enable_progress_bar=False,
        **options,
    )


def _module(namespace: str, engine: FakeEngine, fail_at: int = -1) -> Any:
    pl = importlib.import_module(namespace)

    class Module(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == fail_at:
                raise RuntimeError("failed on purpose")
            engine.emit("after_forward", gathered=40)
            loss: torch.Tensor = self.layer(batch[0]).sum()
            self.log("loss", loss)
            return loss

        def on_after_backward(self) -> None:
            engine.emit("after_backward", gathered=0, gradients=20)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            optimizer.register_step_post_hook(lambda *_: engine.emit("after_step"))
            return optimizer

        def train_dataloader(self) -> Any:
            data = torch.utils.data.TensorDataset(torch.randn(4, 2))
            return torch.utils.data.DataLoader(data, batch_size=1)

    return Module()


def test_fit_writes_rows_picture_and_the_loggers_run(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    loggers = importlib.import_module(f"{namespace}.loggers")
    logger = loggers.WandbLogger(project="memory", save_dir=tmp_path, offline=True)
    engine, curve = FakeEngine(), _curve(namespace)
    trainer = _trainer(
        namespace,
        tmp_path,
        engine,
        callbacks=[curve],
        logger=logger,
        max_epochs=1,
        log_every_n_steps=1,
    )
    trainer.fit(_module(namespace, engine))
    logger.experiment.finish()

    rows = read_jsonl(tmp_path / "memory" / "memory.jsonl")
    assert [row.step for row in rows] == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert [row.phase for row in rows[:3]] == list(PHASES)
    assert curve.png_path == tmp_path / "memory" / "memory.png"
    assert curve.png_path.stat().st_size > 20_000
    assert engine.listeners == []
    assert trainer.progress_bar_metrics["peak_gib"] == pytest.approx(
        max(row.peak_bytes for row in rows if row.step == 4) / 2**30
    )
    history = read_history(tmp_path)
    memory = [row for row in history if "memory/step" in row]
    assert [row["memory/step"] for row in memory] == [1, 2, 3, 4]
    for row in memory:
        assert {f"memory_rank0/{p}/{k}_gib" for p in PHASES for k in KINDS} < set(row)
    assert [row["trainer/global_step"] for row in history if "loss" in row] == [0, 1, 2, 3]


def test_resumed_fit_continues_the_file(namespace: str, tmp_path: Path) -> None:
    engine = FakeEngine()
    first = _trainer(
        namespace,
        tmp_path,
        engine,
        callbacks=[make_memory_curve(namespace)(plan=None)],
        max_epochs=1,
    )
    first.fit(_module(namespace, engine))
    first.save_checkpoint(tmp_path / "one.ckpt")
    again = _trainer(
        namespace,
        tmp_path,
        engine,
        callbacks=[make_memory_curve(namespace)(plan=None)],
        max_epochs=2,
    )
    again.fit(_module(namespace, engine), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    lines = (tmp_path / "memory" / "memory.jsonl").read_text().splitlines()
    assert len(lines) == 24
    steps = [row.step for row in read_jsonl(tmp_path / "memory" / "memory.jsonl")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_exception_keeps_what_was_recorded(namespace: str, tmp_path: Path) -> None:
    engine = FakeEngine()
    curve = make_memory_curve(namespace)(plan=None, folder=tmp_path / "here", log=False)
    trainer = _trainer(namespace, tmp_path, engine, callbacks=[curve], max_epochs=1)
    with pytest.raises(RuntimeError, match="failed on purpose"):
        trainer.fit(_module(namespace, engine, fail_at=2))
    assert len(read_jsonl(tmp_path / "here" / "memory.jsonl")) == 6
    assert (tmp_path / "here" / "memory.png").exists()
    assert engine.listeners == []
    trainer.fit(_module(namespace, engine))  # the Trainer goes on from step 2, and so do the rows
    steps = [row.step for row in read_jsonl(tmp_path / "here" / "memory.jsonl")]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5, 6]
    assert len(steps) == 18


def test_another_strategy_is_refused_by_name(namespace: str, tmp_path: Path) -> None:
    curve = make_memory_curve(namespace)(plan=None)
    trainer = _trainer(namespace, tmp_path, None, callbacks=[curve], max_epochs=1)
    with pytest.raises(ConfigError, match=r"got SingleDeviceStrategy; use Trainer\(strategy="):
        trainer.fit(_module(namespace, FakeEngine()))


def test_a_remote_default_folder_is_refused(namespace: str, tmp_path: Path) -> None:
    curve = make_memory_curve(namespace)(plan=None)
    trainer = _trainer(namespace, tmp_path, FakeEngine(), callbacks=[curve])
    trainer._default_root_dir = "s3://bucket/run"
    with pytest.raises(ConfigError, match="Expected a local folder .* got 's3://bucket/run'"):
        curve.on_fit_start(trainer, None)


def test_class_is_the_namespaces_own_callback_and_pickles(namespace: str) -> None:
    made = make_memory_curve(namespace)
    assert issubclass(made, importlib.import_module(f"{namespace}.callbacks").Callback)
    assert made is make_memory_curve(namespace)
    copy = pickle.loads(pickle.dumps(made(folder="there", every_n_steps=3, picture=False)))
    assert type(copy) is made
    assert (copy.folder, copy.every_n_steps, copy.picture) == ("there", 3, False)
    with pytest.raises(ConfigError, match="Expected every_n_steps >= 1, got 0"):
        made(every_n_steps=0)
