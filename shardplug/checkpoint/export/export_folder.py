"""The folder of an export: made aside, filled file by file, renamed when it is whole."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardplug.checkpoint.export.export_files import Item
from shardplug.checkpoint.export.export_plan import ExportPlan
from shardplug.checkpoint.format.commit import new_id, nobody_in
from shardplug.checkpoint.format.durable import bytes_of, is_full, naming, sync
from shardplug.checkpoint.format.safetensors_file import header_bytes, is_own_file
from shardplug.errors import CheckpointError, ConfigError
from shardplug.tiers.filesystem import room_at

__all__ = [
    "ExportFolder",
    "TensorFile",
    "could_not_be_written",
    "prepare_folder",
    "room_for",
    "write_files",
]

_TOKENIZER = re.compile(
    r"tokenizer.*\.(json|model|jinja)|(special_tokens_map|added_tokens|vocab)\.json|merges\.txt|"
    r"vocab\.txt|(spiece|sentencepiece.*)\.model|.*\.tiktoken|tekken\.json|chat_template.*|"
    r"(pre)?processor_config\.json|video_preprocessor_config\.json"
)
_WEIGHTS = re.compile(
    r"(model(-\d{5}-of-\d{5})?|adapter_model)\.safetensors|model\.safetensors\.index\.json|"
    r"(config|generation_config|adapter_config)\.json"
)


class ExportFolder:
    """A folder that is being made. Works on one rank.

    Args:
        target: Where the export will be.
        overwrite: Replace an export that is there.

    Raises:
        ConfigError: When something is there that is not to be replaced.
    """

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        self.target = target.absolute()
        _check_target(self.target, overwrite)
        self.folder = self.target.with_name(f".{self.target.name}.export-{new_id()}")
        _clear(self.target)
        self.folder.mkdir(parents=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def write_texts(self, name: str, texts: Mapping[str, Mapping[str, Any]]) -> None:
        """Write JSON files into the folder, or one inside it."""
        for file, content in texts.items():
            path = self.folder / name / file
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
            path.write_text(text, encoding="utf-8")

    def publish(self) -> None:
        """Make all of it durable and rename it to its target."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            sync(path)
        sync(self.folder)
        if self.target.is_dir():
            shutil.rmtree(self.target)
        self.folder.rename(self.target)
        sync(self.target.parent)
        os.close(self._lock)

    def discard(self) -> None:
        """Remove what was made of it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def prepare_folder(
    target: Path,
    plan: ExportPlan,
    *,
    tokenizer: str | os.PathLike[str] | None,
    overwrite: bool,
) -> ExportFolder:
    """Make the folder of an export with everything in it but the tensors.

    Args:
        target: Where the export will be.
        plan: The plan; notes are added to it.
        tokenizer: A folder with the tokenizer's files; None looks where the model came from.
        overwrite: Replace an export that is there.

    Raises:
        ConfigError: When something else is there, or the folder given has no tokenizer.
        CheckpointError: When it cannot be written.
    """
    folder: ExportFolder | None = None
    try:
        if plan.origin and target.is_dir() and target.resolve() == Path(plan.origin).resolve():
            raise ConfigError(
                f"Expected a folder of its own to export to, but the model came from {target}. "
                "Choose another folder."
            )
        folder = ExportFolder(target, overwrite=overwrite)
        for part in plan.folders:
            folder.write_texts(part.name, part.texts)
        _copy_tokenizer(folder, plan, tokenizer)
    except BaseException as error:
        if folder is not None:
            folder.discard()
        if isinstance(error, OSError):
            raise could_not_be_written(target, plan, error) from error
        raise
    return folder


def could_not_be_written(target: Path, plan: ExportPlan, error: OSError) -> CheckpointError:
    """Return the error to raise for one of the system, before the export's folder is removed."""
    return CheckpointError(
        f"{target} could not be written: {error}{room_for(target, plan, error)}."
    )


