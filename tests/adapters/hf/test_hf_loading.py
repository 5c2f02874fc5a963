"""Models, names and files that load in one process as transformers loads them, and refusals."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter

import shardplug.hf
from shardplug import CheckpointError, ConfigError
from shardplug.core.weights.origin import source_dtypes
from tests.adapters.hf.models import (
    assert_equal,
    assert_equal_buffers,
    llama_config,
    quiet,
    save_llama,
    theirs,
)

SMALL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
EXPERTS = {**SMALL, "num_key_value_heads": 2, "num_experts_per_tok": 2}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama")


def loaded(folder: Path, **options: Any) -> Any:
    model = shardplug.hf.from_pretrained(folder, **options)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert shardplug.hf.load_pretrained(model) == shardplug.hf.LoadReport()
    return model


def assert_same(ours: Any, wanted: Any) -> None:
    assert type(ours) is type(wanted)
    assert ours.training == wanted.training
    assert_equal(ours.state_dict(), wanted.state_dict())
    assert dict(ours.named_buffers()).keys() == dict(wanted.named_buffers()).keys()
    if dict(wanted.named_buffers()):
        assert_equal_buffers(ours, wanted)
    ties = [{n for n, p in m.named_parameters()} for m in (ours, wanted)]
    assert ties[0] == ties[1]
    assert ours.config.to_dict() == wanted.config.to_dict()
    if wanted.can_generate():
        assert ours.generation_config == wanted.generation_config


# -- Architectures --------------------------------------------------------------------------------

CLIP_PART = {**SMALL, "image_size": 16, "patch_size": 8}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 12}, "ForCausalLM"),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **EXPERTS,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 4,
        },
        "ForCausalLM",
    ),
    "bert": ("Bert", SMALL, "ForMaskedLM"),
    "gpt2": ("GPT2", {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4}, "LMHeadModel"),
    "t5": (
        "T5",
        {"vocab_size": 257, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
        "ForConditionalGeneration",
    ),
    # Its modules initialise the layers below them, and have nothing but a buffer of their own.
    "clip": ("CLIP", {"text_config": SMALL, "vision_config": CLIP_PART}, "Model"),
}


@pytest.mark.parametrize("name", MODELS)
def test_architecture_loads_as_with_transformers(name, tmp_path):
    family, sizes, kind = MODELS[name]
    cls = getattr(transformers, family + kind)
    torch.manual_seed(1)
    with quiet():
        cls(getattr(transformers, f"{family}Config")(**sizes)).save_pretrained(tmp_path)
    assert_same(loaded(tmp_path, auto_class=cls), theirs(tmp_path, cls))


def test_experts_are_fused_from_the_rows_that_are_asked_for(tmp_path):
    family, sizes, kind = MODELS["mixtral"]
    with quiet():
        transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).save_pretrained(
            tmp_path
        )
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.layers.0.block_sparse_moe.experts.11.w1.weight" in names
    model = shardplug.hf.from_pretrained(tmp_path)
    from shardplug.core.weights.sources import deferred_in

    waiting = deferred_in(model).tensors
    fused = model.model.layers[1].mlp.experts.gate_up_proj
    whole = theirs(tmp_path).model.layers[1].mlp.experts.gate_up_proj
    assert waiting[fused].by_row
    rows = torch.empty(5, *whole.shape[1:])
    waiting[fused].read_into(rows, 6)
    assert torch.equal(rows, whole[6:11])


def test_old_names_and_base_prefixes(tmp_path):
    base = transformers.BertModel(transformers.BertConfig(**SMALL))
    with quiet():
        base.save_pretrained(tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    assert any("gamma" in name for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same(
        loaded(tmp_path, auto_class=transformers.BertModel),
        theirs(tmp_path, transformers.BertModel),
    )

    cls = transformers.BertForSequenceClassification
    model = shardplug.hf.from_pretrained(tmp_path, auto_class=cls)
    with pytest.warns(UserWarning, match=r"newly initialised: classifier.weight, classifier.bias"):
        shardplug.hf.load_pretrained(model)
    assert_equal(model.bert.state_dict(), base.state_dict())
    assert not model.classifier.bias.any()  # as Bert initialises it
    assert 0.01 < float(model.classifier.weight.detach().std()) < 0.03


def test_only_the_base_of_a_larger_model(tmp_path):
    save_llama(tmp_path)
    with pytest.warns(UserWarning, match=r"no place for them: lm_head.weight \(257, 32\)"):
        model = shardplug.hf.from_pretrained(tmp_path, auto_class=transformers.LlamaModel)
    shardplug.hf.load_pretrained(model)
    assert_equal(model.state_dict(), theirs(tmp_path).model.state_dict())
    with pytest.raises(CheckpointError, match="only in the files: lm_head.weight"):
        shardplug.hf.from_pretrained(tmp_path, auto_class=transformers.LlamaModel, strict=True)


class Scaled(ConversionOps):
    """A conversion that looks at values."""

    def convert(self, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any):
        (values,) = input_dict.values()
        return {target_patterns[0]: values[0] * values[0].max().item()}


def test_conversion_that_needs_values_is_refused(llama, monkeypatch):
    converter = WeightConverter("self_attn.k_proj", "self_attn.k_proj", [Scaled()])
    monkeypatch.setattr(
        "shardplug.integrations.hf.names.get_model_conversion_mapping", lambda m: [converter]
    )
    with pytest.raises(CheckpointError, match=r"LlamaForCausalLM .*k_proj.*\(Scaled\) that needs"):
        shardplug.hf.from_pretrained(llama)


# -- Options --------------------------------------------------------------------------------------


def test_dtype_is_that_of_transformers(tmp_path):
    save_llama(tmp_path, dtype=torch.float32)
    for dtype in (None, "auto", "bfloat16", torch.bfloat16, torch.float16):
        model = loaded(tmp_path, dtype=dtype)
        assert_same(model, theirs(tmp_path, dtype=dtype or "auto"))
        assert source_dtypes(model)["lm_head.weight"] == torch.float32
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_same(loaded(tmp_path), theirs(tmp_path))
    for wrong in ("int8", "no such", torch.int32, 3):
        with pytest.raises(ConfigError, match="Expected dtype to be a floating"):
            shardplug.hf.from_pretrained(tmp_path, dtype=wrong)


def test_parameters_that_a_class_keeps_in_fp32(llama, monkeypatch):
    kept = ["input_layernorm", "lm_head"]
    monkeypatch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", set(kept))
    wanted = theirs(llama, dtype=torch.bfloat16)
    assert {p.dtype for p in wanted.parameters()} == {torch.bfloat16, torch.float32}
    assert_same(loaded(llama, dtype=torch.bfloat16), wanted)


def test_config_and_its_entries(llama):
    model = loaded(llama, attention_dropout=0.25, attn_implementation="eager")
    assert model.config.attention_dropout == 0.25
    assert model.config._attn_implementation == "eager"
    config = transformers.AutoConfig.from_pretrained(llama)
    config.attention_dropout = 0.5
    assert loaded(llama, config=config).config.attention_dropout == 0.5
    with pytest.raises(ConfigError, match="Expected entries of LlamaConfig, got no_such"):
        shardplug.hf.from_pretrained(llama, no_such=1)
    with pytest.raises(ConfigError, match="got attention_dropout"):
        shardplug.hf.from_pretrained(llama, config=config, attention_dropout=0.1)
    with pytest.raises(ConfigError, match="Expected no device_map"):
        shardplug.hf.from_pretrained(llama, device_map="auto")
    with pytest.raises(ConfigError, match="Expected auto_class to be a class of transformers"):
        shardplug.hf.from_pretrained(llama, auto_class=nn.Linear)


def test_model_from_the_hub_cache(llama, tmp_path):
    cache, commit = tmp_path / "cache", "0123456789abcdef0123456789abcdef01234567"
    snapshot = cache / "models--someone--tiny" / "snapshots" / commit
    shutil.copytree(llama, snapshot)
    (cache / "models--someone--tiny" / "refs").mkdir()
    (cache / "models--someone--tiny" / "refs" / "main").write_text(commit)
    model = loaded("someone/tiny", cache_dir=cache, local_files_only=True)
    assert_equal(model.state_dict(), theirs(llama).state_dict())
    assert model.name_or_path == "someone/tiny"
    with pytest.raises(CheckpointError, match="'someone/else': there is no such folder"):
        shardplug.hf.from_pretrained("someone/else", cache_dir=cache, local_files_only=True)


# -- Files ----------------------------------------------------------------------------------------


def break_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 40) + b"{broken" + file.read_bytes()[15:])


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))


def whole_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


def lost_file(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lost_tensor(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "x": "a.safetensors"}}
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


FAULTS: list[tuple[Any, str]] = [
    (break_header, "header of .*model.safetensors cannot be read"),
    (cut, "model.safetensors is damaged"),
    (pickled, "found a Hugging Face folder of pickled weights. Convert it to safetensors with"),
    (quantized, "Expected unquantized weights"),
    (whole_numbers, "Expected lm_head.weight in torch.bfloat16, got torch.int8"),
    (lost_file, "Expected model-00002-of-00002.safetensors in .*, but it is missing"),
    (lost_tensor, "Expected x in .*a.safetensors, .* but it is not there"),
    (lambda f: (f / "config.json").unlink(), "Expected the config of a Hugging Face model in"),
    (lambda f: (f / "model.safetensors").unlink(), "Only safetensors files are read"),
    (
        lambda f: (f / "model.safetensors").rename(f / "model.gguf"),
        r"found GGUF files, .*\(from_pretrained\(folder, gguf_file",
    ),
    (
        lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"),
        "other safetensors files: consolidated.safetensors. Rename",
    ),
    (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/x"),
        "is a Git LFS pointer",
    ),
    (
        lambda f: (f / "manifest.json").write_text("{}") and (f / "model.safetensors").unlink(),
        "found a shardplug checkpoint. .* `shardplug export`",
    ),
    (
        lambda f: (
            (f / "model.safetensors.index.json").write_text("{}")
            and (f / "model.safetensors").unlink()
        ),
        "damaged, or no index of weights",
    ),
]


@pytest.mark.parametrize(("harm", "message"), FAULTS)
def test_folder_that_cannot_be_read_is_named(llama, harm, message):
    harm(llama)
    with pytest.raises(CheckpointError, match=message):
        shardplug.hf.from_pretrained(llama)


def test_path_that_is_no_folder(llama, tmp_path):
    with pytest.raises(CheckpointError, match="got nothing at"):
        shardplug.hf.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="got a safetensors file at"):
        shardplug.hf.from_pretrained(llama / "model.safetensors")
    with pytest.raises(CheckpointError, match="no such folder, and the hub did not give it"):
        shardplug.hf.from_pretrained("no-one/no-model", local_files_only=True)


def test_other_shapes_are_named_with_both_sides(llama):
    config = llama_config(vocab_size=300)
    with pytest.raises(CheckpointError) as caught:
        shardplug.hf.from_pretrained(llama, config=config)
    assert "lm_head.weight (257, 32) in the files, (300, 32) in the model" in str(caught.value)
    assert "embed_tokens" in str(caught.value)


# -- Ties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both", "none"])
def test_tied_weights_under_either_name_or_both(kept, tmp_path):
    save_llama(tmp_path, tied=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    weight = tensors.pop("model.embed_tokens.weight")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if kept in (name, "both"):
            tensors[name] = weight.clone()
    save_file(tensors, file, metadata={"format": "pt"})
    if kept == "none":
        model = shardplug.hf.from_pretrained(tmp_path)
        with pytest.warns(UserWarning, match="newly initialised: model.embed_tokens.weight"):
            shardplug.hf.load_pretrained(model)
        return
    model = loaded(tmp_path, strict=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, weight)
    assert source_dtypes(model)["lm_head.weight"] == torch.bfloat16
    if kept == "both":
        tensors["lm_head.weight"] = weight + 1
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match="Load it with tie_word_embeddings=False"):
            shardplug.hf.from_pretrained(tmp_path)
        model = loaded(tmp_path, tie_word_embeddings=False)
        assert torch.equal(model.lm_head.weight, weight + 1)


# -- load_pretrained with a path ------------------------------------------------------------------


def test_load_into_models_with_values_and_on_meta(llama):
    wanted = theirs(llama)
    real = transformers.LlamaForCausalLM(llama_config())
    pointers = [parameter.data_ptr() for parameter in real.parameters()]
    assert shardplug.hf.load_pretrained(real, llama) == shardplug.hf.LoadReport()
    assert_equal(real.state_dict(), wanted.float().state_dict())
    assert [parameter.data_ptr() for parameter in real.parameters()] == pointers
    assert source_dtypes(real)["lm_head.weight"] == torch.bfloat16

    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(llama_config())
    shardplug.hf.load_pretrained(empty, llama)
    assert_equal(empty.state_dict(), wanted.state_dict())
    assert_equal_buffers(empty, wanted)


class Plain(nn.Module):
    """No model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_missing_and_unexpected_names_of_any_module(tmp_path):
    torch.manual_seed(2)
    tensors = {
        "body.weight": torch.randn(4, 3),
        "body.bias": torch.randn(4),
        "count": torch.tensor(7),
        "tail.weight": torch.randn(5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = Plain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        shardplug.hf.load_pretrained(model, tmp_path)
    assert "not in the files: head.weight (2, 4), head.bias (2,)" in str(caught.value)
    assert "only in the files: tail.weight (5,)" in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert_equal(model.state_dict(), before)

    report = shardplug.hf.load_pretrained(model, tmp_path, strict=False)
    assert report == shardplug.hf.LoadReport(
        missing=("head.weight", "head.bias"), unexpected=("tail.weight",)
    )
    assert torch.equal(model.body.weight, tensors["body.weight"])
    assert int(model.count) == 7
    assert torch.equal(model.head.weight, before["head.weight"])

    with torch.device("meta"):
        model = Plain()
    shardplug.hf.load_pretrained(model, tmp_path, strict=False, device="cpu")
    assert torch.equal(model.body.bias, tensors["body.bias"])
    assert 0 < float(model.head.weight.detach().abs().max()) <= 0.5  # as nn.Linear does it

    save_file({**tensors, "body.weight": torch.randn(3, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"body.weight \(3, 3\) in the files, \(4, 3\)"):
        shardplug.hf.load_pretrained(model, tmp_path, strict=False)


def test_parameters_that_are_not_contiguous(tmp_path):
    weight = torch.randn(4, 3)
    save_file({"weight": weight, "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.zeros(3, 4).t())
    shardplug.hf.load_pretrained(model, tmp_path)
    assert torch.equal(model.weight, weight)


def test_model_with_nothing_left_to_read(llama):
    model = loaded(llama)
    with pytest.raises(ConfigError, match="Expected a model from shardplug.hf.from_pretrained"):
        shardplug.hf.load_pretrained(model)
    with pytest.raises(CheckpointError, match="model.safetensors cannot be read: No such file"):
        waiting = shardplug.hf.from_pretrained(llama)
        (llama / "model.safetensors").unlink()
        shardplug.hf.load_pretrained(waiting)
