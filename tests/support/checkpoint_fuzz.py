"""Changes checkpoints at random, and sees that each is loaded right or refused.

    python -m tests.support.checkpoint_fuzz FOLDER SEED COUNT

runs COUNT changes of the files that describe tensors, and prints one line of JSON with what became
of them. A change fails when anything but a `ShardplugError` is raised, when a load gives other
values, when it takes too long or too much memory, when something is written outside of the
scratch folder, or when code in a file runs.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from shardplug.checkpoint import Reader, inspect, state_of_model, state_of_optimizer, write
from shardplug.checkpoint.export.exporting import export_checkpoint
from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.durable import file_checksums
from shardplug.checkpoint.format.safetensors_file import header_bytes
from shardplug.errors import ShardplugError

SECONDS = 10.0
"""CPU time that one change may take; nearly all take a hundredth of a second."""

MEMORY = 1 << 30
"""Bytes of address space that all changes together may take beyond what is there before."""

NASTY: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 255, 2**25, 2**31, 2**62, 2**63, 2**70, -(2**63)),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), "", ".", "..", "x", "0", "float32", "hub"),
    *("../victim", "../../victim", "/tmp/victim", "a/../../b", "a\\b", "a\0b", "\x1b[31mred"),
    *("\ud800", "x" * 300, "x" * 5000, "name\nof two lines", "model7::a", "modelx::a", "::", "a.b"),
    *("__0_0.distcp", "meta.pt", "manifest.json", "link", "linked/file", "torch.float32"),
    *([], {}, [[]], [1, "a"], [-1, 4], [2**25, 2**25], [2**40] * 40, [None], {"a": None}, ["x"]),
    *({"shape": [4], "dtype": "float32"}, {"bytes": 3}, {"bytes": "many"}, {"crc32": []}),
)


# -- The folders -----------------------------------------------------------------------------------


class Net(nn.Module):
    """A tied weight, a buffer, and parameters of equal shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor(3))


