"""Finds the safetensors files of a model, in a folder or through the Hugging Face cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from shardplug.checkpoint.foreign.foreign_folders import identify
from shardplug.checkpoint.foreign.safetensors_folder import check_weights_file, read_index
from shardplug.checkpoint.format.safetensors_file import read_header
from shardplug.errors import CheckpointError
from shardplug.integrations.hf.stored import FileTensor

__all__ = ["ModelFolder", "find_folder"]

_ONE_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BESIDES = ("*.json", "*.py")
"""What else is needed of a repository: configs, and code where a model brings its own."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where a model's files are.

    Attributes:
        path: The folder, which may be a snapshot in the cache.
        files: Names of its safetensors files.
        choice: File by tensor name, where there is an index.
    """

    path: Path
    files: tuple[str, ...]
    choice: dict[str, str]

    def tensors(self) -> dict[str, FileTensor]:
        """Read the headers of all files.

        Returns:
            The tensors by their names in the files.

        Raises:
            CheckpointError: When a file is missing or damaged, or the index names other tensors.
        """
        found: dict[str, FileTensor] = {}
        for file in self.files:
            for name, entry in _header(self.path / file).items():
                if self.choice.get(name, file) == file:
                    found[name] = FileTensor(self.path / file, name, entry)
        lost = sorted(set(self.choice) - set(found))
        if lost:
            raise CheckpointError(
                f"Expected {lost[0]} in {self.path / self.choice[lost[0]]}, as {_INDEX} says, but "
                f"it is not there ({len(lost)} tensors are missing). Copy or download the folder "
                "again."
            )
        return found

    def check(self) -> None:
        """Raise unless every file is there and whole.

        Raises:
            CheckpointError: Naming the file.
        """
        self.tensors()


def find_folder(
    name_or_path: str | os.PathLike[str],
    *,
    weights_name: str | None = None,
    **hub: Any,
) -> ModelFolder:
    """Find a model's files; those of a hub model are downloaded unless they are in the cache.

    Args:
        name_or_path: A local folder, or the id of a model on the hub.
        weights_name: The file or index that the config names, instead of the usual ones.
        **hub: `revision`, `cache_dir`, `local_files_only`, `token`, as `huggingface_hub` has them.

    Raises:
        CheckpointError: When there is no such model, or it has no safetensors files.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _files_in(path, weights_name, str(path))
    name = str(name_or_path)
    if path.exists() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise CheckpointError(
            f"Expected the folder of a Hugging Face model, got {identify(path).description} at "
            f"{path}. Pass a folder that save_pretrained() wrote, or a hub id."
        )
    snapshot = _download(name, [*_BESIDES, _INDEX], hub)
    # The names are read from one commit, and the weights fetched from the same.
    hub = {**hub, "revision": snapshot.name}
    wanted = weights_name or (_INDEX if (snapshot / _INDEX).is_file() else _ONE_FILE)
    if wanted.endswith(".index.json"):
        wanted_files = sorted(set(read_index(snapshot / wanted).values()))
    else:
        wanted_files = [wanted]
    return _files_in(_download(name, [*_BESIDES, *wanted_files], hub), weights_name, name)


def _download(name: str, patterns: list[str], hub: dict[str, Any]) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, **hub))
    except (OSError, HFValidationError, ValueError) as error:  # the hub's errors are OSErrors
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"Expected a local folder or a model on the Hugging Face hub, got {name!r}: there is "
            f"no such folder, and the hub did not give it ({reason}). Check the name and the "
            "network."
        ) from error


def _files_in(path: Path, weights_name: str | None, shown: str) -> ModelFolder:
    chosen = [weights_name] if weights_name else [_ONE_FILE, _INDEX]
    name = next((name for name in chosen if check_weights_file(path, name).is_file()), None)
    if name is None:
        raise CheckpointError(_no_weights(path, chosen, shown))
    if not name.endswith(".index.json"):
        return ModelFolder(path, (name,), {})
    choice = read_index(path / name)
    for file in sorted(set(choice.values())):
        if not check_weights_file(path, file).is_file():
            raise CheckpointError(
                f"Expected {file} in {path}, as {name} says, but it is missing. Copy or download "
                "the folder again."
            )
    return ModelFolder(path, tuple(sorted(set(choice.values()))), choice)


def _no_weights(path: Path, names: list[str], shown: str) -> str:
    expected = f"Expected {' or '.join(names)} in {shown}, found "
    kind = identify(path)
    if any(path.glob("*.gguf")):
        return (
            f"{expected}GGUF files, which are read whole: load them with transformers "
            "(from_pretrained(folder, gguf_file=...))."
        )
    if kind.kind == "shardplug":
        return (
            f"{expected}a shardplug checkpoint. Load it with engine.load() or the Trainer's "
            "ckpt_path, or make a Hugging Face folder of it with `shardplug export`."
        )
    if kind.kind == "safetensors":
        return (
            f"{expected}other safetensors files: {', '.join(f.name for f in _some(path))}. Rename "
            f"the file to {_ONE_FILE}, or save the model with save_pretrained()."
        )
    if kind.kind == "unknown":
        return (
            f"{expected}neither. Only safetensors files are read; save the model with "
            "save_pretrained(), which writes them."
        )
    return f"{expected}{kind}"


def _some(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))[:4]


def _header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            if file.read(40).startswith(b"version https://git-lfs"):
                raise CheckpointError(
                    f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull`."
                )
        return dict(read_header(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
