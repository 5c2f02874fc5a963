"""The recipes' text: pairs from Python's docstrings and from files, and the held-out split."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import text


@pytest.fixture(scope="module")
def pairs() -> datasets.Dataset:
    return text.load_pairs("docstrings")


def test_docstrings_are_instruction_pairs_about_the_standard_library(pairs):
    answers = {pair["prompt"][0]["content"]: pair["completion"] for pair in pairs}
    assert len(answers) > 1000
    assert answers["Explain what json.dumps does."].startswith("Serialize ``obj`` to a JSON")
    assert "Explain what argparse.ArgumentParser.parse_args does." not in answers  # undocumented


def test_docstrings_are_read_in_the_same_order_again(pairs):
    again = text._docstrings.__wrapped__()
    assert again["completion"][:] == pairs["completion"][:]


def test_docstrings_import_no_module(pairs):
    code = (
        "import sys, text; before = set(sys.modules); text.load_pairs('docstrings'); "
        "new = {name.split('.')[0] for name in set(sys.modules) - before}; "
        "assert 'antigravity' not in new and 'turtle' not in new, new"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(text.__file__).parent, timeout=100
    )


def test_split_is_disjoint_and_keeps_equal_rows_together(pairs):
    doubled = datasets.concatenate_datasets([pairs, pairs])
    train, held_out = text.split(doubled, max_held_out=len(doubled))
    assert len(train) + len(held_out) == len(doubled)
    assert 0.02 < len(held_out) / len(doubled) < 0.08
    seen = {json.dumps(pair, sort_keys=True) for pair in train}
    assert not seen & {json.dumps(pair, sort_keys=True) for pair in held_out}


def test_split_of_too_little_text_is_refused(pairs):
    with pytest.raises(text.RecipeError, match="Expected enough rows to hold out 5%.* got 1"):
        text.split(pairs.select([0]), max_held_out=64)


@pytest.mark.parametrize(
    ("columns", "question", "answer"),
    [
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"question": "q", "answer": "a"}, "q", "a"),
        ({"instruction": "i", "input": "x", "output": "o"}, "i\n\nx", "o"),
        ({"instruction": "i", "input": "", "output": "o"}, "i", "o"),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]},
            "u",
            "v",
        ),
    ],
)
def test_jsonl_columns_become_pairs(columns, question, answer, tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    (pair,) = text.load_pairs(str(path))
    assert pair == {"prompt": [{"role": "user", "content": question}], "completion": answer}


def test_parquet_and_text_files_are_read(tmp_path):
    path = tmp_path / "data.parquet"
    datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}]).to_parquet(path)
    assert text.load_pairs(str(path))["completion"][:] == ["one", "two"]
    path = tmp_path / "data.txt"
    path.write_text("First paragraph,\nsecond line.\n\nSecond paragraph.\n")
    pairs = text.load_pairs(str(path))
    assert pairs["prompt"][:] == [[], []]
    assert pairs["completion"][0] == "First paragraph,\nsecond line."


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"body": "b"}, "Expected columns text, messages, .* got body; rename"),
        ({"messages": [{"role": "user", "content": "u"}]}, "end with a turn of the assistant"),
    ],
)
def test_rows_that_make_no_pair_are_refused(content, match, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(content) + "\n")
    with pytest.raises(text.RecipeError, match=match):
        text.load_pairs(str(path))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ("./nothing.jsonl", "got './nothing.jsonl': there is no such file"),
        ("nothing.parquet", "there is no such file"),
        ("nobody/no-such-data", "got 'nobody/no-such-data': it is no local file and the hub"),
    ],
)
def test_data_that_is_not_there_is_refused(data, match, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(text.RecipeError, match=match):
        text.load_pairs(data)


def test_data_file_of_an_unknown_kind_is_refused(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("a,b\n")
    with pytest.raises(text.RecipeError, match="Expected a data file ending in .json, .jsonl"):
        text.load_pairs(str(path))