class Seen(Net):
    """Has extra state besides."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.tensor([1, 2])

    def get_extra_state(self) -> Any:
        return {"rows": self.rows, "n": 3}

    def set_extra_state(self, state: Any) -> None:
        self.rows = state["rows"]


def make(seed: int, kind: type[Net] = Net) -> tuple[Net, torch.optim.SGD]:
    """Make a model and its optimizer, both with values of their own."""
    torch.manual_seed(seed)
    model = kind()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def values_of(
    model: Net, optimizer: torch.optim.SGD | None, copied: bool = True
) -> dict[str, torch.Tensor]:
    """Return every value that a load brings back."""
    found = dict(model.state_dict())
    if isinstance(model, Seen):
        found["_extra_state"] = model.rows
    for name, parameter in model.named_parameters() if optimizer is not None else ():
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):  # others are options, which may be anything
                found[f"{name} {key}"] = value
    return {name: value.clone() for name, value in found.items()} if copied else found


ADAPTER = {"config": {"r": 2}, "names": {"base.first.weight": "first.weight"}}


def write_folders(root: Path) -> None:
    """Write a folder of each kind."""
    model, optimizer = make(1, Seen)
    for name in ("own", "adapters"):
        write(
            root / name,
            models=[state_of_model(model)],
            optimizers=[state_of_optimizer([model], optimizer)],
            meta={"step": 3, "extra": {"best": 0.5, "seen": [1, 2, {"a": torch.ones(2)}]}},
            run={"step": 3, "stage": 3, "framework": "pytorch", "replicate_size": 1},
            modules=[model],
        )
        manifest = manifests.parse(root / name)
        entry = {"model": 0, "prefix": "", "class": "Net", "config": {"vocab_size": 4, "n": [{}]}}
        if name == "adapters":
            entry["peft"] = {"default": ADAPTER, "other": ADAPTER}
            extra = manifest["models"][0]["_extra_state"]
            extra["rank_bytes"] = extra["shape"]
            manifest["changed_base"] = [["first.weight"]]
        manifest |= {
            "hugging_face": [{**entry, "generation_config": None, "ignored": ["seen"]}],
            "source_dtypes": [{"first.weight": "bfloat16"}],
        }
        (root / name / "manifest.json").write_text(manifests.to_json(manifest))
    model, optimizer = make(1)
    names = {parameter: name for name, parameter in model.named_parameters()}
    state = {names[p]: dict(values) for p, values in optimizer.state.items()}
    group = {**optimizer.param_groups[0], "params": list(state)}
    content = {
        "model": {k: v for k, v in model.state_dict().items() if k != "head.weight"},  # tied
        "optimizer": {"state": state, "param_groups": [group]},
        "step": 3,
    }
    dcp.save(content, checkpoint_id=root / "dcp", no_dist=True)
    write_safetensors(root / "safetensors", dict(model.state_dict()))


def write_safetensors(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """Write two files and an index, as Hugging Face has them."""
    folder.mkdir()
    state.pop("head.weight")  # tied
    names = sorted(state)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        part.sort(key=lambda name: -state[name].dtype.itemsize)
        header = header_bytes({n: (state[n].dtype, tuple(state[n].shape)) for n in part})
        data = b"".join(state[n].detach().contiguous().view(-1).numpy().tobytes() for n in part)
        (folder / file).write_bytes(header + data)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["Net"], "n": {"m": 1}}))


# -- Changes of values -----------------------------------------------------------------------------


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with one of its keys."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        item = left.pop()
        keys: list[Any] = []
        if isinstance(item, dict):
            keys = list(item)
        elif isinstance(item, list):
            keys = list(range(len(item)))
        found += [(item, key) for key in keys]
        left += [item[key] for key in keys]
    return found


def nested(depth: int, rng: random.Random) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def pick(values: tuple[Any, ...], rng: random.Random) -> Any:
    """Return one of the values, or a copy where it may be changed."""
    value = rng.choice(values)
    return copy.deepcopy(value) if isinstance(value, (dict, list)) else value


def change(value: Any, rng: random.Random, nasty: tuple[Any, ...] = NASTY) -> Any:
    """Change one place of a nested value, and return it."""
    found = places(value)
    if not found or rng.random() < 0.01:
        return pick(nasty, rng)
    inside, key = rng.choice(found)
    kind = rng.randrange(9)
    old = inside[key]
    if kind == 0:
        del inside[key]
    elif kind == 1 and isinstance(inside, dict):
        inside[rng.choice([name for name in nasty if isinstance(name, str)])] = inside.pop(key)
    elif kind == 2:
        inside[key] = nested(rng.choice((3, 30, 90, 150, 400)), rng)
    elif kind == 3:
        other, at = rng.choice(found)
        inside[key], other[at] = other[at], old
    elif kind == 4 and type(old) is int:
        inside[key] = old + rng.choice((-1, 1, 2**8, -old - 1, 2**32, 10**20))
    elif kind == 5 and isinstance(old, list):
        inside[key] = old + old if rng.random() < 0.5 else old[:-1]
    elif kind == 6 and isinstance(old, str):
        at = rng.randrange(len(old) + 1)
        inside[key] = old[:at] + rng.choice(("/", "../", "\0", "a", " ", "é")) + old[at:]
    else:
        inside[key] = pick(nasty, rng)
    return value


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, repeat or replace bytes."""
    if not data:
        return b"x"
    kind, at = rng.randrange(6), rng.randrange(len(data))
    if kind == 0:
        return data[:at]
    if kind in (1, 2):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 4))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 64)))
    if kind == 3:
        return data[:at] + data[end:]
    if kind == 4:
        return data[:end] + data[at:end] * rng.choice((1, 100)) + data[end:]
    return data[:at] + rng.randbytes(end - at) + data[end:]


# -- Objects that run code when they are unpickled -------------------------------------------------


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class Setter:
    """Pickles as an object whose state is set through a call."""

    def __reduce__(self) -> Any:
        return dict, (), {"a": 1}, None, iter([("x", Call(os.system, f"touch {marker()}"))])


def marker() -> str:
    """Return the path of a file that only code in a checkpoint would make."""
    return os.environ["FUZZ_MARKER"]


