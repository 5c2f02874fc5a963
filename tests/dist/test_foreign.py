"""Checkpoint folders of other tools: named for what they are, and loaded where that can be."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shardplug.checkpoint import Reader
from shardplug.checkpoint.foreign import foreign_folders as foreign
from shardplug.errors import CheckpointError
from tests.dist.checkpoint_runs import Run, assert_equal, make_run, snapshot, tensors_of, train
from tests.support.models import TinyLM
from tests.support.pool import RankPool


def _content(run: Run, flat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
    return model, optimizer


def _save(content: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=path)


def _write_foreign(root: str, kind: str) -> dict[str, Any]:
    """Train, save the way another tool does, and return what was saved."""
    run = make_run("groups", 3)
    train(run, range(2))
    model, optimizer = _content(run, flat=kind == "flattened")
    path = Path(root)
    if kind in ("nested", "flattened"):
        content = {"model": model, "optimizer": optimizer, "step": 2, "seen": torch.tensor(7)}
        _save(content, path)
    elif kind == "lightning":
        _save({"state_dict": model, "optimizer_0": optimizer}, path)
        if run.engine.rank == 0:
            torch.save({"epoch": 0, "global_step": 2}, path / "meta.pt")
    elif kind == "accelerate":
        _save({"model": model}, path / "pytorch_model_fsdp_0")
        _save({"optimizer": optimizer}, path / "optimizer_0")
    elif kind == "model only":
        _save(model, path)
    return snapshot(run.model, run.optimizer)


def _load_foreign(root: str, with_optimizer: bool) -> dict[str, Any]:
    run = make_run("groups", 2, seed=9)
    reader = Reader(root)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5
    reader.load(run.engine, [run.optimizer] if with_optimizer else [])
    assert not reader.restore_rng()
    return snapshot(run.model, run.optimizer)


@pytest.mark.parametrize("kind", ["nested", "flattened", "lightning", "accelerate", "model only"])
def test_plain_dcp_folders_load_at_another_world_size(
    pool: RankPool, tmp_path: Path, kind: str
) -> None:
    """Weights, moments, counters and each group's options, as torch's own helpers write them."""
    saved = pool.run(_write_foreign, 2, str(tmp_path / "it"), kind)[0]
    with_optimizer = kind != "model only"
    for world_size in (3, 1):
        found = pool.run(_load_foreign, world_size, str(tmp_path / "it"), with_optimizer)[0]
        if not with_optimizer:
            found = {k: v for k, v in found.items() if k.startswith(("weight", "buffer"))}
            assert_equal(found, {k: saved[k] for k in found})
            continue
        for snap in (saved, found):
            for key in list(snap):
                if key.startswith("options"):
                    snap[key].pop("name", None)
        assert len(tensors_of(found)) > 40
        assert_equal(found, saved, (kind, world_size))


def test_what_is_left_out_of_a_dcp_folder_is_known(pool: RankPool, tmp_path: Path) -> None:
    pool.run(_write_foreign, 2, str(tmp_path / "it"), "nested")
    source = foreign.foreign_source(tmp_path / "it")
    assert source is not None
    assert source.left_out == ("seen", "step")
    assert [len(model) for model in source.manifest["models"]] == [20]


def _numbered(root: str) -> None:
    model = TinyLM()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    _save({"net": model.state_dict(), "opt": optimizer.state_dict()}, Path(root))
    run = make_run("plain", 3)
    with pytest.raises(CheckpointError, match="1 or more optimizers, but it has that of none"):
        run.engine.load(root, optimizers=[run.optimizer])
    Reader(root).load(run.engine)
    for name, value in snapshot(run.model).items():
        assert torch.equal(value, model.state_dict()[name.split(" ")[1]])


def test_an_optimizer_that_is_kept_by_number_is_not_guessed_at(
    pool: RankPool, tmp_path: Path
) -> None:
    pool.run(_numbered, 1, str(tmp_path / "it"))
    source = foreign.foreign_source(tmp_path / "it")
    assert source is not None
    assert any(key.startswith("opt.state.0.") for key in source.left_out)


# -- safetensors ----------------------------------------------------------------------------------


class Odd(TinyLM):
    """TinyLM with a scalar, a flag, an integer buffer and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))


