"""Swap folders: who may remove which, and when."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardplug.errors import ConfigError
from shardplug.tiers import filesystem as filesystem_module
from shardplug.tiers.file import SwapFile
from shardplug.tiers.filesystem import filesystem_of, free_bytes
from shardplug.tiers.swap import SwapFolder, remove_dead

ROOT = Path(__file__).resolve().parents[3]

RUN = "20260102-030405"
"""The beginning of a run's name."""

ENDINGS = """
import os, signal, sys
from pathlib import Path
from shardplug.tiers.swap import SwapFolder

root = Path(sys.argv[1])
for ending in ("return", "raise", "interrupt"):
    child = os.fork()
    if child == 0:
        folder = SwapFolder(root, ending, 0)
        (folder.path / "state.swap").write_bytes(b"x")
        assert folder.path.is_dir()
        sys.stderr.close()
        if ending == "raise":
            raise ValueError("as asked")
        if ending == "interrupt":
            signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs of a shell ignore it
            os.kill(os.getpid(), signal.SIGINT)
            signal.pause()
        sys.exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(ending, code, sorted(path.name for path in root.iterdir()), flush=True)
"""


def name(run: str) -> str:
    """Return the name of the folder of a run's first rank."""
    return f"shardplug-swap-{run}-rank0"


def test_runs_that_end_remove_their_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDINGS, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.splitlines() == ["return 0 []", "raise 1 []", "interrupt -2 []"]


def holder(root: Path, run: str) -> int:
    """Start a process that holds a folder until it is killed; return its number."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            folder = SwapFolder(root, run, 0)
            (folder.path / "state.swap").write_bytes(b"x" * 10)
            os.write(tell, b"x")
            signal.pause()
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(tell)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_dead_runs_are_removed_and_living_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    first, second = f"{RUN}-00000001", f"{RUN}-00000002"
    living, dead = holder(tmp_path, first), holder(tmp_path, second)
    kill(dead)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mine", name(first), name(second)}
    own = SwapFolder(tmp_path, "own", 3)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"mine", name(first), own.path.name}
    assert (tmp_path / name(first) / "state.swap").is_file()
    kill(living)
    assert [path.name for path in remove_dead(tmp_path)] == [name(first)]
    own.close()
    own.close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_half_made_folder_is_removed(tmp_path: Path) -> None:
    (tmp_path / name(f"{RUN}-0000000a")).mkdir()
    torn = tmp_path / name(f"{RUN}-0000000b")
    torn.mkdir()
    (torn / "state.swap").write_bytes(b"x")
    assert len(remove_dead(tmp_path)) == 2 and not list(tmp_path.iterdir())


def test_nothing_of_others_is_removed_and_no_link_is_followed(tmp_path: Path) -> None:
    """Folders that are named like ours, links to folders, and links in folders of ours."""
    root, outside = tmp_path / "nvme", tmp_path / "outside"
    for folder in (root, outside):
        folder.mkdir()
    (outside / "state.swap").write_text("precious")
    theirs = [
        "shardplug-swap-mydata-rank0",
        "shardplug-swap-aaaaaaaaaaaa-rank1",
        f"{name(f'{RUN}-00000001')}.backup",
        f"my-{name(f'{RUN}-00000002')}",
        name(f"{RUN}-0000000A"),
    ]
    for index, folder in enumerate(theirs):
        (root / folder).mkdir()
        (root / folder / ("state.swap" if index % 2 else "notes")).write_text("precious")
    for number, inside in enumerate(("notes", "other.swap", "lock/inner", "link")):
        folder = root / name(f"{RUN}-0000001{number}")
        (folder / inside).parent.mkdir(parents=True)
        (folder / "state.swap").write_text("precious")
        if inside == "link":
            (folder / "probe.swap").symlink_to(outside / "state.swap")
        else:
            (folder / inside).write_text("precious")
    (root / name(f"{RUN}-00000020")).symlink_to(outside)
    (root / name(f"{RUN}-00000021")).symlink_to(tmp_path / "nowhere")
    locked = root / name(f"{RUN}-00000022")
    locked.mkdir()
    (locked / "lock").symlink_to(tmp_path / "made")
    before = {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}
    assert len(before) > 25
    assert remove_dead(root) == []
    assert {path: path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))} == before
    # What a run makes for itself goes through no link either.
    for number in (20, 21):
        with pytest.raises(ConfigError, match="could not be made"):
            SwapFolder(root, f"{RUN}-000000{number}", 0)
    with pytest.raises(ConfigError, match="could not be made"):
        SwapFolder(root, f"{RUN}-00000022", 0)
    own = SwapFolder(root, f"{RUN}-00000030", 0)
    assert own.path.stat().st_mode & 0o777 == 0o700
    (own.path / "state.swap").symlink_to(outside / "state.swap")
    with pytest.raises(OSError, match="symbolic links"):
        SwapFile(own.path / "state.swap")
    own.close()
    assert not own.path.exists() and (outside / "state.swap").read_text() == "precious"
    assert {path: path.lstat().st_mtime_ns for path in sorted(outside.rglob("*"))} == {
        path: at for path, at in before.items() if path.is_relative_to(outside) and path != outside
    }


def test_folder_goes_with_its_object_but_not_in_a_child(tmp_path: Path) -> None:
    folder = SwapFolder(tmp_path, "run", 0)
    child = os.fork()
    if child == 0:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir()
    path = folder.path
    del folder
    gc.collect()
    assert not path.exists()


def test_many_starts_at_once(tmp_path: Path) -> None:
    """Each start looks for dead folders while the others make theirs."""
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for turn in range(20):
                    folder = SwapFolder(tmp_path, f"{RUN}-{number:04x}{turn:04x}", 0)
                    assert (folder.path / "lock").is_file()
                    (folder.path / "state.swap").write_text("here")
                    time.sleep(0.001)
                    assert (folder.path / "state.swap").read_text() == "here"
                    folder.close()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 8
    assert not list(tmp_path.iterdir())


def test_bad_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path / 'no'} does not exist"):
        SwapFolder(tmp_path / "no", "run", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        SwapFolder(tmp_path / "file", "run", 0)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(ConfigError, match="could not be made: Permission denied"):
        SwapFolder(tmp_path, "run", 0)


def test_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    inside = tmp_path / "a folder"
    inside.mkdir()
    escaped = str(inside).replace(" ", "\\040")
    monkeypatch.setattr(filesystem_module, "_MOUNTS", mounts)
    folder = SwapFolder(inside, "run", 0)
    for kind, word in (("ext4", None), ("tmpfs", "in memory|memory"), ("nfs4", "network")):
        mounts.write_text(
            "21 1 8:1 / / rw shared:1 - xfs /dev/sda rw\n"
            f"22 21 8:2 / {escaped} rw shared:1 - {kind} /dev/sdb rw\n"
            f"23 21 8:2 / {escaped}more rw - proc proc rw\n"
        )
        assert filesystem_of(inside).kind == kind
        assert filesystem_of(tmp_path).kind == "xfs"
        notice = folder.notice
        assert (notice is None) == (word is None)
        assert notice is None or (str(inside) in notice and kind in notice)
    mounts.unlink()
    assert filesystem_of(inside).kind == "unknown" and folder.notice is None
    assert free_bytes(inside) > 0