def traps() -> list[Any]:
    """Return objects that make the marker when they are unpickled, or take much."""
    path = marker()
    return [
        Call(os.system, f"touch {path}"),
        Call(eval, f"open({path!r}, 'w').close()"),
        Call(exec, f"open({path!r}, 'w').close()"),
        Call(open, path, "w"),
        Call(subprocess.check_call, ["touch", path]),
        Call(os.mkdir, path),
        Call(getattr, Call(__import__, "os"), "system"),
        Call(getattr, dict, "fromkeys"),
        Call(torch.load, path),
        Call(torch.ones, 2**33),
        Call(bytes, 2**36),
        Call(bytearray, 2**36),
        Call(range, 2**62),
        Call(list, range(10)),
        Setter(),
        Net(),
        Path(path),
        torch.ones(2),
        torch.zeros(1).expand(2**40),
    ]


RAW = (
    b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",  # bytes
    b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",  # text
    b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",  # bytearray
    b"\x80\x02]r" + struct.pack("<I", 2**31 - 1) + b".",  # a memo of two thousand million
    b"\x80\x02]q\x00h\x00a.",  # a list in itself
    b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
    b"(" * 100_000 + b".",
    b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    b"cos\nsystem\n(S'true'\ntR.",
    b"(S'true'\nios\nsystem\n.",
    b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81N}X\x01\x00\x00\x00ah\x00s\x86b.",
    b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
    b"\x80\x02cbuiltins\ngetattr\ncbuiltins\neval\nX\x08\x00\x00\x00__call__\x86R.",
    b"",
    b".",
    b"N.",
)


# -- Changes of files ------------------------------------------------------------------------------


def _manifest(folder: Path, rng: random.Random) -> dict[str, bytes]:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("manifest_crc32")
    if rng.random() < 0.1:
        manifest["version"] = 1
        manifest["files"] = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    if rng.random() < 0.15:
        text = (folder / "manifest.json").read_bytes()
        deep = b"[" * 5000 + b"]" * 5000
        text = change_bytes(text, rng) if rng.random() < 0.8 else text.replace(b"0", deep, 1)
        return {"manifest.json": text}
    part = rng.choice(list(manifest))
    if rng.random() < 0.9:
        manifest[part] = change(manifest[part], rng)
    else:
        manifest = change(manifest, rng)
    if not isinstance(manifest, dict):
        return {"manifest.json": json.dumps(manifest).encode()}
    return {"manifest.json": manifests.to_json(manifest).encode()}


