"""The `shardplug` command: options, output, exit codes."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardplug
from shardplug import cli
from tests.unit.test_inspect import flip, save

ROOT = Path(__file__).resolve().parents[2]


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Run the command in this process; return the exit code, stdout and stderr."""
    try:
        code = cli.main([str(argument) for argument in arguments])
    except SystemExit as error:  # argparse
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    names = [info.name for info in pkgutil.iter_modules(cli.__path__)]
    assert {"doctor", "export", "inspect", "plan"} <= set(names)
    code, out, _ = call(capsys, "--help")
    assert code == 0 and all(name in out for name in names)
    for name in names:
        module = importlib.import_module(f"shardplug.cli.{name}")
        assert callable(module.add_arguments) and callable(module.run)
        code, out, _ = call(capsys, name, "--help")
        assert code == 0
        assert str(module.__doc__).splitlines()[0] in out


def test_version_and_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version")[:2] == (0, f"shardplug {shardplug.__version__}\n")
    for arguments in ([], ["paint"], ["inspect"], ["inspect", "x", "--loud"], ["export", "x"]):
        code, out, err = call(capsys, *arguments)
        assert (code, out) == (2, "") and "usage: shardplug" in err


def test_entry_points(tmp_path: Path) -> None:
    save(tmp_path / "it")
    run = [sys.executable, "-m", "shardplug", "inspect", str(tmp_path / "it"), "--json"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["health"] == "whole"
    assert 'shardplug = "shardplug.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_inspect_a_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path / "it")
    code, out, err = call(capsys, "inspect", path)
    assert (code, err) == (0, "")
    for part in (
        "whole by its sizes; --verify reads the checksums",
        "framework    lightning",
        "step         3",
        "stage        2",
        "world size   1 rank\n",
        "model        0: 14 parameters in 2 tensors, 56 bytes (float32)",
        "optimizer    0: state of 2 parameters in 4 tensors",
    ):
        assert part in out, part
    assert "every checksum is right" in call(capsys, "inspect", path, "--verify")[1]
    listing = call(capsys, "inspect", path, "--tensors")[1]
    assert re.search(r"^  weight +float32 +\(2, 6\)$", listing, re.MULTILINE)
    plain = json.loads(call(capsys, "inspect", path, "--json")[1])
    assert plain["models"][0]["tensors"] == 2 and "tensors" not in plain
    listed = json.loads(call(capsys, "inspect", path, "--json", "--tensors")[1])
    assert listed["tensors"]["bias"] == {"shape": [2], "dtype": "float32"}


def test_inspect_says_what_is_damaged(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = save(tmp_path / "it")
    flip(path / "__0_0.distcp", 200)
    assert call(capsys, "inspect", path)[0] == 0
    code, out, _ = call(capsys, "inspect", path, "--verify")
    assert code == 1
    assert "damaged: 1 file\n" in out and "__0_0.distcp: has other bytes than were written" in out
    (path / "meta.pt").unlink()
    code, out, _ = call(capsys, "inspect", path, "--json")
    assert code == 1 and json.loads(out)["problems"] == [["meta.pt", "is missing"]]
    (path / "manifest.json").unlink()
    code, out, _ = call(capsys, "inspect", path)
    assert code == 1 and "a save of shardplug that did not finish" in out


def test_inspect_a_folder_of_checkpoints(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", step)
    code, out, _ = call(capsys, "inspect", tmp_path)
    first, second = out.index("step-2"), out.index("step-1")
    assert code == 0 and first < second and "* a resumed run takes step-2" in out
    for step in (1, 2):
        (tmp_path / f"step-{step}" / "meta.pt").unlink()
    code, out, _ = call(capsys, "inspect", tmp_path)
    assert code == 1 and "none is whole" in out and out.count("meta.pt: is missing") == 2
    assert json.loads(call(capsys, "inspect", tmp_path, "--json")[1])["resume"] is None


def test_what_is_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command in (["inspect"], ["export", tmp_path / "out"]):
        name, *rest = command
        code, _, err = call(capsys, name, tmp_path / "none", *rest)
        assert code == 2 and "there is nothing at" in err
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "zero_to_fp32.py").write_text("")
    code, out, _ = call(capsys, "inspect", tmp_path / "ds")
    assert code == 2 and "a DeepSpeed checkpoint" in out and "zero_to_fp32.py" in out
    code, _, err = call(capsys, "export", tmp_path / "ds", tmp_path / "out")
    assert code == 2 and "zero_to_fp32.py" in err and err.count("\n") == 1
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    code, out, _ = call(capsys, "inspect", tmp_path / "last.ckpt")
    assert code == 2 and "a Lightning checkpoint file" in out and "trainer.fit" in out


def test_export(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path, out = save(tmp_path / "it"), tmp_path / "out"
    code, said, err = call(capsys, "export", path, out, "--dtype", "bfloat16")
    assert code == 0
    assert f"{out}: the weights, 1 files" in said and "model.safetensors" in said
    assert err.startswith("note: no Hugging Face configuration")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    code, _, err = call(capsys, "export", path, out)
    assert code == 2 and "is not empty" in err and err.count("\n") == 1
    code, said, _ = call(capsys, "export", path, out, "--overwrite", "--max-shard-size", "50")
    assert code == 0 and "model-00002-of-00002.safetensors" in said
    for bad in ("5XB", "", "-1", "0"):
        code, _, err = call(capsys, "export", path, out, f"--max-shard-size={bad}")
        assert code == 2 and "expected a size like 5GB" in err
    code, _, err = call(capsys, "export", path, tmp_path / "no", "--adapter-only")
    assert code == 2 and "PEFT adapters" in err
    flip(path / "__0_0.distcp", 200)
    code, _, err = call(capsys, "export", path, tmp_path / "no")
    assert code == 1 and "__0_0.distcp has other bytes" in err and err.count("\n") == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("20kB", 20_000), ("1.5 MiB", 3 * 2**19), ("5GB", 5 * 10**9), ("2TiB", 2 * 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    from shardplug.cli import export

    assert export._size(text) == size