def _safetensors(folder: Path, dtype: torch.dtype, files: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import save_file

    torch.manual_seed(3)
    state = {n: t.to(dtype) if t.is_floating_point() else t for n, t in Odd().state_dict().items()}
    folder.mkdir()
    if files == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return state
    names = sorted(state)
    where = {}
    for index in range(files):
        file = f"model-{index + 1:05}-of-{files:05}.safetensors"
        save_file({n: state[n] for n in names[index::files]}, folder / file)
        where |= dict.fromkeys(names[index::files], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    # As repositories have it: the same weights once more, under other names.
    save_file({"tok.weight": state["embed.weight"]}, folder / "consolidated.safetensors")
    return state


def _load_safetensors(root: str) -> dict[str, Any]:
    from shardplug import ZeroConfig, ZeroEngine

    engine = ZeroEngine(ZeroConfig(stage=3))
    torch.manual_seed(8)
    model = engine.shard(Odd())
    with torch.no_grad():
        model.flags.zero_()
    Reader(root).load(engine)
    return snapshot(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", [1, 3])
def test_safetensors_folders_load_each_rank_its_rows(
    pool: RankPool, tmp_path: Path, dtype: torch.dtype, files: int
) -> None:
    state = _safetensors(tmp_path / "hf", dtype, files)
    for world_size in (2, 3):
        found = pool.run(_load_safetensors, world_size, str(tmp_path / "hf"))[0]
        assert len(found) == len(state) == 23
        for name, value in found.items():
            expected = state[name.split(" ")[1]]
            assert torch.equal(value, expected.to(value.dtype)), name


def test_a_damaged_safetensors_folder_is_refused_by_name(tmp_path: Path) -> None:
    _safetensors(tmp_path / "hf", torch.float32, 3)
    file = tmp_path / "hf" / "model-00002-of-00003.safetensors"
    whole = file.read_bytes()
    for content, said in (
        (whole[:-10], "is damaged: it has"),
        (b"not one", "is damaged, or no safetensors file"),
        (whole[:20] + b"\xff" * 20 + whole[40:], "cannot be read"),
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=said) as error:
            Reader(tmp_path / "hf")
        assert file.name in str(error.value)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        Reader(tmp_path / "hf")


# -- named for what they are ----------------------------------------------------------------------


def _make(path: Path, *names: str) -> None:
    for name in names:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x")


FOLDERS = {
    "deepspeed": (
        ["latest", "zero_to_fp32.py", "global_step5/mp_rank_00_model_states.pt"],
        ["a DeepSpeed checkpoint", "zero_to_fp32.py", "--safe_serialization"],
    ),
    "deepspeed_step": (
        ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["a DeepSpeed checkpoint", "python -m deepspeed.utils.zero_to_fp32", "OUT"],
    ),
    "lightning_deepspeed": (
        ["checkpoint/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest"],
        ["a DeepSpeed checkpoint"],
    ),
    "accelerate_full": (
        ["pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.bin"],
        ["full state dicts", "torch.load"],
    ),
    "killed": (
        ["rng_0.pt", "__0_0.distcp", ".metadata"],
        ["a save of shardplug that did not finish"],
    ),
    ".step-3.tmp-0123abcd": (["__0_0.distcp"], ["a save of shardplug that did not finish"]),
    "half": (["__0_0.distcp", "__1_0.distcp"], [".metadata is missing", "did not finish"]),
    "adapter": (
        ["adapter_config.json", "adapter_model.safetensors"],
        ["a PEFT adapter", "PeftModel.from_pretrained"],
    ),
    "pickled": (
        ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"],
        ["pickled weights", "save_pretrained(OUT)"],
    ),
    "hub": (["refs/main", "snapshots/abc/model.safetensors"], ["Hugging Face cache", "snapshots"]),
    "run": (
        ["step-1/manifest.json", "step-2/manifest.json"],
        ["a folder of checkpoints (step-1, step-2)"],
    ),
    "photos": (["a.jpg", "b.jpg"], ["another kind of folder, with a.jpg, b.jpg in it"]),
}


@pytest.mark.parametrize("name", list(FOLDERS))
def test_a_folder_of_another_tool_is_named_for_what_it_is(tmp_path: Path, name: str) -> None:
    files, said = FOLDERS[name]
    _make(tmp_path / name, *files)
    with pytest.raises(CheckpointError) as error:
        Reader(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    for part in said:
        assert part in str(error.value), (part, str(error.value))


def test_files_and_missing_paths_are_told_apart(tmp_path: Path) -> None:
    torch.save({"state_dict": nn.Linear(2, 2).state_dict()}, tmp_path / "last.ckpt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "model.pt")
    _make(tmp_path, "notes.txt", "model.safetensors")
    (tmp_path / "empty").mkdir()
    for name, kind, advice in (
        ("last.ckpt", "lightning_file", "trainer.fit"),
        ("model.pt", "torch_file", "torch.load"),
        ("notes.txt", "file", "checkpoint folder"),
        ("model.safetensors", "safetensors_file", str(tmp_path)),
        ("empty", "unknown", "Check the path"),
        ("none", "missing", "Check the path"),
    ):
        found = foreign.identify(tmp_path / name)
        assert (found.kind, found.loads) == (kind, False)
        assert advice in found.advice
        with pytest.raises(CheckpointError, match=name):
            Reader(tmp_path / name)


def test_a_damaged_dcp_folder_is_refused(tmp_path: Path) -> None:
    _make(tmp_path / "it", ".metadata", "__0_0.distcp")
    with pytest.raises(CheckpointError, match=r"it is damaged: \.metadata"):
        Reader(tmp_path / "it")
