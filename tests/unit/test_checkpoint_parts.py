"""The parts of checkpoints that need no ranks: names, plain values, manifest, random state."""

from __future__ import annotations

import enum
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardplug.checkpoint import (
    Reader,
    is_checkpoint,
    load_optimizer,
    state_of_model,
    state_of_optimizer,
    write,
)
from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.durable import file_checksums
from shardplug.checkpoint.format.plain import culprit, load_plain
from shardplug.checkpoint.read import stored_tensors as source
from shardplug.checkpoint.state.extra_state import decode, encode
from shardplug.checkpoint.state.rank_rng import rng_state, set_rng_state
from shardplug.checkpoint.state.tensor_names import clean_name, listed, pair
from shardplug.checkpoint.write.snapshot import Snapshot, SnapshotMemory
from shardplug.collective import rank_and_size, together
from shardplug.errors import CheckpointError


def paired(own: list[str], saved: list[str]) -> dict[str, str]:
    return dict(pair({name: {name} for name in own}, saved).saved)


def test_names_pair_as_they_are() -> None:
    found = pair({"a.w": {"a.w"}, "b.w": {"b.w", "tied.w"}, "c": {"c"}}, ["a.w", "tied.w", "d"])
    assert found.saved == {"a.w": "a.w", "b.w": "tied.w"}
    assert found.missing == ("c",) and found.unexpected == ("d",) and not found.repeated
    found = pair({"b.w": {"b.w", "tied.w"}}, ["b.w", "tied.w"])
    assert found.saved == {"b.w": "b.w"} and found.unexpected == ("tied.w",)
    assert found.repeated == {"tied.w"}


@pytest.mark.parametrize("front", ["model.", "a.b."])
def test_names_pair_through_a_constant_prefix(front: str) -> None:
    own = ["embed.weight", "blocks.0.up.weight", "blocks.1.up.weight", "head.weight"]
    long = [front + name for name in own]
    assert paired(own, long) == dict(zip(own, long, strict=True))
    assert paired(long, own) == dict(zip(long, own, strict=True))
    # Also when some are missing or in the way.
    assert paired(own, [*long[:3], "loss.weight"]) == dict(zip(own[:3], long[:3], strict=True))
    assert paired([*long, "loss.pos_weight"], own[1:]) == dict(zip(long[1:], own[1:], strict=True))


def test_names_do_not_pair_by_coincidence() -> None:
    own = ["0.weight", "0.bias", "2.weight", "2.bias"]
    # Two prefixes fit equally well: a student and a teacher.
    both = [f"{front}.{name}" for front in ("student", "teacher") for name in own]
    assert paired(own, both) == {}
    # A prefix that only few names have.
    few = ["encoder.0.weight", "encoder.0.bias", "x.a", "x.b", "x.c"]
    assert paired([*own, "y.d", "y.e"], few) == {}
    # One name that fits as it is rules prefixes out.
    assert paired(own, ["0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]) == {
        "0.weight": "0.weight"
    }
    assert paired(own, []) == {} and paired([], own) == {}


def test_names_are_cleaned_and_listed() -> None:
    assert clean_name("a._orig_mod.b._checkpoint_wrapped_module.c") == "a.b.c"
    assert listed([]) == "none"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    "value",
    [None, True, 1, 2.5, "s", b"", b"x", 3j, [1, (2, {3})], {"a": {1: torch.ones(2)}},
     torch.float32, torch.device("cpu"), torch.Size([1]), {"t": (torch.zeros(0), [None])}],
)  # fmt: skip
def test_plain_values_read_back(value: Any, tmp_path: Path) -> None:
    assert culprit("meta", value) is None
    torch.save(value, tmp_path / "f")
    assert repr(load_plain(tmp_path / "f")) == repr(value)
    assert repr(decode("x", encode("x", value))) == repr(value)


@pytest.mark.parametrize(
    ("value", "where"),
    [(lambda: 1, "meta"), ({"a": [0, Color.RED]}, "meta['a'][1]"), ({"p": Path("x")}, "meta['p']"),
     ({"m": {"n": nn.Linear(1, 1)}}, "meta['m']['n']"), ((1, object()), "meta[1]")],
)  # fmt: skip
def test_other_values_are_named(value: Any, where: str) -> None:
    found = culprit("meta", value)
    assert found is not None and found[0] == where
    with pytest.raises(CheckpointError, match="extra state x"):
        encode("x", value)


