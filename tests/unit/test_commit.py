"""How a folder is published, and what is cleaned up after saves that died."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardplug.checkpoint.format.commit import MANIFEST, StagingFolder, is_leftover, locate, new_id
from shardplug.errors import CheckpointError
from tests.support.faults import failing, files_in

OWN = '{"format": "shardplug"}'


def folder(path: Path, text: str = "", *, whole: bool = True) -> Path:
    """Make what looks like a checkpoint."""
    path.mkdir(parents=True)
    (path / "__0_0.distcp").write_text(text)
    if whole:
        (path / MANIFEST).write_text(OWN)
    return path


def fill(aside: StagingFolder, text: str) -> None:
    (aside.folder / "__0_0.distcp").write_text(text)
    (aside.folder / MANIFEST).write_text(OWN)


def save(target: Path, text: str) -> None:
    aside = StagingFolder(target, new_id())
    aside.open()
    fill(aside, text)
    try:
        aside.publish()
    except OSError:
        aside.discard()
        raise


def content(path: Path) -> str:
    return (locate(path) / "__0_0.distcp").read_text()


def test_a_folder_is_published_and_replaced(tmp_path: Path) -> None:
    save(tmp_path / "a", "1")
    save(tmp_path / "a", "2")
    assert content(tmp_path / "a") == "2"
    assert files_in(tmp_path) == ["a", "a/__0_0.distcp", f"a/{MANIFEST}"]


@pytest.mark.parametrize("made", [(), ("x",)])
def test_parents_are_made_and_go_with_a_failed_save(tmp_path: Path, made: tuple[str, ...]) -> None:
    root = tmp_path.joinpath(*made)
    root.mkdir(exist_ok=True)
    before = files_in(tmp_path)
    aside = StagingFolder(root / "b" / "c" / "d", new_id())
    aside.open()
    assert aside.folder.parent == root / "b" / "c"
    aside.discard()
    assert files_in(tmp_path) == before
    aside = StagingFolder(root / "b" / "c" / "d", new_id())
    aside.open()
    (root / "b" / "mine").write_text("another's")
    aside.discard()
    assert files_in(root) == ["b", "b/mine"]


def test_only_checkpoints_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    folder(tmp_path / "other", whole=False)
    for name, message in (("file", "is a file"), ("other", "with other things in it")):
        with pytest.raises(CheckpointError, match=message):
            StagingFolder(tmp_path / name, new_id()).open()
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", "1")
    assert content(tmp_path / "empty") == "1"


def dead(target: Path, kind: str, text: str, *, whole: bool = True) -> Path:
    return folder(target.with_name(f".{target.name}.{kind}-{new_id()}"), text, whole=whole)


def test_a_killed_save_before_its_manifest(tmp_path: Path) -> None:
    save(tmp_path / "a", "1")
    dead(tmp_path / "a", "tmp", "2", whole=False)
    dead(tmp_path / "b", "tmp", "2", whole=False)
    assert content(tmp_path / "a") == "1"
    save(tmp_path / "c", "3")
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]


def test_a_killed_save_before_its_first_rename(tmp_path: Path) -> None:
    """What is whole may be what the run goes on from: it goes when there is a newer one."""
    save(tmp_path / "a", "1")
    left = dead(tmp_path / "a", "tmp", "2")
    aside = StagingFolder(tmp_path / "c", new_id())
    aside.open()
    assert left.is_dir() and content(tmp_path / "a") == "1"
    aside.discard()
    assert left.is_dir()
    save(tmp_path / "c", "3")
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]


def test_a_killed_save_between_its_renames(tmp_path: Path) -> None:
    old, new = dead(tmp_path / "a", "old", "1"), dead(tmp_path / "a", "tmp", "2")
    assert locate(tmp_path / "a") == old and content(tmp_path / "a") == "1"
    aside = StagingFolder(tmp_path / "b", new_id())
    aside.open()  # puts it back
    assert (
        not old.exists() and (tmp_path / "a" / "__0_0.distcp").read_text() == "1" and new.is_dir()
    )
    fill(aside, "3")
    aside.publish()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_killed_save_after_its_renames(tmp_path: Path) -> None:
    save(tmp_path / "a", "2")
    dead(tmp_path / "a", "old", "1")
    dead(tmp_path / "a", "old", "half removed", whole=False)
    assert content(tmp_path / "a") == "2"
    save(tmp_path / "b", "3")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"] and content(tmp_path / "a") == "2"


def test_a_half_removed_folder_does_not_come_back(tmp_path: Path) -> None:
    dead(tmp_path / "a", "old", "half removed", whole=False)
    assert locate(tmp_path / "a") == tmp_path / "a"
    save(tmp_path / "b", "3")
    assert os.listdir(tmp_path) == ["b"]


def test_living_saves_are_left_alone(tmp_path: Path) -> None:
    one, two = StagingFolder(tmp_path / "a", new_id()), StagingFolder(tmp_path / "b", new_id())
    one.open()
    fill(one, "1")
    two.open()
    fill(two, "2")
    save(tmp_path / "c", "3")
    assert one.folder.is_dir() and two.folder.is_dir()
    # In the middle of its renames, too: the old folder is held by the lock on the new one.
    save(tmp_path / "d", "old")
    three = StagingFolder(tmp_path / "d", new_id())
    three.open()
    fill(three, "new")
    old = tmp_path / f".d.old-{three.folder.name[-8:]}"
    (tmp_path / "d").rename(old)
    save(tmp_path / "c", "4")
    assert old.is_dir() and not (tmp_path / "d").exists()
    old.rename(tmp_path / "d")
    for aside in (one, two, three):
        aside.publish()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "d"]
    assert [content(tmp_path / name) for name in "abcd"] == ["1", "2", "4", "new"]


def test_two_saves_to_one_path_both_leave_it_whole(tmp_path: Path) -> None:
    one, two = StagingFolder(tmp_path / "a", new_id()), StagingFolder(tmp_path / "a", new_id())
    for aside, text in ((one, "1"), (two, "2")):
        aside.open()
        fill(aside, text)
    two.publish()
    one.publish()
    assert content(tmp_path / "a") == "1" and os.listdir(tmp_path) == ["a"]


def test_a_lock_goes_with_the_save_not_with_its_children(tmp_path: Path) -> None:
    """Data loader workers that are forked meanwhile hold a copy of the lock's handle."""
    aside = StagingFolder(tmp_path / "a", new_id())
    aside.open()
    assert aside._lock is not None
    os.set_inheritable(aside._lock, True)
    child = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False
    )
    try:
        fill(aside, "1")
        aside.publish()
        handle = os.open(tmp_path / "a", os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    finally:
        child.communicate(b"\n")


def test_without_locks_only_leftovers_of_the_same_path_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    mine = dead(tmp_path / "a", "tmp", "1", whole=False)
    others = dead(tmp_path / "b", "tmp", "1", whole=False)
    save(tmp_path / "a", "2")
    assert content(tmp_path / "a") == "2" and not mine.exists() and others.is_dir()


def test_links_are_replaced_and_put_back(tmp_path: Path) -> None:
    save(tmp_path / "a", "1")
    (tmp_path / "last").symlink_to("a")
    with failing("rename", 2, path="last"), pytest.raises(OSError, match="fault"):
        save(tmp_path / "last", "2")
    assert os.readlink(tmp_path / "last") == "a" and content(tmp_path / "last") == "1"
    (tmp_path / "last").rename(tmp_path / ".last.old-01234567")  # a kill just here
    assert content(tmp_path / "last") == "1"
    save(tmp_path / "b", "3")
    assert os.readlink(tmp_path / "last") == "a"
    save(tmp_path / "last", "2")
    assert not (tmp_path / "last").is_symlink() and content(tmp_path / "last") == "2"
    (tmp_path / "lost").symlink_to("nowhere")
    save(tmp_path / "lost", "4")
    assert content(tmp_path / "lost") == "4" and content(tmp_path / "a") == "1"
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "last", "lost"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_rename_leaves_the_old_one(tmp_path: Path, number: int) -> None:
    save(tmp_path / "a", "1")
    aside = StagingFolder(tmp_path / "a", new_id())
    aside.open()
    fill(aside, "2")
    with failing("rename", number), pytest.raises(OSError, match="fault"):
        aside.publish()
    assert content(tmp_path / "a") == "1"
    aside.discard()
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_fsync_takes_the_new_one_back(tmp_path: Path, number: int) -> None:
    save(tmp_path / "a", "1")
    aside = StagingFolder(tmp_path / "a", new_id())
    aside.open()
    fill(aside, "2")
    with failing("fsync", number), pytest.raises(OSError, match="fault"):
        aside.publish()
    aside.discard()
    assert content(tmp_path / "a") == "1" and os.listdir(tmp_path) == ["a"]


def test_what_cannot_be_removed_is_said_and_not_taken_for_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **options: bool) -> None:
        if not options.get("ignore_errors"):
            raise PermissionError(13, "Permission denied")

    save(tmp_path / "a", "1")
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(UserWarning, match="earlier save could not be removed"):
        save(tmp_path / "a", "2")
    assert content(tmp_path / "a") == "2"
    aside = StagingFolder(tmp_path / "b", new_id())
    with pytest.warns(UserWarning, match="earlier save could not be removed"):
        aside.open()
    fill(aside, "3")
    aside.discard()
    left = [path for path in tmp_path.iterdir() if is_leftover(path)]
    assert len(left) == 2 and not any((path / MANIFEST).exists() for path in left)
