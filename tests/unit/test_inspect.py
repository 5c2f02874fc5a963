"""`shardplug.checkpoint.inspect`: what is in a folder, and whether it is whole."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from shardplug.checkpoint import inspect, write
from shardplug.checkpoint.read.inspection import inspect_folder
from shardplug.errors import CheckpointError


def save(path: Path, step: int = 3) -> Path:
    """Write a small checkpoint without ranks: a model of 14 parameters and its Adam state."""
    torch.manual_seed(step)
    model = nn.Linear(6, 2)
    moments = {
        name: {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(p), "plain": 1}
        for name, p in model.named_parameters()
    }
    write(
        path,
        models=[{name: p.detach() for name, p in model.named_parameters()}],
        optimizers=[{"state": moments, "param_groups": [{"params": ["weight", "bias"]}]}],
        meta={},
        run={"step": step, "stage": 2, "framework": "lightning", "replicate_size": 1},
    )
    return path


def flip(file: Path, at: int) -> None:
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def rewrite_keys(path: Path, old: str, new: str) -> None:
    """Change the beginning of the keys that a folder's tensors are under."""
    file = path / ".metadata"
    metadata = pickle.loads(file.read_bytes())

    def renamed(key: str) -> str:
        return new + key.removeprefix(old) if key.startswith(old) else key

    entries, storage = metadata.state_dict_metadata, metadata.storage_data
    metadata.state_dict_metadata = {renamed(key): entry for key, entry in entries.items()}
    metadata.storage_data = {
        dataclasses.replace(index, fqn=renamed(index.fqn)): info for index, info in storage.items()
    }
    metadata.planner_data = None
    file.write_bytes(pickle.dumps(metadata))


def test_what_is_inside(tmp_path: Path) -> None:
    info = inspect(save(tmp_path / "it"), verify=True)
    assert (info.kind, info.health, info.verified, info.problems) == (
        "shardplug",
        "whole",
        True,
        (),
    )
    assert (info.framework, info.stage, info.world_size, info.step) == ("lightning", 2, 1, 3)
    assert (info.version, info.torch) == (2, torch.__version__)
    assert info.saved_at is not None and info.saved_at.endswith("Z")
    (model,), (optimizer,) = info.models, info.optimizers
    assert (model.tensors, model.parameters, model.bytes) == (2, 14, 56)
    assert (optimizer.tensors, optimizer.parameters, optimizer.bytes) == (4, 2, 64)
    assert model.dtypes == {"float32": 56}
    total = sum(
        file.stat().st_size for file in (tmp_path / "it").iterdir() if file.name != "manifest.json"
    )
    assert info.bytes == {"model": 56, "optimizer": 64, "other": total - 120, "total": total}
    assert info.tensors["weight"]["shape"] == [2, 6]
    assert "optimizer_0/bias/exp_avg" in info.tensors and len(info.tensors) == 6
    assert not inspect(tmp_path / "it").verified


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "it")
    flip(path / "__0_0.distcp", 200)
    (path / "rng_0.pt").write_bytes(b"short")
    (path / "meta.pt").unlink()
    quick = inspect(path)
    assert quick.health == "damaged"
    assert [name for name, _ in quick.problems] == ["meta.pt", "rng_0.pt"]
    full = dict(inspect(path, verify=True).problems)
    assert sorted(full) == ["__0_0.distcp", "meta.pt", "rng_0.pt"]
    assert full["__0_0.distcp"].startswith("has other bytes than were written, between 0 and")
    assert full["meta.pt"] == "is missing"
    assert full["rng_0.pt"].startswith("has 5 bytes, ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "Expecting property name"),
        ('{"format": "other"}', "is not a manifest of shardplug"),
        ('{"format": "shardplug"}', "has no version"),
        ('{"format": "shardplug", "version": 2}', "has other content than was written"),
        ('{"format": "shardplug", "version": 1}', "lacks models, optimizers, world_size, files"),
        ("", "Expecting value"),
    ],
)
def test_a_damaged_manifest(tmp_path: Path, content: str, said: str) -> None:
    path = save(tmp_path / "it")
    (path / "manifest.json").write_text(content)
    info = inspect(path, verify=True)
    assert info.health == "damaged"
    ((name, wrong),) = info.problems
    assert name == "manifest.json" and said in wrong


def test_older_and_newer_versions(tmp_path: Path) -> None:
    path = save(tmp_path / "it")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["version"] = 99
    (path / "manifest.json").write_text(json.dumps(manifest))
    newer = inspect(path)
    assert (newer.health, newer.version, newer.loads) == ("newer", 99, False)
    assert "install a newer one" in newer.advice

    old = {k: manifest[k] for k in ("format", "models", "optimizers", "world_size")}
    old |= {"version": 1, "files": {n: e["bytes"] for n, e in manifest["files"].items()}}
    (path / "manifest.json").write_text(json.dumps(old))
    assert "is no tensor in its files" in str(inspect(path, verify=True).problems)
    rewrite_keys(path, "model.", "state_dict.")  # as they were in version 1
    old["files"][".metadata"] = (path / ".metadata").stat().st_size
    (path / "manifest.json").write_text(json.dumps(old))
    info = inspect(path, verify=True)
    assert (info.health, info.verified, info.version) == ("whole", False, 1)
    assert info.saved_at is not None and info.step is None


def test_a_folder_of_checkpoints_newest_first(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", step)
    assert inspect_folder(tmp_path / "step-1") is None
    flip(tmp_path / "step-3" / "__0_0.distcp", 200)
    (tmp_path / ".step-4.tmp-0123abcd").mkdir()
    (tmp_path / ".step-4.tmp-0123abcd" / "__0_0.distcp").write_bytes(b"")
    (tmp_path / "logs").mkdir()
    for verify, taken in ((False, "step-3"), (True, "step-2")):
        found = inspect_folder(tmp_path, verify=verify)
        assert found is not None and found.resume == tmp_path / taken
        assert [info.path.name for info in found.checkpoints] == [
            "step-3",
            "step-2",
            "step-1",
            ".step-4.tmp-0123abcd",
        ]
        health = [info.health for info in found.checkpoints]
        assert health == ["damaged" if verify else "whole", "whole", "whole", "unfinished"]
    (tmp_path / "empty").mkdir()
    assert inspect_folder(tmp_path / "empty") is None


def test_folders_of_other_tools(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(CheckpointError, match="found nothing"):
        inspect(tmp_path / "none")
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "zero_to_fp32.py").write_text("")
    info = inspect(tmp_path / "ds")
    assert (info.kind, info.health, info.loads) == ("deepspeed", "foreign", False)
    assert "--safe_serialization" in info.advice
    (tmp_path / "hf").mkdir()
    save_file({"a": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "hf" / "model.safetensors")
    info = inspect(tmp_path / "hf")
    assert (info.kind, info.health, info.loads) == ("safetensors", "foreign", True)
    assert info.models[0].dtypes == {"bfloat16": 6}
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"12345678")
    assert inspect(tmp_path / "hf").health == "damaged"


def test_folders_of_trainer_name_the_sharded_one(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-4"
    sharded = checkpoint / "pytorch_model_fsdp_and_optimizer"
    sharded.mkdir(parents=True)
    (sharded / "manifest.json").touch()
    (checkpoint / "adapter_config.json").touch()
    for path in (tmp_path, checkpoint):
        info = inspect(path)
        assert not info.loads and str(sharded) in (info.advice or "")
        assert "Hugging Face's Trainer" in (info.description or "")


def test_info_is_frozen(tmp_path: Path) -> None:
    info = inspect(save(tmp_path / "it"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.health = "damaged"  # type: ignore[misc]
