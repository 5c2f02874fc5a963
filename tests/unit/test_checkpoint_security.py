"""Nothing in a checkpoint runs code, is written outside, or is taken for what it is not."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from shardplug.checkpoint import Reader, export, inspect, resume_point, write
from shardplug.checkpoint.foreign.dcp_folder import check_safe
from shardplug.checkpoint.format import manifest as manifests
from shardplug.checkpoint.format.durable import file_checksums
from shardplug.errors import CheckpointError, ConfigError
from shardplug.integrations.common.async_save import _point, _remove

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

ROOT = Path(__file__).resolve().parents[2]


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.Linear(3, 3)


class LoraLike:
    """What of an adapter's config PEFT would write."""

    def to_dict(self) -> dict[str, Any]:
        return {"r": 1}


def save(path: Path, **attributes: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    for name, value in {**attributes, **({"save_pretrained": id} if attributes else {})}.items():
        setattr(model, name, value)
    state = {n: p.detach() for n, p in model.named_parameters()}
    write(path, models=[state], optimizers=[], meta={"step": 1}, modules=[model])
    return model


def change(path: Path, **entries: Any) -> None:
    """Change entries of a folder's manifest, and sum it and its files anew."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **entries}
    manifest.pop("manifest_crc32")
    if "files" not in entries:
        for name in manifest["files"]:
            manifest["files"][name] = file_checksums(path / name)
    (path / "manifest.json").write_text(manifests.to_json(manifest))


def refused(path: Path, out: Path) -> str:
    """See that every way to read a folder refuses it in one line, which is returned."""
    said = []
    for read in (
        lambda: Reader(path).load(Model()),
        lambda: Reader(path).whole_state(),
        lambda: export(path, out),
    ):
        with pytest.raises(CheckpointError) as caught:
            read()
        said.append(str(caught.value))
    assert inspect(path, verify=True).health == "damaged"
    assert not out.exists() and len(set(said)) == 1 and "\n" not in said[0], said
    return said[0]


def test_metadata_that_would_run_code(tmp_path: Path) -> None:
    """In a folder of ours that was summed anew, and in one of torch's own."""
    marker = tmp_path / "marker"
    model = save(tmp_path / "own")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for folder in (tmp_path / "own", tmp_path / "dcp"):
        file = folder / ".metadata"
        real = file.read_bytes()
        metadata = pickle.loads(real)
        for place in ("whole", "planner_data", "storage_data", "key", "storage_meta"):
            metadata = pickle.loads(real)
            if place == "whole":
                metadata = Trap(marker)
            elif place == "key":
                metadata.state_dict_metadata[("x", Trap(marker))] = None
            else:
                setattr(metadata, place, Trap(marker))
            file.write_bytes(pickle.dumps(metadata))
            # Where the metadata cannot be read, torch would look for each rank's own.
            (folder / "__0.metadata").write_bytes(pickle.dumps(Trap(marker)))
            if folder.name == "own":
                change(folder)
            text = refused(folder, tmp_path / "out")
            assert text.startswith(f"{folder} is damaged: .metadata holds 'posix.system'"), text
        file.write_bytes(real)
        # torch's planner unpickles what the metadata calls no tensor.
        metadata = pickle.loads(real)
        key, entry = next(iter(metadata.state_dict_metadata.items()))
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        (index,) = [index for index in metadata.storage_data if index.fqn == key]
        info = metadata.storage_data.pop(index)
        (folder / info.relative_path).write_bytes(_saved(Trap(marker)))
        info.offset, info.length = 0, (folder / info.relative_path).stat().st_size
        metadata.storage_data = {type(index)(key): info}
        metadata.state_dict_metadata = {key: metadata.state_dict_metadata[key]}
        file.write_bytes(pickle.dumps(metadata))
        if folder.name == "own":
            change(folder, models=[{key.removeprefix("model."): _described(entry)}])
            assert "is no tensor in its files" in refused(folder, tmp_path / "out")
        else:
            refused(folder, tmp_path / "out")
        assert not marker.exists()
        # The trap works.
        FileSystemReader(folder).read_metadata()
        file.write_bytes(pickle.dumps(Trap(marker)))
        with pytest.raises(Exception, match="attribute"):
            FileSystemReader(folder).read_metadata()
        marker.unlink()


def test_entries_that_would_run_code(tmp_path: Path) -> None:
    """What torch's own loader, which Accelerate calls, would unpickle: options of optimizers."""
    model = Model()
    content = {"model": model.state_dict(), "optimizer": {"param_groups": [{"lr": 0.1}]}}
    dcp.save(content, checkpoint_id=tmp_path / "fine", no_dist=True)
    check_safe(tmp_path / "fine")
    content["optimizer"] = {"param_groups": [{"lr": Trap(tmp_path / "marker")}]}
    dcp.save(content, checkpoint_id=tmp_path / "trap", no_dist=True)
    with pytest.raises(CheckpointError, match=r"objects that run code .*posix\.system"):
        check_safe(tmp_path / "trap")
    assert not (tmp_path / "marker").exists()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _described(entry: Any) -> dict[str, Any]:
    return {"shape": list(entry.size), "dtype": "float32"}


@pytest.mark.parametrize("name", ["../victim", "{root}/victim", "..", "a/b", "", "a\0b", "x" * 300])
def test_adapters_are_written_below_the_export(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "adapter_config.json").write_text("precious")
    name = name.format(root=tmp_path)
    save(tmp_path / "it")
    adapter = {"config": {"r": 1}, "names": {"x.weight": "norm.weight"}}
    entry = {"model": 0, "prefix": "", "class": "Model", "config": {}, "generation_config": None}
    change(tmp_path / "it", hugging_face=[{**entry, "peft": {"other": adapter}}])
    export(tmp_path / "it", tmp_path / "fine")
    assert (tmp_path / "fine" / "other" / "adapter_model.safetensors").is_file()
    if len(name) < 9:  # such a name is refused when it is saved, too, while it can be changed
        with pytest.raises(CheckpointError, match="the name of an adapter in hugging_face"):
            save(tmp_path / "new", peft_config={name: LoraLike()})
    change(tmp_path / "it", hugging_face=[{**entry, "peft": {name: adapter}}])
    text = refused(tmp_path / "it", tmp_path / "out")
    assert "the name of an adapter in hugging_face[0]['peft'] is" in text
    assert [path.name for path in victim.iterdir()] == ["adapter_config.json"]
    assert (victim / "adapter_config.json").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fine", "it", "victim"]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("models", ["x"], "models[0] is 'x'"),
        ("models", [{"a": None}], "models[0]['a'] is None"),
        ("models", [{"a": {"shape": [2], "dtype": "hub"}}], "models[0]['a']['dtype'] is 'hub'"),
        ("models", [{"a": {"shape": [-1, "a"], "dtype": "int8"}}], "['shape'] is [-1, 'a']"),
        ("models", {"a": 1}, "models is {'a': 1}"),
        ("world_size", -1, "world_size is -1"),
        ("block_bytes", -5, "block_bytes is -5"),
        ("block_bytes", None, "block_bytes is None"),
        ("step", "three", "step is 'three'"),
        ("saved_at_seconds", float("nan"), "saved_at_seconds is nan"),
        ("hugging_face", [{"model": 3, "prefix": ""}], "hugging_face[0]['model'] is 3"),
        ("tied", [{"a": 5}], "tied[0]['a'] is 5"),
        ("framework", [[[[]]] * 3] * 3, "framework is [["),
    ],
)
def test_a_manifest_with_a_right_sum_and_wrong_contents(
    tmp_path: Path, key: str, value: Any, said: str
) -> None:
    save(tmp_path / "it")
    change(tmp_path / "it", **{key: value})
    text = refused(tmp_path / "it", tmp_path / "out")
    assert text.startswith(f"{tmp_path / 'it'} is damaged: manifest.json ") and said in text, text
    with pytest.raises(CheckpointError, match="there is none"):
        resume_point(tmp_path)


