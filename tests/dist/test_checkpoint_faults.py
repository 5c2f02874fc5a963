"""Saves and loads that fail: on every rank, with one message, and nothing half done."""

from __future__ import annotations

import json
import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardplug import ZeroConfig, ZeroEngine
from shardplug.checkpoint import Reader, is_checkpoint, state_of_model, state_of_optimizer, write
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import Run, assert_equal, make_run, snapshot, train
from tests.support.models import TinyLM
from tests.support.pool import RankPool


def files_in(folder: str | Path) -> list[str]:
    """Every file and folder below `folder`, hidden ones too."""
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*"))


def same_on_all_ranks(text: str) -> str:
    """Assert that all ranks got one message, and return it."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


def fails_together(action: Callable[[], Any], *parts: str) -> str:
    """`action` raises CheckpointError on every rank, with one message that has all `parts`."""
    with pytest.raises(CheckpointError) as error:
        action()
    text = same_on_all_ranks(str(error.value))
    for part in parts:
        assert part in text, (part, text)
    return text


@contextmanager
def no_large_files(active: bool) -> Iterator[None]:
    """Let this process write no file beyond 4 kB, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.getsignal(signal.SIGXFSZ)
    assert handler == signal.SIG_IGN
    if active:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    before = {name: os.stat(f"{old}/{name}").st_mtime_ns for name in files_in(old)}
    assert len(before) == 13
    state = snapshot(run.model, run.optimizer)

    def nothing_changed() -> None:
        dist.barrier()
        assert {name: os.stat(f"{old}/{name}").st_mtime_ns for name in files_in(old)} == before
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

    for full in (0, 1):  # a disk that is full for one rank, which another rank does not see
        with no_large_files(rank == full):
            fails_together(save(), f"Saving failed on rank {full}")
        nothing_changed()

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

    fails("found nothing", str(bad))
    rank0(lambda: bad.write_text("x"))
    fails("found a file")
    assert not is_checkpoint(bad)
    rank0(lambda: (bad.unlink(), bad.mkdir()))
    fails("no manifest.json", "the folder is empty")
    rank0(lambda: [(bad / f"f{i}").write_text("x") for i in range(9)])
    fails("another kind of folder. It holds f0, f1", "and more")
    rank0(lambda: [file.unlink() for file in bad.iterdir()])
    import torch.distributed.checkpoint as dcp

    dcp.save({"a": torch.ones(2)}, checkpoint_id=bad)
    fails("plain torch.distributed.checkpoint folder", ".metadata")
    manifest = json.loads(Path(f"{good}/manifest.json").read_text())
    assert manifest["version"] == 1 and manifest["files"].keys() == set(files_in(good)) - {
        "manifest.json"
    }
    for text, part in (
        ("{", "manifest.json is damaged"),
        ("[]", "not a manifest"),
        ('{"format": "other"}', "not a manifest"),
        (json.dumps({**manifest, "version": 2}), "format version 2, this shardplug reads up to 1"),
        (json.dumps({k: manifest[k] for k in manifest if k != "models"}), "it lacks models"),
        (json.dumps({**manifest, "files": {}}), "cannot be read"),
    ):
        rank0(lambda text=text: (bad / "manifest.json").write_text(text))
        fails(part)

    # A good folder, then damaged in its parts.
    import shutil

    for name, part in (
        (".metadata", ".metadata is missing"),
        ("__1_0.distcp", "__1_0.distcp is missing"),
        ("meta.pt", "meta.pt is missing"),
        ("rng_1.pt", "rng_1.pt is missing"),
    ):
        rank0(lambda: shutil.rmtree(bad))
        rank0(lambda: shutil.copytree(good, bad))
        rank0(lambda name=name: (bad / name).unlink())
        fails(part)
    rank0(lambda: shutil.copy(f"{good}/rng_1.pt", bad / "rng_1.pt"))
    rank0(lambda: os.truncate(bad / "__0_0.distcp", 5000))
    fails("__0_0.distcp has 5000 bytes, ")
    rank0(lambda: shutil.copy(f"{good}/__0_0.distcp", bad / "__0_0.distcp"))
    rank0(lambda: _overwrite(bad / "meta.pt"))
    fails("meta.pt is damaged")
    rank0(lambda: shutil.copy(f"{good}/meta.pt", bad / "meta.pt"))
    rank0(lambda: _overwrite(bad / ".metadata"))
    fails_together(load(), "Reading", "failed on rank 0")
    assert_equal(before, snapshot(model, optimizer))
    dist.barrier()

    # One rank asks for another path, or has another model: rank 0's path; an error on all.
    path = good if dist.get_rank() == 0 else f"{root}/nowhere"
    assert engine.load(path, optimizers=[optimizer]) == {"n": 1}
    before = snapshot(model, optimizer)
    other = [TinyLM(hidden=39)] if dist.get_rank() == 1 else [TinyLM()]
    fails_together(lambda: Reader(good).load(other), "Loading failed on rank 1", "(37, 18)")
    fails_together(
        lambda: Reader(good).model_state(0, other[0]), "Loading failed on rank 1", "(37, 18)"
    )
    fails_together(lambda: engine.load(good, optimizers=[optimizer] * 2), "optimizer 1, but it has")
    if dist.get_rank() == 1:  # a reader of its own, into a plain model
        plain = TinyLM()
        Reader(good, alone=True).load(plain)
        assert torch.equal(plain.norm.weight, torch.ones(18))
    assert_equal(before, snapshot(model, optimizer))


def _overwrite(file: Path) -> None:
    file.write_bytes(b"\x00" * file.stat().st_size)


def _good_folder(root: str) -> None:
    engine = ZeroEngine(ZeroConfig(stage=1))
    model = engine.shard(TinyLM())
    optimizer = engine.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    assert len(state_of_optimizer(engine, optimizer)["param_groups"]) == 1
    engine.save(f"{root}/good", optimizers=[optimizer], extra={"n": 1})


def test_what_is_no_checkpoint_is_refused_on_every_rank(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_good_folder, 2, str(tmp_path))
    pool.run(_damaged_loads, 2, str(tmp_path))