def test_a_uint8_tensor_is_no_packed_state() -> None:
    own = torch.tensor([1, 2], dtype=torch.uint8)
    assert decode("x", own) is own
    packed = encode("x", {"a": 1})
    with pytest.raises(CheckpointError, match="extra state x is damaged"):
        decode("x", packed[:-20])


def test_together_names_the_error() -> None:
    assert rank_and_size() == (0, 1)
    assert together(lambda: 3, "Doing") == 3
    with pytest.raises(
        CheckpointError, match=r"Doing failed on rank 0: OSError: \[Errno 28\] full"
    ):
        together(lambda: _raise(OSError(28, "full")), "Doing")
    with pytest.raises(CheckpointError, match="^as it is$"):
        together(lambda: _raise(CheckpointError("as it is")), "Doing")
    with pytest.raises(KeyboardInterrupt):
        together(lambda: _raise(KeyboardInterrupt()), "Doing")


def _raise(error: BaseException) -> None:
    raise error


def test_random_state_round_trip(tmp_path: Path) -> None:
    import numpy

    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    torch.save(rng_state(), tmp_path / "rng.pt")
    drawn = [torch.rand(2).tolist(), random.random(), numpy.random.rand(), random.gauss(0, 1)]
    set_rng_state(load_plain(tmp_path / "rng.pt"))
    again = [torch.rand(2).tolist(), random.random(), numpy.random.rand(), random.gauss(0, 1)]
    assert drawn == again


