"""The launcher: unmodified scripts, the YAML files, and clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file

import shardplug.run
from shardplug import ZeroConfig
from shardplug.checkpoint import is_checkpoint
from tests.adapters.accelerate.scripts import native
from tests.support.processes import Processes

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = Path(__file__).parent / "scripts"
FILES = sorted((ROOT / "recipes" / "configs").rglob("*.yaml"))
CONFIGS = [path for path in FILES if "fsdp_config" in path.read_text()]  # others are Lightning's


def launch(config: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `accelerate launch` with one of the recipes' YAML files, in fp32."""
    arguments = [
        *("--config_file", str(ROOT / "recipes" / "configs" / config)),
        *("--mixed_precision", "no"),
        *command,
    ]
    with Processes() as processes:
        launcher = ("-m", "accelerate.commands.launch")
        return ended(start(processes, *launcher, *arguments, **environment))


def start(processes: Processes, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    return processes.start(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    output, errors = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def result(process: subprocess.CompletedProcess[str], out: Path) -> dict[str, Any]:
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-6000:]
    found: dict[str, Any] = json.loads((out / "result.json").read_text())
    return found


@pytest.mark.timeout(300)
def test_an_unmodified_script_is_sharded_and_equals_one_process(tmp_path: Path) -> None:
    process = launch(
        "zero2.yaml",
        *("-m", "shardplug.run"),
        *(str(SCRIPTS / "native.py"), str(tmp_path), "wandb"),
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_SILENT="true",
    )
    found = result(process, tmp_path)
    assert process.stdout.count("shardplug: ZeRO stage 2 over 2 ranks") == 1
    assert found["class"].startswith("shardplug.integrations.accelerate")
    assert found["sharded"] == 5
    assert found["argv"] == [str(tmp_path), "wandb"]
    assert is_checkpoint(tmp_path / "epoch_0") and is_checkpoint(tmp_path / "epoch_1")
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1  # not one a rank

    model = native.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, norms = [], []
    for _ in range(2):
        batches = native.rows(28).split(4)
        for index, batch in enumerate(batches):
            loss = native.loss_of(model, batch)
            (loss / native.WINDOW).backward()
            losses.append(loss.item())
            if (index + 1) % native.WINDOW == 0 or index + 1 == len(batches):
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
    assert len(losses) == 14 and len(norms) == 6
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    assert found["norms"] == pytest.approx(norms, rel=1e-6)
    total = sum(float(tensor.double().abs().sum()) for tensor in model.state_dict().values())
    assert found["sum"] == pytest.approx(total, rel=1e-6)


@pytest.mark.timeout(300)
def test_an_unmodified_trainer_script_equals_one_process(tmp_path: Path) -> None:
    script = str(SCRIPTS / "trainer.py")
    alone, together = tmp_path / "alone", tmp_path / "together"
    with Processes() as processes:
        one = start(processes, script, str(alone), "4")  # while the launcher imports what it needs
        process = launch("zero3.yaml", "-m", "shardplug.run", script, str(together), "2")
        expected = result(ended(one), alone)
    found = result(process, together)
    assert process.stdout.count("shardplug: ZeRO stage 3 over 2 ranks") == 2  # two Trainers
    assert (expected["class"], expected["sharded"]) == ("accelerate.accelerator", 0)
    assert found["class"].startswith("shardplug.integrations.accelerate")
    assert found["sharded"] > 10 and found["world"] == 2
    assert len(found["losses"]) == 5
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["resumed"] == pytest.approx(expected["losses"], rel=1e-5)  # from the third step
    assert found["eval"] == pytest.approx(expected["eval"], rel=1e-5)
    files = {path.name for path in (together / "final").iterdir()}
    assert {"config.json", "model.safetensors"} <= files


@pytest.mark.timeout(300)
def test_one_process_without_launcher(tmp_path: Path) -> None:
    code = (
        "import torch; from shardplug.accelerate import Accelerator\n"
        "a = Accelerator(zero='zero3')\n"
        "net, opt = torch.nn.Linear(5, 3), None\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "net, opt = a.prepare(net, opt)\n"
        "a.backward(net(torch.ones(2, 5, device=a.device)).mean()); opt.step()\n"
        "a.save_state('state'); a.load_state('state')\n"
        "print(a.gather(torch.ones(1, device=a.device)).tolist(), a.num_processes)\n"
        "a.wait_for_everyone(); a.end_training()\n"
    )
    keep = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    environment = {k: v for k, v in os.environ.items() if k not in keep}
    process = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code],
        env={**environment, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "over 1 ranks" in process.stdout and "[1.0] 1" in process.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        ([], {}, "Expected the path of a script"),
        (["-m"], {}, "Expected a module name"),
        (["no_such_script.py"], {}, "'no_such_script.py' is no file"),
        ([__file__], {}, "Expected to be started by `accelerate launch`"),
        ([__file__], {"ACCELERATE_USE_FSDP": "true"}, "Expected to be started by"),
        (
            [__file__],
            {"ACCELERATE_USE_FSDP": "true", "LOCAL_RANK": "0", "FSDP_SHARDING_STRATEGY": "1"},
            "Expected fsdp_sharding_strategy: \"shardplug:zero3\".*got '1'",
        ),
        (
            [__file__],
            {
                "ACCELERATE_USE_FSDP": "true",
                "LOCAL_RANK": "0",
                "FSDP_SHARDING_STRATEGY": "shardplug:zero5",
            },
            "Expected a preset out of",
        ),
    ],
)
def test_a_wrong_command_or_yaml_is_told(
    arguments: list[str],
    environment: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import re

    for name in ("ACCELERATE_USE_FSDP", "LOCAL_RANK", "FSDP_SHARDING_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert shardplug.run.main(arguments) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_yaml_is_read_by_accelerate_and_names_a_stage(path: Path) -> None:
    config = load_config_from_file(str(path))
    assert str(config.distributed_type) == "DistributedType.FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    text = config.fsdp_config["fsdp_sharding_strategy"]
    assert text.startswith("shardplug:")
    stage = ZeroConfig.parse(text.removeprefix("shardplug:")).stage
    if path.name.startswith("zero"):
        assert path.name.startswith(f"zero{stage}")


def test_there_is_a_yaml_for_each_stage() -> None:
    names = {path.name for path in CONFIGS}
    assert {"zero1.yaml", "zero2.yaml", "zero3.yaml"} <= names