def test_files_and_shapes_are_held_against_each_other(tmp_path: Path) -> None:
    """Before a byte is allocated: shapes of 4 PB, and files that are elsewhere."""
    save(tmp_path / "it")
    shutil.copytree(tmp_path / "it", tmp_path / "other")
    path, out = tmp_path / "it", tmp_path / "out"
    models = manifests.parse(path)["models"]
    for shape in ([2**25, 2**25], [4, 4], [3, 4]):
        changed = [{**models[0], "embed.weight": {"shape": shape, "dtype": "float32"}}]
        change(path, models=changed)
        text = refused(path, out)
        assert "models[0]['embed.weight'] in manifest.json is ((" in text, text
    change(path, models=models)
    files = manifests.parse(path)["files"]
    for name in ("../other/meta.pt", str(tmp_path / "other" / "meta.pt"), "a//b", "./meta.pt"):
        change(path, files={**files, name: files["meta.pt"]})
        assert "a name in files is" in refused(path, out)
    change(path, files={**files, "meta.pt": {"bytes": "many"}})
    assert "files['meta.pt']['bytes'] is 'many'" in refused(path, out)
    change(path, files=files)
    tensors = path / "__0_0.distcp"
    tensors.unlink()
    tensors.symlink_to(tmp_path / "other" / "__0_0.distcp")
    assert "a link that leads out of the folder" in refused(path, out)
    deep = (path / "manifest.json").read_text().replace('"step": ', '"step": ' + "[" * 9**4, 1)
    (path / "manifest.json").write_text(deep)
    refused(path, out)


