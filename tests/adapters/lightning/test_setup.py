"""Strings, classes and launchers: what a user types, and what is refused before training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardplug.config import PRESETS
from tests.adapters.lightning.modules import (
    Plain,
    assert_close,
    assert_moved,
    build,
    in_order,
    pl,
    reference,
    trainer,
    whole,
)
from tests.support.processes import Processes

ROOT = Path(__file__).parents[3]


def start_python(processes: Processes, code: str, *arguments: str) -> subprocess.Popen[str]:
    return processes.start(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    with Processes() as processes:
        process = start_python(processes, code)
        output, errors = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


ORDERS = """
import os
import sys
import torch, torch.distributed.checkpoint, torch.distributed.fsdp

def check(order, roots):
    ours = {{"shardplug", "lightning", "lightning_fabric", "pytorch_lightning"}}
    assert not ours & set(sys.modules)
    for name in order:
        __import__(name)
    from shardplug._registration import REGISTRIES
    import importlib
    for module, (registry, _) in REGISTRIES.items():
        if module.split(".")[0] not in roots:
            assert module not in sys.modules, module
            continue
        found = getattr(importlib.import_module(module), registry).available_strategies()
        assert {presets!r} <= set(found), (module, found)
    print(f"registered by {{order}}", flush=True)

started = {{}}
for order, roots in {orders!r}:  # each in a process that has imported torch and nothing else
    child = os.fork()
    if not child:
        try:
            check(order, roots)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    started[child] = order
