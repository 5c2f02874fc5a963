"""Case 100: what is published is whole, pure, and builds without torch and without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import torch

import shardplug

pytest.importorskip("hatchling", reason="the build backend is not installed")

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(torch.__file__).parents[1]
NAME = f"shardplug-{shardplug.__version__}"

BUILD = """
import sys
from hatchling import build
build.build_sdist(sys.argv[1])
build.build_wheel(sys.argv[1])
"""
USE = """
import importlib, pathlib, pkgutil, sys
import shardplug
home = pathlib.Path(sys.argv[1]).resolve()
names = ["shardplug", "shardplug.cli", "shardplug.checkpoint", "shardplug.memory"]
names += [f"shardplug.tiers.{one.name}" for one in pkgutil.iter_modules([f"{home}/tiers"])]
names += [f"shardplug.core.{one.name}" for one in pkgutil.iter_modules([f"{home}/core"])]
for name in names:
    assert home in pathlib.Path(importlib.import_module(name).__file__).resolve().parents, name
print(len(names))
"""


def _run(*command: object, cwd: Path, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONHOME"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**kept, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _bare(folder: Path) -> dict[str, str]:
    """Variables of a build that finds no torch and no compiler."""
    (folder / "torch.py").write_text("raise ImportError('there is no torch at build time')\n")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "PATH": str(folder), "CC": "false", "CXX": "false"}


ALL = ("--cached", "--others", "--exclude-standard")  # what is not committed yet too


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built from the clone."""
    out = tmp_path_factory.mktemp("built")
    bare = _bare(tmp_path_factory.mktemp("bare"))
    _run(sys.executable, "-c", BUILD, out, cwd=ROOT, **bare)
    assert sorted(path.name for path in out.iterdir()) == [
        f"{NAME}-py3-none-any.whl",
        f"{NAME}.tar.gz",
    ]
    return out


def _files(*options: str) -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what belongs in the package is not known")
    listed = subprocess.run(
        ["git", "ls-files", "-z", *options], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def _in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    names = _in_wheel(built / f"{NAME}-py3-none-any.whl")
    package = {name for name in names if not name.startswith(f"{NAME}.dist-info/")}
    assert package == {name for name in _files(*ALL) if name.startswith("shardplug/")}
    assert "shardplug/py.typed" in package and len(package) > 100
    about = {PurePosixPath(name).name for name in names - package}
    assert about == {"LICENSE", "METADATA", "RECORD", "WHEEL", "entry_points.txt"}


def test_the_sdist_holds_the_clone_and_gives_the_same_wheel(built: Path, tmp_path: Path) -> None:
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert _files("--cached") | {"PKG-INFO"} <= names <= _files(*ALL) | {"PKG-INFO"}
    bare = tmp_path / "bare"
    bare.mkdir()
    options = ("--no-deps", "--no-build-isolation", "-w", tmp_path / "again")
    pip = (sys.executable, "-m", "pip", "wheel", *options)
    _run(*pip, built / f"{NAME}.tar.gz", cwd=tmp_path, **_bare(bare))
    (again,) = (tmp_path / "again").iterdir()
    first = built / f"{NAME}-py3-none-any.whl"
    assert again.name == first.name and _in_wheel(again) == _in_wheel(first)


def test_the_wheel_installs_where_there_is_nothing_and_leaves_nothing(
    built: Path, tmp_path: Path
) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    _run(*pip, "install", "--no-deps", built / f"{NAME}-py3-none-any.whl", cwd=tmp_path)
    (package,) = (tmp_path / "venv").glob("lib/python*/site-packages/shardplug")
    site = package.parent
    alone = subprocess.run(
        [python, "-I", "-c", "import shardplug"], capture_output=True, text=True, timeout=60
    )
    assert alone.returncode == 1 and "No module named 'torch'" in alone.stderr
    with_torch = {"PYTHONPATH": f"{site}{os.pathsep}{SITE}"}
    count = _run(python, "-c", USE, package, cwd=tmp_path, **with_torch)
    assert int(count) > 20
    command = tmp_path / "venv" / "bin" / "shardplug"
    version = _run(command, "--version", cwd=tmp_path, **with_torch)
    assert version == f"shardplug {shardplug.__version__}\n"
    _run(*pip, "uninstall", "--yes", "shardplug", cwd=tmp_path)
    assert not command.exists() and not list(site.glob("shardplug*"))