def test_weights_that_an_index_names_elsewhere(tmp_path: Path) -> None:
    model = save(tmp_path / "it")
    export(tmp_path / "it", tmp_path / "hf")
    export(tmp_path / "it", tmp_path / "secret")
    index = tmp_path / "hf" / "model.safetensors.index.json"
    for name in ("../secret/model.safetensors", str(tmp_path / "secret" / "model.safetensors")):
        index.write_text(json.dumps({"weight_map": {"embed.weight": name}}))
        assert "the name of a file with weights is" in refused(tmp_path / "hf", tmp_path / "out")
    index.unlink()
    # Files in the Hugging Face cache are links to those beside the snapshots.
    cache = tmp_path / "models--a--b"
    snapshot = cache / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (tmp_path / "hf" / "model.safetensors").rename(cache / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs/abc"))
    found = Reader(snapshot).whole_state()
    assert torch.equal(found["norm.weight"], model.norm.weight)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "secret" / "model.safetensors")
    assert "leads out of the folder" in refused(snapshot, tmp_path / "out")


def test_only_checkpoints_are_removed(tmp_path: Path) -> None:
    """Whatever names a framework has read from a checkpoint, and whatever lies beside a save."""
    save(tmp_path / "a")
    precious = [".data.tmp-12345678", ".step-1.old-12345678", "plain", ".out.export-12345678"]
    for name in precious:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("precious")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name": "my site"}')
    (tmp_path / "notes.txt").write_text("precious")
    (tmp_path / ".b.tmp-1234abcd").symlink_to(tmp_path / "plain")
    save(tmp_path / "b")
    export(tmp_path / "a", tmp_path / "out")
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("web", "plain", "dcp"):
        with pytest.raises(CheckpointError, match="with other things in it"):
            save(tmp_path / name)
    for name in ("plain", "web", "dcp", "notes.txt"):
        with pytest.raises(OSError, match="is no checkpoint"):
            _remove(tmp_path / name, None)
    with pytest.raises(OSError, match="is no checkpoint"):
        _point(tmp_path / "plain", tmp_path / "b")
    for name in precious:
        assert (tmp_path / name / "notes").read_text() == "precious"
    assert (tmp_path / ".b.tmp-1234abcd").is_symlink()
    (tmp_path / "out" / "mine").mkdir()
    (tmp_path / "out" / "mine" / "adapter_config.json").write_text("{}")
    (tmp_path / "out" / "mine" / "notes").write_text("precious")
    with pytest.raises(ConfigError, match="holds other things too: mine"):
        export(tmp_path / "a", tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "mine" / "notes").read_text() == "precious"
    _remove(tmp_path / "a", None)
    assert not (tmp_path / "a").exists()


def test_a_module_that_owns_only_a_further_name_of_a_tied_weight(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = save(tmp_path / "it")
    for module in ("head", "embed"):
        with pytest.warns(UserWarning, match="only the weights are written"):
            export(tmp_path / "it", tmp_path / module, module=module)
        found = load_file(tmp_path / module / "model.safetensors")
        assert found.keys() == {"weight"} and torch.equal(found["weight"], model.embed.weight)
    with pytest.raises(ConfigError, match="got 'neck'; there are embed, head, norm"):
        export(tmp_path / "it", tmp_path / "out", module="neck")


@pytest.mark.parametrize("count", [300, pytest.param(2000, marks=pytest.mark.matrix)])
def test_changed_checkpoints_are_loaded_right_or_refused(tmp_path: Path, count: int) -> None:
    """Changes of manifests, metadata, side files and headers, in a process with a limit."""
    arguments = [str(tmp_path / "it"), "1", str(count)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.checkpoint_fuzz", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["failures"], "\n".join(found["failures"][:5])
    outcome = found["outcome"]
    assert sum(outcome.values()) == count
    kinds = {"manifest", "manifest of adapters", "own .metadata", ".metadata", "meta.pt"}
    for kind in (*kinds, "safetensors"):
        loaded, refused = outcome[f"{kind}: loaded"], outcome[f"{kind}: refused"]
        assert loaded >= count // 200 and refused >= count // 40, outcome
    assert [path.name for path in (tmp_path / "it").iterdir()] == ["scratch"]