failed = [started[child] for child in started if os.waitpid(child, 0)[1]]
assert not failed, failed
"""
IMPORTS = [
    ("shardplug", "lightning.pytorch"),
    ("lightning.pytorch", "shardplug"),
    ("shardplug", "lightning.fabric", "lightning.pytorch"),
    ("pytorch_lightning", "shardplug"),
    ("shardplug", "lightning_fabric"),
    ("lightning.fabric", "shardplug", "pytorch_lightning"),
]


def test_strings_are_known_in_any_import_order() -> None:
    orders = []
    for order in IMPORTS:
        roots = {name.partition(".")[0] for name in order if name != "shardplug"}
        if "pytorch_lightning" in roots:
            roots.add("lightning_fabric")
        orders.append((order, roots))
    done = run_python(ORDERS.format(orders=orders, presets=set(PRESETS)))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(f"registered by {o}" for o in IMPORTS)


def test_import_is_light() -> None:
    heavy = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "wandb")
    code = f"import sys, shardplug; print([n for n in {heavy!r} if n in sys.modules])"
    done = run_python(code)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_options_are_checked() -> None:
    from shardplug.errors import ConfigError
    from shardplug.fabric import ZeroStrategy as FabricZero
    from shardplug.lightning import ZeroStrategy

    for strategy in (ZeroStrategy, FabricZero):
        with pytest.raises(ConfigError, match="Expected options out of.*got overlap"):
            strategy(overlap=True)
        with pytest.raises(ConfigError, match="Expected stage 1, 2 or 3, got 4"):
            strategy(stage=4)
        with pytest.raises(ConfigError, match="read after a module was set up"):
            _ = strategy().engine
        assert strategy(units=["Block"]).config.units == ("Block",)


def other_package() -> None:
    import pytorch_lightning

    from shardplug.lightning import ZeroStrategy, strategy_class

    class Other(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(6, 3)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    results = []
    for strategy in ("zero3", strategy_class("pytorch_lightning")(stage=1)):
        module = build(Other)
        run = trainer(strategy, pytorch_lightning, gradient_clip_val=0.1)
        assert isinstance(run.strategy, pytorch_lightning.strategies.ParallelStrategy)
        run.fit(module, in_order())
        assert_moved(module, reference(Other))
        results.append(whole(module))
    assert_close(*results)
    with pytest.raises(ValueError, match="invalid strategy"):
        trainer(ZeroStrategy(stage=3), pytorch_lightning)  # the other package's class
    with pytest.raises(ValueError, match="Expected one of"):
        strategy_class("lightning.torch")


def test_both_import_names(pool: Any) -> None:
    pool.run(other_package, 2)


def wrong_device_count() -> None:
    with pytest.raises(ValueError, match="devices"):
        trainer(devices=1).fit(build(), in_order())
    with pytest.raises(ValueError, match="devices"):
        trainer(devices=3).fit(build(), in_order())
    torch.distributed.barrier()


def test_device_count_must_match_the_launcher(pool: Any) -> None:
    pool.run(wrong_device_count, 2)


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Growing(Plain):
    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.more = torch.nn.Linear(2, 2)
        self.strict_loading = False


def refuse_modules(folder: str) -> None:
    with pytest.raises(ValueError, match="nothing to train"):
        trainer().fit(build(Frozen), in_order())
    frozen = build(Frozen)
    trainer().validate(frozen, in_order(size=16), verbose=False)  # evaluating it is fine
    module = build()
    run = trainer()
    run.fit(module, in_order())
    run.save_checkpoint(f"{folder}/saved")
    with pytest.raises(ValueError, match="'more.bias' was added or removed"):
        trainer().fit(build(Growing), in_order(), ckpt_path=f"{folder}/saved")
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    with pytest.raises(ValueError, match="no CheckpointIO plugin, got AsyncCheckpointIO"):
        trainer(plugins=[AsyncCheckpointIO()])
    with pytest.raises(RuntimeError, match="compiled model is incompatible"):
        trainer().fit(torch.compile(build(), backend="eager"), in_order())
    broken = build()
    broken.net.blocks[0].compile(backend="eager")  # compiling parts is the way out
    trainer(max_steps=2).fit(broken, in_order())
    assert_moved(broken, reference())


def test_modules_and_plugins_that_cannot_work_are_refused(pool: Any, tmp_path: Path) -> None:
    pool.run(refuse_modules, 2, str(tmp_path))


class Late(Plain):
    """Builds its layers in configure_model, as large models do."""

    guarded = True

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.save_hyperparameters({"optimizer": "adamw", "lr": 1e-2})
        self.losses, self.samples = [], []
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None or not self.guarded:
            other = Plain()
            self.net, self.scale, self.shift = other.net, other.scale, other.shift


def build_late(folder: str) -> None:
    torch.manual_seed(5 + torch.distributed.get_rank())
    module = Late()
    run = trainer(max_epochs=1)
    run.fit(module, in_order())
    run.save_checkpoint(f"{folder}/saved")
    again = Late()
    tested = trainer().test(again, in_order(size=16), ckpt_path=f"{folder}/saved", verbose=False)
    assert tested == run.test(module, in_order(size=16), verbose=False)

    # Empty weights, filled from a checkpoint: every parameter of every rank.
    class Nets(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Plain().net

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return (self.net(batch[0]) - batch[1]).square().mean()

        def test_step(self, batch: Any, index: int) -> None:
            self.log("loss", self.training_step(batch, index), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    source = build(Nets)
    run = trainer()
    run.fit(source, in_order())
    run.save_checkpoint(f"{folder}/net")
    empty = trainer(max_epochs=2)
    with empty.init_module(empty_init=True):
        target = Nets()
    assert all(p.is_meta for p in target.parameters())
    loss = empty.test(target, in_order(size=16), ckpt_path=f"{folder}/net", verbose=False)
    assert loss == run.test(source, in_order(size=16), verbose=False)
    fresh = trainer()
    with fresh.init_module(empty_init=True):
        target = Nets()
    fresh.fit(target, in_order())
    assert all(torch.isfinite(v).all() for v in whole(target).values())


def test_late_and_meta_initialisation(pool: Any, tmp_path: Path) -> None:
    pool.run(build_late, 2, str(tmp_path))


CLI = """
import torch, sys
{first}
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
print(type(cli.trainer.strategy).__name__, cli.trainer.strategy.config)
"""
QUIET = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]


COMMAND_LINES = [
    ("import shardplug", ["--trainer.strategy=zero2"], "ZeroConfig(stage=2"),
    (
        "",  # jsonargparse imports the class
        [
            "--trainer.strategy.class_path=shardplug.lightning.ZeroStrategy",
            "--trainer.strategy.init_args.stage=1",
            "--trainer.strategy.init_args.units=[Linear]",
            "--trainer.strategy.init_args.param_dtype=bf16",
            "--trainer.strategy.init_args.activation_checkpointing=true",
            "--trainer.strategy.init_args.timeout=0:10:00",
        ],
        "units=('Linear',), param_dtype=torch.bfloat16",
    ),
]


def test_lightning_cli() -> None:
    """By name and by class path, side by side."""
    with Processes() as processes:
        started = [
            start_python(processes, CLI.format(first=first), *arguments, *QUIET)
            for first, arguments, _ in COMMAND_LINES
        ]
        for process, (_, arguments, expected) in zip(started, COMMAND_LINES, strict=True):
            output, errors = process.communicate(timeout=100)
            assert process.returncode == 0, f"{arguments}: {errors[-3000:]}"
            assert "ZeroStrategy ZeroConfig(" in output and expected in output, output


LAUNCHED = """
import sys, torch
sys.path.insert(0, {root!r})
import shardplug
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
run = pl.Trainer(accelerator="cpu", devices=2, strategy="zero3", max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
model = BoringModel()
run.fit(model)
sys.stdout.write(f"rank {{run.global_rank}} of {{run.world_size}} {{run.global_step}}\\n")
"""


@pytest.mark.slow
def test_the_trainer_launches_its_own_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED.format(root=str(ROOT)))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=110, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0 of 2 2" in done.stdout and "rank 1 of 2 2" in done.stdout
    assert "terminate called" not in done.stderr
