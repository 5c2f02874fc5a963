"""The text that both recipes train on: from a file, a hub id or Python itself to pairs.

A pair is a prompt, which is a list of chat turns, and the completion that answers it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets

DOCSTRINGS = "docstrings"
"""The `--data` name of the built-in text."""

_BUILDERS = {
    ".txt": "text",
    ".md": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}

# Not on every machine with Python (Linux distributions package these separately), or not prose.
_LEFT_OUT = {"distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "tkinter", "turtledemo"}
_TESTS = {"test", "tests"}


datasets.disable_progress_bars()


class RecipeError(ValueError):
    """A bad option of a recipe: the message says what was expected, what came and what to do."""


def load_pairs(data: str) -> datasets.Dataset:
    """Reads the text and turns it into pairs.

    Args:
        data: `"docstrings"`, a local .txt, .md, .json, .jsonl or .parquet file, or a hub id.

    Returns:
        Rows of `prompt`, a list of chat turns (`role` and `content`; none for plain text), and
        `completion`, the text that answers them.

    Raises:
        RecipeError: Nothing is there, or its columns are none that a pair can be made of.
    """
    if data == DOCSTRINGS:
        return _docstrings()
    path = Path(data).expanduser()
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise RecipeError(
                f"Expected a data file ending in {', '.join(sorted(_BUILDERS))}, got {path}; "
                "convert it to JSON Lines."
            )
        options = {"sample_by": "paragraph"} if _BUILDERS[path.suffix] == "text" else {}
        rows = datasets.load_dataset(
            _BUILDERS[path.suffix], data_files=str(path), split="train", **options
        )
    elif path.exists() or looks_like_path(data):
        raise RecipeError(
            f"Expected --data to be {DOCSTRINGS!r}, a text, JSONL or Parquet file, or a hub id, "
            f"got {data!r}: there is no such file; check the path."
        )
    else:
        try:
            rows = datasets.load_dataset(data, split="train")
        except (OSError, ValueError) as error:  # not found, offline, no train split
            raise RecipeError(
                f"Expected --data to be {DOCSTRINGS!r}, a text, JSONL or Parquet file, or a hub "
                f"id, got {data!r}: it is no local file and the hub did not give it "
                f"({_first_line(error)}); check the name and the network."
            ) from error
    return rows.map(_pair, remove_columns=rows.column_names)


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a path: hub ids are `name` or `owner/name`."""
    suffixes = (*_BUILDERS, ".gguf", ".csv", ".safetensors")
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.endswith(suffixes)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@functools.cache  # the tiny model's tokenizer reads them too
def _docstrings() -> datasets.Dataset:
    """Pairs from the standard library, read as source: no module is imported.

    Sorted by module, so the same Python version gives the same rows on every machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in root.rglob("*.py") if _is_public_module(path.relative_to(root))]
    if not sources:
        raise RecipeError(
            f"Expected the standard library's sources under {root}, found none; pass a file of "
            "your own with --data."
        )
    pairs = []
    for path in sorted(sources, key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        for name, docstring in _documented(ast.parse(path.read_bytes()), module):
            pairs.append({"prompt": _ask(f"Explain what {name} does."), "completion": docstring})
    return datasets.Dataset.from_list(pairs)


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _is_public_module(path: Path) -> bool:
    parts = path.with_suffix("").parts
    names = [part for part in parts if part != "__init__"]
    if not names or names[0] not in sys.stdlib_module_names or names[0] in _LEFT_OUT:
        return False
    return not any(name in _TESTS or name.startswith("_") for name in names)


def _documented(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[tuple[str, str]]:
    for child in node.body:
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if child.name.startswith("_"):
            continue
        name = f"{prefix}.{child.name}"
        docstring = ast.get_docstring(child)
        if docstring and len(docstring) >= 30:  # shorter ones explain nothing
            yield name, docstring
        if isinstance(child, ast.ClassDef):
            yield from _documented(child, name)


def _pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of whatever columns as a prompt and a completion."""
    columns = set(row)
    for prompt, completion in (
        ("prompt", "completion"),
        ("prompt", "response"),
        ("question", "answer"),
        ("instruction", "output"),
        ("instruction", "response"),
    ):
        if {prompt, completion} <= columns:
            given = [row[prompt], row.get("input"), row.get("context")]
            question = "\n\n".join(filter(None, given))
            return {"prompt": _ask(question), "completion": row[completion]}
    if "messages" in columns:
        turns = [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
        if not turns or turns[-1]["role"] != "assistant":
            raise RecipeError(
                "Expected messages that end with a turn of the assistant, got "
                f"{[turn['role'] for turn in turns]}; leave such rows out."
            )
        return {"prompt": turns[:-1], "completion": turns[-1]["content"]}
    if "text" in columns:
        return {"prompt": [], "completion": row["text"]}
    raise RecipeError(
        "Expected columns text, messages, prompt + completion, prompt + response, instruction + "
        f"output, instruction + response or question + answer, got {', '.join(sorted(columns))}; "
        "rename the columns."
    )


def split(
    pairs: datasets.Dataset, max_held_out: int, share: float = 0.05
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Splits by a hash of the text, so that equal rows land on the same side.

    Args:
        pairs: Rows of `prompt` and `completion`.
        max_held_out: Most rows to hold out; the surplus is left out of both sides.
        share: Share of the rows held out, from 0 to 1.

    Returns:
        The rows to train on and the held-out rows, each in the order of `pairs`.

    Raises:
        RecipeError: One side is empty.
    """
    train: list[int] = []
    held_out: list[int] = []
    for index, pair in enumerate(pairs):
        text = json.dumps([pair["prompt"], pair["completion"]], sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        chance = int.from_bytes(digest[:4], "big") / 2**32  # uniform in [0, 1)
        (held_out if chance < share else train).append(index)
    if not train or not held_out:
        raise RecipeError(
            f"Expected enough rows to hold out {share:.0%} of them, got {len(pairs)}; give more."
        )
    return pairs.select(train), pairs.select(held_out[:max_held_out])


def keep_until(path: Path, step: int) -> None:
    """Drops the rows of a JSONL file that come after `step`: a resumed run makes them again."""
    if path.is_file():
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(row for row in rows if json.loads(row)["step"] <= step))