def room_for(target: Path, plan: ExportPlan, error: BaseException) -> str:
    """Say what an export needs and what there is, after an error of a drive that is full."""
    if not is_full(error):
        return ""
    items = (item for part in plan.folders for file in part.files.values() for item in file)
    needed = sum(item.size_bytes for item in items)
    ours = bytes_of(target.parent.glob(f".{target.name}.export-*/**/*"))
    return f". Its tensors take {needed} bytes; {target.parent} has {room_at(target, ours=ours)}"


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.name:
        raise ConfigError(f"Expected the path of a folder to make, got {target}.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"Expected a new folder to export to, but {target} is a file or a link.")
    inside = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else []
    if inside and not overwrite:
        raise ConfigError(
            f"Expected a new folder to export to, but {target} is not empty. Choose another, or "
            "say --overwrite (overwrite=True)."
        )
    others = [name for name in inside if not _is_exported(target / name)]
    if others:
        raise ConfigError(
            f"Expected an older export to replace, but {target} holds other things too: "
            f"{', '.join(others[:5])}. Choose another folder."
        )
    for file in sorted(target.rglob("*.safetensors")) if inside else ():
        if not is_own_file(file):
            raise ConfigError(
                f"Expected an older export to replace, but {file} was not written by an export: "
                "it may be a model that others are made from. Choose another folder, or remove it."
            )


def _is_exported(path: Path, inside: bool = False) -> bool:
    """Whether an export writes a file of that name, or such files into a folder of an adapter."""
    if path.is_symlink():
        return False
    if path.is_dir():
        adapter = not inside and (path / "adapter_config.json").is_file()
        return adapter and all(_is_exported(entry, inside=True) for entry in path.iterdir())
    return bool(_TOKENIZER.fullmatch(path.name) or _WEIGHTS.fullmatch(path.name))


def _clear(target: Path) -> None:
    """Remove what exports to the same place left when they were killed."""
    name = re.compile(rf"\.{re.escape(target.name)}\.export-[0-9a-f]{{8}}")
    for path in target.parent.iterdir() if target.parent.is_dir() else ():
        if not name.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
            continue
        with nobody_in(path) as dead:
            inside = (entry for entry in path.iterdir() if dead)
            if dead and all(_is_begun(entry) for entry in inside):
                shutil.rmtree(path, ignore_errors=True)


def _is_begun(path: Path) -> bool:
    """Whether an export may have made this; an adapter's folder may be without its files yet."""
    return _is_exported(path) or (
        path.is_dir() and not path.is_symlink() and not any(path.iterdir())
    )


# -- Tensors --------------------------------------------------------------------------------------


class TensorFile:
    """A safetensors file, written from its beginning to its end.

    Args:
        path: The file.
        items: Its tensors, in order.
    """

    def __init__(self, path: Path, items: Sequence[Item]) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._file: BinaryIO = path.open("wb")
        with naming(path):
            self._file.write(header_bytes({item.name: (item.dtype, item.shape) for item in items}))

    def write(self, tensor: torch.Tensor) -> None:
        """Add the bytes of a tensor, or of its next rows."""
        tensor = tensor.detach().contiguous()
        size = tensor.numel() * tensor.element_size()
        if size:  # the tensor's own memory: no copy, and no need for numpy
            with naming(self._path):
                self._file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()


def write_files(
    folder: ExportFolder, plan: ExportPlan, read: Callable[[Sequence[Item]], Iterable[torch.Tensor]]
) -> None:
    """Write all tensors of an export.

    Args:
        folder: The folder.
        plan: The plan.
        read: Yields tensors in the order of the items, in the items' dtypes.
    """
    for part in plan.folders:
        for name, items in part.files.items():
            file = TensorFile(folder.folder / part.name / name, items)
            try:
                for tensor in read(items):
                    file.write(tensor)
                    del tensor  # before the next one is read
            finally:
                file.close()


# -- Tokenizer ------------------------------------------------------------------------------------


def _copy_tokenizer(
    folder: ExportFolder, plan: ExportPlan, tokenizer: str | os.PathLike[str] | None
) -> None:
    """Copy the tokenizer's files; without, add a note that says how to get them.

    Args:
        folder: The folder.
        plan: The plan, for where the model came from and for the note.
        tokenizer: A folder that holds them; None looks where the model came from.

    Raises:
        ConfigError: When there are none in the folder given.
    """
    origin = Path(plan.origin or "") if tokenizer is None else Path(tokenizer)
    files = [
        path
        for path in (sorted(origin.iterdir()) if str(origin) != "." and origin.is_dir() else [])
        if path.is_file() and _TOKENIZER.fullmatch(path.name)
    ]
    if not files and tokenizer is not None:
        raise ConfigError(f"Expected a folder with a tokenizer's files, got {tokenizer}.")
    for path in files:
        shutil.copyfile(path, folder.folder / path.name)
    has_config = any("config.json" in part.texts for part in plan.folders)
    if not files and has_config:
        where = repr(plan.origin) if plan.origin else "MODEL"
        plan.notes.append(
            "no tokenizer was found: add one with --tokenizer FOLDER, or with "
            f"AutoTokenizer.from_pretrained({where}).save_pretrained({str(folder.target)!r})"
        )
