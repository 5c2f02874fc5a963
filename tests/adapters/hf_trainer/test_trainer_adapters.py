"""Checkpoints of a Trainer that trains adapters: the frozen base is not in them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback

import shardplug.hf
from shardplug.checkpoint import export
from shardplug.errors import CheckpointError
from shardplug.integrations.accelerate.hf_trainer.trainer_folders import FOLDER
from tests.adapters.hf_trainer.common import build, launched, run
from tests.support.pool import RankPool


def adapted(base: Path, how: str = "stock", **config: Any) -> Any:
    torch.manual_seed(4)  # LoRA's first matrices
    model = (
        shardplug.hf.from_pretrained(base)
        if how == "streamed"
        else AutoModelForCausalLM.from_pretrained(base)
    )
    model.config._name_or_path = "" if how == "made" else str(base)
    model.name_or_path = model.config._name_or_path
    options = {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]} | config
    return get_peft_model(model, LoraConfig(**options))


def train(out: Path, strategy: str, base: Path, how: str = "stock", **options: Any) -> Any:
    import torch.distributed as dist

    config = options.pop("config", {})
    with launched(strategy):
        model = adapted(base, how, **config)
        try:
            result = run(out, model, world_size=dist.get_world_size(), max_steps=4, **options)
        except CheckpointError as error:
            return str(error)
        whole = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
    return result | {"state": whole}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "llama"
    build(tied=False).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(
    base: Path, tmp_path_factory: pytest.TempPathFactory, pool: RankPool
) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("adapters")
    return out, pool.run(train, 2, out, "zero3", base)[0]


def test_the_base_is_not_in_the_checkpoint(trained: tuple[Path, Any], base: Path) -> None:
    checkpoint = trained[0] / "checkpoint-2"
    manifest = json.loads((checkpoint / FOLDER / "manifest.json").read_text())
    (held,), (left_out,) = manifest["models"], manifest["left_out"]
    assert held and all("lora_" in name or "modules_to_save" in name for name in held)
    assert len(left_out) == len(load_file(base / "model.safetensors"))
    assert all(entry["shape"] and entry["dtype"] == "float32" for entry in left_out.values())
    assert not held.keys() & left_out.keys()
    # What Trainer itself writes beside it, for those who load the adapter.
    adapter = load_file(checkpoint / "adapter_model.safetensors")
    assert len(adapter) == len(held) > 2
    assert (checkpoint / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("ranks", "strategy", "how"),
    [
        (1, "zero1", "streamed"),
        (4, "stage=3,replicate_size=2", "stock"),
        (2, "zero3_infinity", "stock"),
    ],
)
def test_resuming_on_other_ranks_and_stages(
    trained: tuple[Path, Any],
    base: Path,
    pool: RankPool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    strategy: str,
    how: str,
) -> None:
    out, expected = trained
    if "infinity" in strategy:
        strategy = f"stage=3,offload_optimizer=nvme,offload_params=nvme,nvme_path={tmp_path}"
    resume = str(out / "checkpoint-2")
    found = pool.run(train, ranks, tmp_path, strategy, base, how, resume=resume)[0]
    assert not isinstance(found, str), found
    for step in (3, 4):
        assert found["losses"][step] == pytest.approx(expected["losses"][step], rel=1e-5)
    assert len(found["state"]) > 20
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=0, atol=1e-6, msg=name)


def test_another_base_is_refused_by_name(
    trained: tuple[Path, Any], base: Path, pool: RankPool, tmp_path: Path
) -> None:
    resume = str(trained[0] / "checkpoint-2")
    other = build(tied=False)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[5, 7] += 1e-3
    other.save_pretrained(tmp_path / "other")
    for text in pool.run(train, 2, tmp_path / "run", "zero3", tmp_path / "other", resume=resume):
        assert isinstance(text, str) and "but 1 of its 21 tensors differ here" in text, text
        assert "base_model.model.model.layers.1.mlp.up_proj.weight" in text


@pytest.mark.parametrize(
    ("how", "config"), [("made", {}), ("stock", {"init_lora_weights": "pissa_niter_4"})]
)
def test_a_base_that_nobody_could_load_again_is_kept(
    base: Path, pool: RankPool, tmp_path: Path, how: str, config: dict[str, Any]
) -> None:
    pool.run(train, 2, tmp_path, "zero2", base, how, config=config, save_steps=4)
    manifest = json.loads((tmp_path / "checkpoint-4" / FOLDER / "manifest.json").read_text())
    assert "left_out" not in manifest
    assert any(name.endswith("mlp.up_proj.weight") for name in manifest["models"][0])


class Merges(TrainerCallback):
    """ReLoRA: after step 3 the adapters go into the base and begin again at zero.

    After step 3 two rows of a layer without adapters change places too, and go back after step 5.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        rows = dict(model.named_parameters())["base_model.model.model.norm.weight"]
        with torch.no_grad():
            if state.global_step in (3, 5):
                local = rows.to_local() if hasattr(rows, "to_local") else rows
                local[:2] = local[:2].flip(0)
            if state.global_step == 3:
                model.merge_adapter()
                for module in model.modules():
                    if hasattr(module, "lora_A"):
                        module.merged_adapters.clear()  # a part of the base from now on
                        module.lora_B["default"].weight.zero_()


