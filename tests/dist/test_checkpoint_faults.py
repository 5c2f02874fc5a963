"""Saves and loads that fail: on every rank, with one message, and nothing half done."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import pickle
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import (
    Reader,
    export_model,
    is_checkpoint,
    resume_point,
    state_of_model,
    state_of_optimizer,
    write,
)
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import Run, assert_equal, make_run, snapshot, train
from tests.support.drives import memory_drive
from tests.support.faults import (
    DAMAGES,
    Hits,
    disk_full,
    failing,
    fails_together,
    files_in,
    no_fault,
    powerless,
    same_on_all_ranks,
    times_in,
)
from tests.support.models import TinyLM
from tests.support.pool import RankPool


def _expected_files(world_size: int) -> list[str]:
    ranks = range(world_size)
    return sorted(
        [".metadata", "manifest.json", "meta.pt"]
        + [f"__{rank}_0.distcp" for rank in ranks]
        + [f"rng_{rank}.pt" for rank in ranks]
    )


def _first_save(root: str) -> None:
    run = make_run("plain", 3)
    run.engine.save(f"{root}/old", optimizers=[run.optimizer], side_files=_side_file)
    dist.barrier()
    rank = dist.get_rank()
    assert f"side-{rank}" in files_in(f"{root}/old")


def _side_file(folder: Path) -> None:
    (folder / f"side-{dist.get_rank()}").write_text("by the framework")


def _failing_saves(root: str) -> None:
    rank = dist.get_rank()
    run = make_run("plain", 3)
    train(run, range(1))
    old = f"{root}/old"
    dist.barrier()
    before = times_in(old)
    assert len(before) == 13
    state = snapshot(run.model, run.optimizer)

    def nothing_changed() -> None:
        dist.barrier()
        assert times_in(old) == before
        assert sorted(os.listdir(root)) == ["file", "old", "other"]
        assert Path(f"{root}/file").read_text() == "mine"
        assert files_in(f"{root}/other") == ["data"]
        assert_equal(state, snapshot(run.model, run.optimizer))
        dist.barrier()

    def save(path: str = old, **options: Any) -> Callable[[], None]:
        return lambda: run.engine.save(path, optimizers=[run.optimizer], **options)

    if rank == 0:
        Path(f"{root}/file").write_text("mine")
        os.mkdir(f"{root}/other")
        Path(f"{root}/other/data").write_text("mine")
    dist.barrier()

    def on_rank_1(action: Callable[[], Any]) -> Callable[[Path], None]:
        return lambda folder: action() if dist.get_rank() == 1 else None

    def refuse() -> None:
        raise PermissionError(13, "Permission denied", "x")

    fails_together(
        save(side_files=on_rank_1(lambda: pickle.dumps(lambda: None))), "failed on rank 1", "pickle"
    )
    nothing_changed()
    fails_together(save(side_files=on_rank_1(refuse)), "rank 1", "PermissionError")
    nothing_changed()
    text = fails_together(
        save(extra={"hooks": [1, {"f": lambda: None}], "a": 1}), "meta['extra']['hooks'][1]['f']"
    )
    assert "function" in text
    nothing_changed()
    fails_together(save(extra={"a": Run}), "meta['extra']['a'] is a type")
    run.optimizer.param_groups[0]["rule"] = refuse
    fails_together(save(), "['param_groups'][0]['rule'] is a function")
    del run.optimizer.param_groups[0]["rule"]
    fails_together(save(f"{root}/file"), "is a file")
    fails_together(save(f"{root}/other"), "a folder with other things in it")
    fails_together(save(f"{root}/file/below"), "rank 0", "Error")
    fails_together(save("/"), "path of a folder")
    nothing_changed()

    # The ranks do not hold the same.
    first = run.model.embed.weight
    run.optimizer.state[first]["own"] = torch.full((3,), float(rank))
    fails_together(save(), "same tensors", "embed.weight.own", "DTensor")
    run.optimizer.state[first]["own"] = torch.full((3,), 7.0)
    save(f"{root}/agreeing")()
    entry = Reader(f"{root}/agreeing").manifest["optimizers"][0]["embed.weight"]["own"]
    assert entry == {"shape": [3], "dtype": "float32"}
    run.optimizer.state[first]["own"] = [torch.ones(1)]
    fails_together(save(), "own of embed.weight", "list that holds tensors")
    del run.optimizer.state[first]["own"]
    if rank == 1:
        kept = run.optimizer.state.pop(first)
    fails_together(save(), "same tensors", "embed.weight")
    if rank == 1:
        run.optimizer.state[first] = kept
    models = [state_of_model(run.model)] if rank == 0 else []
    fails_together(
        lambda: write(old, models=models, optimizers=[], meta={}),
        "1 models and 0 optimizers",
        "0 models and 0 optimizers",
    )

    def strange() -> None:
        stranger = [torch.nn.Linear(2, 2)] if rank == 1 else []
        extra = [p for module in stranger for p in module.parameters()]
        optimizer = torch.optim.AdamW([*run.model.parameters(), *extra])
        run.engine.save(old, optimizers=[optimizer])

    fails_together(strange, "Saving failed on rank 1", "group 0 of AdamW")

    # Another rank's path does not count; what was at rank 0's is replaced, and nothing is left.
    save(old if rank == 0 else f"{root}/elsewhere")()
    dist.barrier()
    assert files_in(old) == _expected_files(2)
    assert sorted(os.listdir(root)) == ["agreeing", "file", "old", "other"]
    run.engine.load(old, optimizers=[run.optimizer])
    assert_equal(state, snapshot(run.model, run.optimizer))


def test_failed_saves_leave_the_previous_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    """Case 34; the older checkpoint was written by more ranks."""
    pool.run(_first_save, 4, str(tmp_path))
    assert (
        files_in(tmp_path / "old")
        == sorted(_expected_files(4) + [f"side-{rank}" for rank in range(4)])[: 3 + 4 + 4 + 4]
    )
    for rank in (2, 3):
        (tmp_path / "old" / f"side-{rank}").unlink()  # files of others may come and go
    pool.run(_failing_saves, 2, str(tmp_path))


def _replaced(root: str) -> None:
    run = make_run("plain", 2)
    world_size = dist.get_world_size()
    os.makedirs(f"{root}/empty", exist_ok=True)
    if dist.get_rank() == 0:
        os.symlink("empty", f"{root}/link")
    dist.barrier()
    for name in ("empty", "link", "empty", "new/deep"):
        run.engine.save(f"{root}/{name}")
        dist.barrier()
        assert files_in(f"{root}/{name}") == _expected_files(world_size)
        assert not os.path.islink(f"{root}/{name}")
    assert sorted(os.listdir(root)) == ["empty", "link", "new"]
    assert os.listdir(f"{root}/new") == ["deep"]


def test_what_may_be_replaced(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_replaced, 3, str(tmp_path))


def _damaged_loads(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=3))
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    run = Run(engine, model, optimizer)
    train(run, range(1))
    good, bad = f"{root}/good", Path(f"{root}/bad")
    before = snapshot(model, optimizer)

    def load(path: Any = bad, **options: Any) -> Callable[[], Any]:
        return lambda: engine.load(path, optimizers=[optimizer], **options)

    def rank0(action: Callable[[], Any]) -> None:
        if dist.get_rank() == 0:
            action()
        dist.barrier()

    def fails(*parts: str) -> None:
        fails_together(load(), *parts)
        assert_equal(before, snapshot(model, optimizer))
        dist.barrier()

    fails("nothing", str(bad))
    rank0(lambda: bad.write_text("x"))
    fails("Expected a checkpoint folder", str(bad))
    assert not is_checkpoint(bad)
    rank0(lambda: (bad.unlink(), bad.mkdir()))
    fails("an empty folder")
    rank0(lambda: [(bad / f"f{i}").write_text("x") for i in range(9)])
    fails("another kind of folder, with f0, f1", "and more")
    rank0(lambda: [file.unlink() for file in bad.iterdir()])
    manifest = json.loads(Path(f"{good}/manifest.json").read_text())
    assert manifest["version"] == 2 and manifest["files"].keys() == set(files_in(good)) - {
        "manifest.json"
    }
    for text, part in (
        ("{", "manifest.json is no JSON"),
        ("[]", "not a manifest"),
        ('{"format": "other"}', "not a manifest"),
        (json.dumps({**manifest, "version": 3}), "format version 3, this shardplug reads up to 2"),
        (
            json.dumps({**manifest, "version": 1, "files": {}, "models": None}),
            "models is None, expected a list",
        ),
        (json.dumps({**manifest, "stage": 2}), "manifest.json has other content than was written"),
    ):
        rank0(lambda text=text: (bad / "manifest.json").write_text(text))
        fails(part)

    # One rank asks for another path, or has another model: rank 0's path; an error on all.
    path = good if dist.get_rank() == 0 else f"{root}/nowhere"
    assert engine.load(path, optimizers=[optimizer]) == {"n": 1}
    before = snapshot(model, optimizer)
    other = [TinyLM(hidden=39)] if dist.get_rank() == 1 else [TinyLM()]
    fails_together(lambda: Reader(good).load(other), "Loading failed on rank 1", "(37, 18)")
    fails_together(
        lambda: Reader(good).model_state(0, other[0]), "Loading failed on rank 1", "(37, 18)"
    )
    too_many = "the state of 2 or more optimizers, but it has that of 1"
    fails_together(lambda: engine.load(good, optimizers=[optimizer] * 2), too_many)
    mine = [optimizer] if dist.get_rank() else []
    unequal = "rank 0 loads models: 1, optimizers: none"
    fails_together(lambda: engine.load(good, optimizers=mine), "load the same", unequal, "AdamW")
    extra: Any = [1] if dist.get_rank() else {}
    fails_together(
        lambda: engine.save(f"{root}/none", extra=extra), "failed on rank 1", "extra", "list"
    )
    fails_together(lambda: engine.load(f"{good}/meta.pt"), "inside of a checkpoint", good)
    if dist.get_rank() == 1:  # a reader of its own, into a plain model
        plain = TinyLM()
        Reader(good, alone=True).load(plain)
        assert torch.equal(plain.norm.weight, torch.ones(18))
    assert_equal(before, snapshot(model, optimizer))


def _good_folder(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=1))
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    assert len(state_of_optimizer(engine, optimizer)["param_groups"]) == 1
    engine.save(f"{root}/good", optimizers=[optimizer], extra={"n": 1})


def test_what_is_no_checkpoint_is_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_good_folder, 2, str(tmp_path))
    pool.run(_damaged_loads, 2, str(tmp_path))


Fault = Callable[[], AbstractContextManager[Hits]]


def _faults() -> list[tuple[str, int, Fault]]:
    """Name, rank and fault of everything that can go wrong while `old` is replaced."""
    files = {
        0: ("rng_0.pt", "meta.pt", "side-0", "__0_0.distcp", ".metadata.tmp", "manifest.json.tmp"),
        1: ("rng_1.pt", "side-1", "__1_0.distcp"),
    }
    faults: list[tuple[str, int, Fault]] = [
        (f"no room for {name}", rank, partial(disk_full, name, room=10))
        for rank, names in files.items()
        for name in names
    ]
    for call, number, path in (
        ("mkdir", 1, "/.old.tmp-"),
        ("open", 1, "/.old.tmp-"),
        ("rename", 1, "/.metadata.tmp"),
        ("rename", 1, "/manifest.json.tmp"),
        ("rename", 1, "/old"),  # out of the way
        ("rename", 2, "old"),  # into its place
    ):
        fault = partial(failing, call, number, path=path, code=errno.ENOSPC)
        faults.append((f"{call} {path}", 0, fault))
    return faults


def _try_faults(root: str, asynchronous: bool) -> None:
    rank = dist.get_rank()
    run = make_run("plain", 3)
    steps = itertools.count()

    def save() -> None:
        run.engine.save(
            f"{root}/old",
            optimizers=[run.optimizer],
            side_files=_side_file,
            async_save=asynchronous,
        )
        while asynchronous and run.engine.background.is_pending:
            train(run, [next(steps)])

    save()
    before = times_in(root)
    assert len(before) == 1 + 9, before

    def struck(name: str, victim: int, fault: Fault) -> bool:
        dist.barrier()
        with fault() if rank == victim else no_fault() as hits:
            if not name.startswith("fsync"):
                said = fails_together(save, f"Saving failed on rank {victim}: ")
                file = name.removeprefix("no room for ")
                known = file.startswith("side-") or file in said  # of those only the folder is
                assert file == name or ("File too large: '" in said and known), said
            else:  # how often it is called depends on whose files a rank sees
                try:
                    save()
                except CheckpointError:
                    assert hits.on_some_rank()
                else:
                    assert not hits.on_some_rank()
                    return False
        assert hits.on_some_rank(), name
        same_on_all_ranks(next(steps))  # raised at the same step
        dist.barrier()
        assert times_in(root) == before, name
        dist.barrier()
        return True

    for fault in _faults():
        assert struck(*fault)
    assert struck("no power", 0, powerless) and struck("no power", 1, powerless)
    for victim, least in ((0, 8), (1, 3)):
        numbers = range(1, 99)
        failed = itertools.takewhile(
            lambda n, victim=victim: struck(f"fsync {n}", victim, partial(failing, "fsync", n)),
            numbers,
        )
        assert len(list(failed)) >= least
        dist.barrier()
        before = times_in(root)
    state = snapshot(run.model, run.optimizer)
    save()
    dist.barrier()
    assert files_in(root) == list(before)
    other = make_run("plain", 2, seed=9)
    other.engine.load(f"{root}/old", optimizers=[other.optimizer])
    assert_equal(state, snapshot(other.model, other.optimizer))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_file_and_call_may_fail(pool: RankPool, asynchronous: bool) -> None:
    """Case 33: one message on all ranks, what was there stays, nothing else is left."""
    with tempfile.TemporaryDirectory() as root:  # pytest's own may be entered by its user only
        os.chmod(root, 0o755)
        pool.run(_try_faults, 2, root, asynchronous)


def _on_a_full_drive(drive: str, few_files: str) -> None:
    """The error says where, how much is needed and how much is free, on every rank."""
    rank = dist.get_rank()
    run = make_run("plain", 3)
    train(run, range(1))

    def large(folder: Path) -> None:
        torch.save(torch.zeros(10**6), folder / f"side-{rank}")  # torch hides the system's error

    def wait() -> None:
        run.engine.save(f"{drive}/c", optimizers=[run.optimizer], async_save=True)
        run.engine.wait_for_save()

    def save(path: str, **options: Any) -> Callable[[], None]:
        return lambda: run.engine.save(path, **options)

    whole = sum(p.numel() * 4 for p in run.model.parameters())
    for number, attempt in enumerate(
        (
            save(f"{drive}/c", optimizers=[run.optimizer]),
            wait,
            save(f"{drive}/c", side_files=large),
            lambda: export_model(run.engine, f"{drive}/out"),
        )
    ):
        if number == 3:  # needs less than a checkpoint
            gc.collect()  # errors may hold files that are gone, and their room
            dist.barrier()
            free = shutil.disk_usage(drive).free
            dist.barrier()
            if rank == 0:
                Path(f"{drive}/taken").write_bytes(bytes(free - 8192))
            dist.barrier()
        text = fails_together(attempt)
        said = re.search(r"take (\d+) bytes; (.*) has (\d+) bytes free\.", text)
        assert said is not None and said[2] == drive, text
        assert int(said[1]) >= whole * (1.5 if number < 2 else 1), text
        assert int(said[1]) > int(said[3]) > 0 or number == 2, text
        assert number == 2 or ("No space left on device" in text and f"'{drive}/" in text), text
        assert sorted(os.listdir(drive)) == (["taken"] if number == 3 else [])
        dist.barrier()
    text = fails_together(save(f"{few_files}/c"), "No space left", f"'{few_files}/.c.tmp-")
    assert "bytes free, and no inode for another file" in text


def test_a_full_drive_says_what_is_needed_and_free(pool: RankPool, tmp_path: Path) -> None:
    with (
        memory_drive(tmp_path / "drive", 128 * 1024) as drive,
        memory_drive(tmp_path / "few", 2**20, num_inodes=4) as few_files,
    ):
        pool.run(_on_a_full_drive, 2, str(drive), str(few_files))


def _save_for_damage(root: str) -> None:
    run = make_run("groups", 3)
    for step in (1, 2):
        train(run, [step])
        run.engine.save(
            f"{root}/step-{step}",
            optimizers=[run.optimizer],
            side_files=_side_file,
            extra={"step": step},
        )


def _load_damaged(root: str) -> None:
    """Damage each file of the newest checkpoint in each way."""
    run = make_run("groups", 2, seed=8)
    train(run, [7])
    before = snapshot(run.model, run.optimizer)
    newest, good = Path(root, "step-2"), Path(root, "step-1")
    names = files_in(newest)
    assert len(names) == 9

    def load() -> None:
        run.engine.load(newest, optimizers=[run.optimizer])

    for name, damage in itertools.product(names, DAMAGES):
        file = newest / name
        kept = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            damage(file)
        dist.barrier()
        where = (name, damage.__name__)
        fails_together(load, str(newest), name)
        after = snapshot(run.model, run.optimizer)
        if name.endswith(".distcp"):  # found while weights are read, so these may be new
            before = {k: after[k] if k.startswith("weight") else v for k, v in before.items()}
        assert_equal(before, after, where)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            point = resume_point(root, verify=True)
        assert point is not None and point.path == good, where
        ((passed_over, reason),) = point.passed_over
        assert passed_over == newest and name in reason, (where, reason)
        said = [str(w.message) for w in caught]
        assert (dist.get_rank() == 0) == any(reason in one for one in said), said
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(kept)
        dist.barrier()
    load()
    point = resume_point(root, verify=True)
    assert point is not None and point.path == newest and not point.passed_over
    assert run.engine.load(point.path)["step"] == 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_damage_of_any_file_is_found(pool: RankPool, tmp_path: Path, world_size: int) -> None:
    """Cases 32 and 33."""
    pool.run(_save_for_damage, 2, str(tmp_path))
    pool.run(_load_damaged, world_size, str(tmp_path))