class Trap:
    """Unpickling it runs code."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 3",)


def small_checkpoint(path: Path) -> nn.Module:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    write(
        path,
        models=[state_of_model(model)],
        optimizers=[state_of_optimizer(model, optimizer)],
        meta={"step": 4},
        run={"framework": "none", "stage": 1},
    )
    return model


def test_one_process_without_a_group_writes_and_reads(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert not is_checkpoint(tmp_path / "c")
    model = small_checkpoint(tmp_path / "c")
    assert is_checkpoint(tmp_path / "c") and is_checkpoint(str(tmp_path / "c"))
    reader = Reader(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert manifest.pop("manifest_crc32") > 0
    assert reader.manifest == manifest and manifest["version"] == 2
    assert manifest["models"] == [
        {
            "weight": {"shape": [2, 3], "dtype": "float32"},
            "bias": {"shape": [2], "dtype": "float32"},
        }
    ]
    assert manifest["framework"] == "none" and manifest["world_size"] == 1
    files = {p.name: p.stat().st_size for p in (tmp_path / "c").iterdir()}
    del files["manifest.json"]
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == files
    assert all(len(entry["crc32"]) == 1 for entry in manifest["files"].values()) and len(files) == 4
    assert (reader.num_models, reader.num_optimizers) == (1, 1)
    assert reader.meta == {"step": 4} and reader.meta is reader.meta
    target = nn.Linear(3, 2)
    assert reader.load(target) == [([], [])]
    assert torch.equal(target.weight, model.weight) and torch.equal(target.bias, model.bias)
    assert reader.restore_rng()
    drawn = torch.rand(3)
    assert reader.restore_rng()
    assert torch.equal(drawn, torch.rand(3))
    with pytest.raises(
        CheckpointError, match="state of 2 or more optimizers, but it has that of 1"
    ):
        reader.optimizer_state(1, target)


def test_meta_is_read_once_and_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint(tmp_path / "c")
    opened, allowed = [], []
    original, load_plain = torch.load, source.load_plain

    def counting(file: Any) -> Any:
        opened.append(Path(file).name)
        return load_plain(file)

    def loading(file: Any, **options: Any) -> Any:
        allowed.append(options["weights_only"])
        return original(file, **options)

    monkeypatch.setattr(source, "load_plain", counting)
    monkeypatch.setattr(torch, "load", loading)
    reader = Reader(tmp_path / "c")
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    reader.load(model, [optimizer])
    reader.optimizer_state(0, model, optimizer)
    assert reader.meta["step"] == 4
    assert opened == ["meta.pt"] and set(allowed) == {True}

    file = tmp_path / "c" / "meta.pt"
    torch.save({"step": 4, "trap": Trap()}, file)
    with pytest.raises(CheckpointError, match="damaged: meta.pt"):
        Reader(tmp_path / "c")
    manifest = manifests.parse(tmp_path / "c")
    manifest["files"]["meta.pt"] = file_checksums(file)
    (tmp_path / "c" / "manifest.json").write_text(manifests.to_json(manifest))
    trapped = Reader(tmp_path / "c")
    with pytest.raises(CheckpointError, match="meta.pt is damaged, or holds objects that run code"):
        _ = trapped.meta
    target = nn.Linear(3, 2)
    assert trapped.load(target) == [([], [])]  # the tensors do not need it
    assert torch.equal(target.weight, model.weight)


def test_schedules_and_the_scaler_can_be_kept_as_extra(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    kinds = torch.optim.lr_scheduler
    short = [kinds.LinearLR(optimizer, total_iters=2), kinds.CosineAnnealingLR(optimizer, 5)]
    schedules = {
        "lambda": kinds.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "cosine": kinds.CosineAnnealingLR(optimizer, 9),
        "cycle": kinds.OneCycleLR(optimizer, 0.1, total_steps=9),
        "plateau": kinds.ReduceLROnPlateau(optimizer),
        "sequence": kinds.SequentialLR(optimizer, short, milestones=[2]),
    }
    optimizer.step()
    for name, schedule in schedules.items():
        schedule.step(*([1.0] if name == "plateau" else []))
    extra: dict[str, Any] = {name: schedule.state_dict() for name, schedule in schedules.items()}
    extra["scaler"] = torch.amp.GradScaler("cpu").state_dict()
    write(tmp_path / "c", models=[state_of_model(model)], optimizers=[], meta={"extra": extra})
    read = Reader(tmp_path / "c").meta["extra"]
    assert read == extra and read["scaler"]["scale"] > 1
    for name, schedule in schedules.items():
        schedule.load_state_dict(read[name])
        assert schedule.last_epoch == 1


def test_write_refuses_before_it_makes_anything(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"meta\['a'\] is a Color"):
        write(tmp_path / "c", models=[], optimizers=[], meta={"a": Color.RED})
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_alone_and_a_model_alone(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    write(tmp_path / "o", models=[], optimizers=[state_of_optimizer(model, optimizer)], meta={})
    other = torch.optim.SGD(model.parameters(), 0.5, momentum=0.1)
    state = Reader(tmp_path / "o").optimizer_state(0, model, other)
    assert torch.equal(state["state"]["bias"]["momentum_buffer"], torch.ones(2))
    assert state["param_groups"][0]["lr"] == 0.1 and state["class"] == "SGD"
    with pytest.raises(CheckpointError, match="hold model 0, but it has 0"):
        Reader(tmp_path / "o").load(model)


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, "cpu"), ({"fused": True}, "meta"), ({"capturable": True}, "meta"),
     ({"fused": None, "capturable": False}, "cpu")],
)  # fmt: skip
def test_the_step_counter_lies_where_torch_keeps_it(options: dict[str, Any], device: str) -> None:
    """An accelerator is stood in for by the meta device."""
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    state = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3, dtype=torch.float64)}},
        "param_groups": [{**optimizer.param_groups[0], **options, "params": [0]}],
    }
    model = nn.Module()
    model.weight = parameter
    load_optimizer(model, optimizer, state)
    found = optimizer.state[parameter]
    assert found["step"].device.type == device and found["step"].dtype == torch.float32
    assert found["exp_avg"].device.type == "meta"
    assert found["exp_avg"].dtype == torch.float64  # never rounded to the parameter's dtype


def test_numbers_of_old_state_dicts_become_tensors() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    values = {"step": 7, "exp_avg": torch.zeros(1, 2), "exp_avg_sq": torch.zeros(1, 2)}
    load_optimizer(
        model, optimizer, {"state": {0: values}, "param_groups": [{"lr": 2.0, "params": [0, 1]}]}
    )
    assert torch.is_tensor(optimizer.state[model.weight]["step"])
    assert optimizer.param_groups[0]["lr"] == 2.0
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state[model.weight]["step"] == 8


def test_a_snapshot_holds_copies_of_tensors_of_any_size_and_dtype() -> None:
    moments = torch.arange(3, dtype=torch.float64)
    tensors: dict[str, Any] = {
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0),
        "number": torch.tensor(5, dtype=torch.int32),
        "optimizer": {"moments": moments},
    }
    snapshot = Snapshot(tensors, SnapshotMemory())
    tensors["flags"].zero_()
    moments.zero_()
    assert snapshot["flags"].tolist() == [True, False, True]
    assert snapshot["optimizer.moments"].tolist() == [0.0, 1.0, 2.0]
    assert snapshot["number"].item() == 5 and snapshot["empty"].shape == (0,)