def relora(out: Path, strategy: str, base: Path, *, merges: bool, **options: Any) -> Any:
    import torch.distributed as dist

    with launched(strategy), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = adapted(base, modules_to_save=None)
        options |= {"callbacks": (Merges(),)} if merges else {}
        result = run(out, model, world_size=dist.get_world_size(), max_steps=6, **options)
        said = [str(w.message) for w in caught if "has changed since" in str(w.message)]
    return result | {"said": said}


def test_a_base_that_adapters_were_merged_into_is_saved(
    base: Path, pool: RankPool, tmp_path: Path
) -> None:
    """And only as far as it differs from the one that is loaded again."""
    # Ones would not tell whether rows have changed places.
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.linspace(0.5, 1.5, 32))
    model.save_pretrained(base := tmp_path / "base")
    changed = {
        2: set(),
        4: {"model.norm", *(f"model.layers.{i}.self_attn.q_proj.base_layer" for i in (0, 1))},
    }
    changed[6] = changed[4] - {"model.norm"}
    expected, _ = pool.run(relora, 2, tmp_path / "run", "zero3", base, merges=True)
    for step, names in changed.items():
        folder = tmp_path / f"run/checkpoint-{step}" / FOLDER
        manifest = json.loads((folder / "manifest.json").read_text())
        names = {f"base_model.model.{name}.weight" for name in names}
        (held,), (left_out,) = manifest["models"], manifest["left_out"]
        assert {name for name in held if "lora_" not in name} == names, step
        assert not names & left_out.keys() and len(left_out) + len(names) == 21
    assert len(expected["said"]) == 2 and "(3 tensors)" in expected["said"][0], expected["said"]
    with pytest.warns(UserWarning, match="2 tensors of the base .* changed"):
        export(folder, tmp_path / "exported")

    # A resumed run starts from the base that is on disk, and saves what differs from that.
    resume = str(tmp_path / "run/checkpoint-4")
    for strategy in ("zero1", "zero3"):
        out = tmp_path / strategy
        found = pool.run(relora, 2, out, strategy, base, merges=strategy == "zero1", resume=resume)
        for step in (5, 6):
            right = expected["losses"][step]
            assert found[0]["losses"][step] == pytest.approx(right, rel=1e-5), (strategy, step)
        manifest = json.loads((out / "checkpoint-6" / FOLDER / "manifest.json").read_text())
        held = {name for name in manifest["models"][0] if "lora_" not in name}
        assert len(held) == (2 if strategy == "zero1" else 3), held


def test_the_adapter_is_exported_and_the_whole_model_is_not(
    trained: tuple[Path, Any], tmp_path: Path
) -> None:
    export(trained[0] / "checkpoint-4" / FOLDER, tmp_path / "adapter")
    exported = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    written = load_file(trained[0] / "checkpoint-4" / "adapter_model.safetensors")
    assert exported.keys() == written.keys() and len(exported) > 2
    for name, value in written.items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=0)
