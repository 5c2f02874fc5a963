"""Which checkpoint a run goes on from."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from shardplug.checkpoint import ResumePoint, resume_point, write
from shardplug.checkpoint.format import manifest
from shardplug.checkpoint.format.commit import MANIFEST
from shardplug.errors import CheckpointError
from tests.support.faults import DAMAGES, flip


@pytest.fixture(autouse=True)
def clock() -> Iterator[None]:
    """A clock that goes on by a second at every look."""
    with mock.patch.object(manifest.time, "time", side_effect=iter(range(1000, 9999))):
        yield


def save(path: Path, step: int | None = None) -> Path:
    run = {} if step is None else {"step": step}
    write(path, models=[{"a": torch.full((40,), 1.5)}], optimizers=[], meta={}, run=run)
    return path


def found(folder: Path, **options: bool) -> ResumePoint:
    point = resume_point(folder, **options)
    assert point is not None
    return point


def test_nothing_was_saved(tmp_path: Path) -> None:
    assert resume_point(tmp_path / "missing") is None
    assert resume_point(tmp_path) is None
    (tmp_path / "notes").mkdir()
    (tmp_path / "events.txt").write_text("x")
    shutil.copytree(save(tmp_path / "notes" / "deep"), tmp_path / ".a.tmp-01234567")
    (tmp_path / ".a.tmp-01234567" / MANIFEST).unlink()
    assert resume_point(tmp_path) is None  # a first save that was killed


def test_the_one_saved_last_wins_whatever_its_name_or_step(tmp_path: Path) -> None:
    save(tmp_path / "z-first", 30)
    save(tmp_path / "m-second", 40)
    save(tmp_path / "a-third", 20)  # went on from an earlier one
    assert found(tmp_path) == ResumePoint(path=tmp_path / "a-third", step=20, passed_over=())
    os.symlink("z-first", tmp_path / "last")
    os.utime(tmp_path / "z-first" / MANIFEST)
    assert found(tmp_path, verify=True).path == tmp_path / "a-third"
    assert found(tmp_path).step == 20
    save(tmp_path / "unknown")
    assert found(tmp_path).step is None


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt", "rng_0.pt", MANIFEST])
def test_damaged_ones_are_passed_over_and_named(tmp_path: Path, name: str, damage: object) -> None:
    save(tmp_path / "a", 1)
    newest = save(tmp_path / "b", 2)
    damage(newest / name)  # type: ignore[operator]
    with pytest.warns(UserWarning, match=r"Resuming from .*/a, the newest whole .* Passed over: "):
        point = found(tmp_path, verify=True)
    assert point.path == tmp_path / "a" and point.step == 1
    ((path, reason),) = point.passed_over
    assert path == newest and name in reason and str(newest) in reason
    assert found(tmp_path, verify=True, warn=False) == point
    sizes_differ = not damage.__name__.startswith("flip")  # type: ignore[attr-defined]
    quick = found(tmp_path, warn=False)
    assert quick.path == (tmp_path / "a" if sizes_differ or name == MANIFEST else newest)


def test_none_whole_is_an_error(tmp_path: Path) -> None:
    for name in ("a", "b"):
        flip(save(tmp_path / name) / "meta.pt")
    with pytest.raises(CheckpointError, match=r"there is none: .*/a is damaged.*/b is damaged"):
        resume_point(tmp_path, verify=True)
    (tmp_path / "a" / MANIFEST).unlink()
    (tmp_path / "b" / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="To train from the beginning, remove them"):
        resume_point(tmp_path)


def test_a_manifest_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    newest = save(tmp_path / "b", 2)
    real = Path.read_text

    def read(path: Path, **options: str) -> str:
        if path.parent == newest:
            raise OSError(5, "Input/output error")
        return real(path, **options)

    with mock.patch.object(Path, "read_text", read):
        point = found(tmp_path, warn=False)
    assert point.path == tmp_path / "a"
    assert point.passed_over == (
        (newest, f"{newest} cannot be read: [Errno 5] Input/output error."),
    )


def test_what_a_killed_save_left_whole_counts(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    (tmp_path / "last").rename(tmp_path / ".last.old-01234567")
    assert found(tmp_path) == ResumePoint(
        path=tmp_path / ".last.old-01234567", step=1, passed_over=()
    )
    save(tmp_path / "next", 2).rename(tmp_path / ".last.tmp-01234567")
    assert found(tmp_path).path == tmp_path / ".last.tmp-01234567"
    (tmp_path / "last").rename(tmp_path / "z")  # put back by the save of "next"
    shutil.copytree(tmp_path / ".last.tmp-01234567", tmp_path / "last")
    assert found(tmp_path).path == tmp_path / "last"
    (tmp_path / ".last.tmp-01234567" / "meta.pt").unlink()  # half removed
    point = found(tmp_path, warn=False)
    assert point.path == tmp_path / "last"
    assert [path.name for path, _ in point.passed_over] == [".last.tmp-01234567"]


def test_a_save_that_publishes_while_we_look_is_found(tmp_path: Path) -> None:
    save(tmp_path / "last", 1)
    (tmp_path / "last").rename(tmp_path / ".last.old-01234567")
    real = manifest.read

    def read(path: Path) -> dict[str, object]:
        if path.exists() and path.name.startswith("."):
            path.rename(tmp_path / "last")
        return real(path)

    with mock.patch.object(manifest, "read", read):
        assert found(tmp_path) == ResumePoint(path=tmp_path / "last", step=1, passed_over=())


def test_one_that_is_removed_while_we_look_is_left_out(tmp_path: Path) -> None:
    """Another process keeps the last few."""
    save(tmp_path / "a", 1)
    save(tmp_path / "b", 2)
    real = os.listdir

    def remove_and_list(path: Path) -> list[str]:
        if Path(path) == tmp_path / "a":
            shutil.rmtree(path)
        return real(path)

    with mock.patch.object(os, "listdir", remove_and_list):
        point = found(tmp_path)
    assert point == ResumePoint(path=tmp_path / "b", step=2, passed_over=())


def test_version_1_has_no_clock_of_its_own(tmp_path: Path) -> None:
    for seconds, name in ((100, "b"), (200, "a")):
        file = save(tmp_path / name) / MANIFEST
        content = json.loads(file.read_text())
        content["files"] = {name: entry["bytes"] for name, entry in content["files"].items()}
        content = {k: v for k, v in content.items() if "seconds" not in k and "crc32" not in k}
        file.write_text(json.dumps({**content, "version": 1}))
        os.utime(file, (seconds, seconds))
    assert found(tmp_path).path == tmp_path / "a"