def _object_places(value: Any) -> list[tuple[Any, Any]]:
    """Return containers and objects of DCP's metadata with one of their keys or fields."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        item = left.pop()
        inner: dict[Any, Any] = {}
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            inner = {f.name: getattr(item, f.name, None) for f in dataclasses.fields(item)}
        elif isinstance(item, dict):
            inner = dict(item)
        elif isinstance(item, list):
            inner = dict(enumerate(item))
        found += [(item, key) for key in inner]
        left += [*inner.values(), *(key for key in inner if dataclasses.is_dataclass(key))]
    return found


def _metadata_bytes(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(8)
    if kind < 3:
        return change_bytes(data, rng)
    if kind == 3 and rng.random() < 0.5:
        return rng.choice(RAW)
    metadata = pickle.loads(data)
    with_traps = kind == 4
    new = pick(tuple(traps()) if with_traps else NASTY, rng)
    if kind == 7 and rng.random() < 0.5:
        new = torch.Size(rng.choice(((), (0,), (1,), (4, 3), (3, 3), (2**40, 2**20))))
    inside, key = rng.choice(_object_places(metadata))
    if isinstance(inside, (dict, list)):
        if isinstance(inside, dict) and kind == 5:
            inside[rng.choice(("../x", "model.embed.weight", "a.b", 7))] = inside.pop(key)
        elif kind == 6:
            del inside[key]
        else:
            inside[key] = new
    elif isinstance(getattr(inside, key, None), int) and kind > 5:
        object.__setattr__(inside, key, getattr(inside, key) + rng.choice((-1, 1, 64, 2**40)))
    else:
        object.__setattr__(inside, key, new)
    return _pickled(metadata, rng)


def _pickled(value: Any, rng: random.Random) -> bytes:
    # Some values cannot be pickled as they are: an object that says so is a change as well.
    try:
        return pickle.dumps(value, protocol=rng.choice((2, 4, 4, 4, 5)))
    except (RuntimeError, TypeError, AttributeError, pickle.PicklingError):
        return pickle.dumps(None)


def _own_metadata(folder: Path, rng: random.Random) -> dict[str, bytes]:
    return _summed(folder, ".metadata", _metadata_bytes((folder / ".metadata").read_bytes(), rng))


def _summed(folder: Path, name: str, data: bytes) -> dict[str, bytes]:
    """Return a changed file, and a manifest that says that it is whole."""
    manifest = manifests.parse(folder)
    changed = folder.parent / "summed"
    changed.write_bytes(data)
    manifest["files"][name] = file_checksums(changed)
    changed.unlink()
    return {name: data, "manifest.json": manifests.to_json(manifest).encode()}


def _dcp_metadata(folder: Path, rng: random.Random) -> dict[str, bytes]:
    return {".metadata": _metadata_bytes((folder / ".metadata").read_bytes(), rng)}


def _meta(folder: Path, rng: random.Random) -> dict[str, bytes]:
    name = rng.choice(("meta.pt", "meta.pt", "meta.pt", "rng_0.pt"))
    data = (folder / name).read_bytes()
    kind = rng.randrange(6)
    if kind < 2:
        return _summed(folder, name, change_bytes(data, rng))
    value = torch.load(io.BytesIO(data), weights_only=True)
    if kind == 2:
        value = change(value, rng, (*NASTY, *traps()))
    elif kind == 3:
        inside, key = rng.choice(places(value))
        inside[key] = rng.choice(traps())
    elif kind == 4:
        bomb: Any = [0] * 10
        for _ in range(rng.choice((3, 12, 40))):
            bomb = [bomb] * 10
        value["bomb"] = bomb
    else:
        value = change(value, rng)
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if rng.random() < 0.1:
        return _summed(folder, name, _compressed(buffer.getvalue()))
    return _summed(folder, name, buffer.getvalue())


def _compressed(data: bytes) -> bytes:
    """Pack a file of torch.save so that it unpacks to more than it is."""
    target = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
        new.writestr("archive/data/9", bytes(2**22))
    return target.getvalue()


def _safetensors(folder: Path, rng: random.Random) -> dict[str, bytes]:
    name = rng.choice(sorted(os.listdir(folder)))
    data = (folder / name).read_bytes()
    if rng.random() < 0.2:  # what is changed in the tensors' own bytes nobody could tell
        length = 8 + struct.unpack("<Q", data[:8])[0] if name.endswith("s") else len(data)
        return {name: change_bytes(data[:length], rng) + data[length:]}
    if name.endswith(".json"):
        return {name: json.dumps(change(json.loads(data), rng)).encode()}
    (length,) = struct.unpack("<Q", data[:8])
    header = change(json.loads(data[8 : 8 + length]), rng)
    text = json.dumps(header).encode()
    if rng.random() < 0.2:
        length = rng.choice((0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1))
        return {name: struct.pack("<Q", length) + data[8:]}
    return {name: struct.pack("<Q", len(text)) + text + data[8 + length :]}


CHANGES: dict[str, tuple[str, Callable[[Path, random.Random], dict[str, bytes]]]] = {
    "manifest": ("own", _manifest),
    "manifest of adapters": ("adapters", _manifest),
    "own .metadata": ("own", _own_metadata),
    "meta.pt": ("own", _meta),
    ".metadata": ("dcp", _dcp_metadata),
    "safetensors": ("safetensors", _safetensors),
}


# -- One change ------------------------------------------------------------------------------------


class Watch:
    """Sees what the process does to files outside of a folder, and other processes it starts."""

    WRITES = ("os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.link", "os.symlink")
    STARTS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch.resolve()
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in self.STARTS:
            self.seen.append(f"{event} {args}")
        elif event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
            flags = args[2] or 0
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                self._path(event, args[0])
        elif event in self.WRITES:
            paths = [path for path in args if isinstance(path, (str, bytes, os.PathLike))]
            opened = [number for number in args if type(number) is int][-1:]  # a folder, or -1
            for path in paths:
                self._path(event, path, opened[0] if opened else -1)

    def _path(self, event: str, path: Any, folder: int = -1) -> None:
        self.on = False
        inside = os.readlink(f"/proc/self/fd/{folder}") if folder >= 0 else ""
        full = Path(inside, os.fsdecode(os.fspath(path))).resolve()
        if not full.is_relative_to(self.scratch) and str(full) != os.devnull:
            self.seen.append(f"{event} {full}")
        self.on = True


class Target:
    """Models and optimizers that folders are loaded into, whose values are made anew."""

    def __init__(self) -> None:
        self.made = {kind: make(2, kind) for kind in (Net, Seen)}

    def load(self, folder: Path) -> dict[str, torch.Tensor]:
        """Load a folder, and return every value that it has brought."""
        model, optimizer = self.made[Seen if folder.name in ("own", "adapters") else Net]
        optimizers = [optimizer] if folder.name != "safetensors" else []
        with torch.no_grad():
            for value in values_of(model, optimizer, copied=False).values():
                value.fill_(9)
        reader = Reader(folder)
        reader.load([model], optimizers)
        reader.restore_rng()
        return values_of(model, optimizer if optimizers else None)


def attempt(
    folder: Path, scratch: Path, target: Target, expected: dict[str, Any], exports: bool
) -> bool:
    """Inspect, load and perhaps export a folder; return whether it was loaded, or refused."""
    info = inspect(folder, verify=True)
    damaged = info.health in ("damaged", "unfinished", "newer") or not (
        info.loads or info.health == "whole"
    )
    found: dict[str, torch.Tensor] = {}
    try:
        found = target.load(folder)
    except ShardplugError as error:
        text = str(error)
        assert text.count("\n") == 0 and text.isprintable(), f"more than a line: {text!r}"
        assert len(text) < 2000, f"too long: {text[:3000]!r}"
    assert not (found and damaged), f"loaded what inspect calls {info.health}: {info.problems}"
    for name, value in found.items():
        assert torch.equal(value, expected[name]), f"{name} has other values"
    if exports:
        _export(folder, scratch / "out", damaged and "meta.pt" not in str(info.problems))
    return bool(found)


def _export(folder: Path, target: Path, damaged: bool) -> None:
    options = {"dtype": "source", "module": None, "adapter_only": False, "max_shard_bytes": 100}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            done = export_checkpoint(folder, target, overwrite=True, **options)
        except ShardplugError:
            return
    assert not damaged, "exported what inspect calls damaged"
    assert done.files and all((target / n).resolve().is_relative_to(target) for n in done.files)


def run(root: Path, seed: int, count: int) -> dict[str, Any]:
    """Make and try `count` changes; return what became of them."""
    scratch = root / "scratch"
    scratch.mkdir(parents=True)
    write_folders(scratch)
    for name in ("own", "dcp"):  # what a change may name: a link out of the folder
        (scratch / name / "link").symlink_to(root / "victim")
    expected = values_of(*make(1, Seen))
    originals = {path: path.read_bytes() for path in scratch.rglob("*") if path.is_file()}
    target = Target()
    for name in ("own", "adapters", "dcp", "safetensors"):
        assert attempt(scratch / name, scratch, target, expected, True), f"{name} as it is"
    watch = Watch(scratch)
    _limit_memory()
    outcome: Counter[str] = Counter()
    failures: list[str] = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = rng.choice(sorted(CHANGES))
        name, make_change = CHANGES[kind]
        folder = scratch / name
        for file, data in make_change(folder, rng).items():
            (folder / file).write_bytes(data)
        begin = time.process_time()
        watch.seen.clear()
        watch.on = True
        try:
            loaded = attempt(folder, scratch, target, expected, number % 3 == 0)
            outcome[f"{kind}: {'loaded' if loaded else 'refused'}"] += 1
        except Exception:  # what must not happen, whatever it is
            failures.append(f"{number} {kind}: {traceback.format_exc()[-3000:]}")
        watch.on = False
        took = time.process_time() - begin
        if took > SECONDS:
            failures.append(f"{number} {kind}: took {took} s")
        if watch.seen or os.path.lexists(marker()):
            failures.append(f"{number} {kind}: did {watch.seen}")
        for path, data in originals.items():
            if path.is_relative_to(folder):
                path.write_bytes(data)
    return {"outcome": dict(sorted(outcome.items())), "failures": failures}


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def main() -> None:
    """Run from the command line."""
    root, seed, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    root.mkdir(parents=True, exist_ok=True)
    os.environ["FUZZ_MARKER"] = str(root.resolve() / "marker")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(json.dumps(run(root.resolve(), seed, count)))


if __name__ == "__main__":
    main()
