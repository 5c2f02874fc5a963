"""Folders and files of other tools: what they are, and how their weights get here."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardplug.checkpoint.foreign.dcp_folder import DcpFolder
from shardplug.checkpoint.foreign.safetensors_folder import SafetensorsFolder
from shardplug.checkpoint.format.commit import MANIFEST, is_leftover

__all__ = ["TRAINER_FOLDER", "Foreign", "foreign_source", "identify"]

TRAINER_FOLDER = "pytorch_model_fsdp_and_optimizer"
"""The sharded folder inside of a checkpoint of Hugging Face's Trainer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreign:
    """What something that is no checkpoint of shardplug is."""

    kind: str
    """One word for programs, like "deepspeed"."""

    description: str
    """For a message: "a DeepSpeed checkpoint"."""

    advice: str
    """What to do with it, in full sentences."""

    loads: bool = False
    """Whether shardplug reads its tensors as it is."""

    def __str__(self) -> str:
        """Return description and advice."""
        return f"{self.description}. {self.advice}"


def identify(path: Path) -> Foreign:
    """Say what a file or folder is, from the names in it.

    Args:
        path: Anything; it need not exist.
    """
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        return Foreign(kind="missing", description="nothing", advice="Check the path.")
    names = _names(path)
    for kind in _FOLDERS:
        found = kind(path, names)
        if found is not None:
            return found
    inside = ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
    return Foreign(
        kind="unknown",
        description=f"another kind of folder, with {inside} in it" if names else "an empty folder",
        advice="Check the path.",
    )


def foreign_source(path: Path) -> DcpFolder | SafetensorsFolder | None:
    """Open a folder of another tool, if its tensors can be read as they are.

    Args:
        path: A folder of torch.distributed.checkpoint (also Lightning's and Accelerate's), or of
            safetensors files.

    Returns:
        Its content in the form that a `Reader` works with, or None.

    Raises:
        CheckpointError: When it is such a folder and cannot be read.
    """
    kind = identify(path)
    if not kind.loads:
        return None
    if kind.kind == "safetensors":
        return SafetensorsFolder(path)
    return DcpFolder(path, kind.kind)


# -- Folders, the most telling signs first --------------------------------------------------------


def _names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []


def _has(names: list[str], pattern: str) -> bool:
    return any(re.fullmatch(pattern, name) for name in names)


def _newer_or_own(path: Path, names: list[str]) -> Foreign | None:
    if MANIFEST not in names:
        return None
    return Foreign(
        kind="shardplug",
        description="a checkpoint folder with a manifest",
        advice="`shardplug inspect` shows what is in it.",
    )


def _unfinished(path: Path, names: list[str]) -> Foreign | None:
    """One of our own saves that was killed; the random states are written after the tensors."""
    ours = _has(names, r"rng_\d+\.pt") or f"{MANIFEST}.tmp" in names
    if not is_leftover(path) and not (ours and _has(names, r".*\.distcp|\.metadata")):
        return None
    return Foreign(
        kind="unfinished",
        description="a save of shardplug that did not finish",
        advice="Load an earlier checkpoint; the next save into the same folder removes this one.",
    )


def _deepspeed(path: Path, names: list[str]) -> Foreign | None:
    shards = r".*(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt"
    root = path.parent if _has(names, shards) else path
    inner = [path / name for name in names if re.fullmatch(r"global_step\d+|checkpoint", name)]
    if root == path and not (
        "zero_to_fp32.py" in names
        or any(
            _has([f.name for f in folder.iterdir()], shards) for folder in inner if folder.is_dir()
        )
    ):
        return None
    script = root / "zero_to_fp32.py"
    command = f"python {script}" if script.is_file() else "python -m deepspeed.utils.zero_to_fp32"
    return Foreign(
        kind="deepspeed",
        description="a DeepSpeed checkpoint",
        advice=f"Convert its weights with `{command} {root} OUT --safe_serialization`, then load "
        "the folder OUT; DeepSpeed's optimizer state cannot be taken over.",
    )


def _accelerate(path: Path, names: list[str]) -> Foreign | None:
    if (path / "pytorch_model_fsdp_0" / ".metadata").is_file():
        return Foreign(
            kind="accelerate",
            description="an Accelerate FSDP checkpoint",
            advice="Its weights and optimizer load as they are; schedulers, random states and "
            "data positions do not.",
            loads=True,
        )
    if "pytorch_model_fsdp.bin" in names:
        return Foreign(
            kind="accelerate_full",
            description="an Accelerate FSDP checkpoint with full state dicts",
            advice="Load the weights into the model before it is sharded: "
            f'`model.load_state_dict(torch.load("{path / "pytorch_model_fsdp.bin"}"))`.',
        )
    return None


def _dcp(path: Path, names: list[str]) -> Foreign | None:
    if ".metadata" in names:
        lightning = "meta.pt" in names
        return Foreign(
            kind="lightning" if lightning else "dcp",
            description="a sharded checkpoint of Lightning's own strategies"
            if lightning
            else "a plain torch.distributed.checkpoint folder",
            advice="Its weights, and optimizer state that is kept by name, load as they are.",
            loads=True,
        )
    if _has(names, r".*\.distcp"):
        return Foreign(
            kind="unfinished_dcp",
            description="a torch.distributed.checkpoint save that did not finish (.metadata is "
            "missing)",
            advice="Load an earlier checkpoint.",
        )
    return None


def _trainer(path: Path, names: list[str]) -> Foreign | None:
    """A `checkpoint-<step>` of Trainer that has no weights as files, or an adapter's alone."""
    if not _holds_sharded(path) or _has(names, r"model.*\.safetensors"):
        return None
    return Foreign(
        kind="trainer",
        description="a checkpoint of Hugging Face's Trainer",
        advice=f"Pass the sharded folder in it: {path / TRAINER_FOLDER}.",
    )


def _trainer_output(path: Path, names: list[str]) -> Foreign | None:
    """A Trainer's `output_dir`."""
    inner = [name for name in names if _holds_sharded(path / name)]
    if not inner:
        return None
    shown = ", ".join(inner[:5]) + (" and more" if len(inner) > 5 else "")
    return Foreign(
        kind="trainer_output",
        description=f"an output_dir of Hugging Face's Trainer, with {shown}",
        advice=f"Pass the sharded folder in one of them, as {path / inner[0] / TRAINER_FOLDER}.",
    )


def _holds_sharded(path: Path) -> bool:
    return (path / TRAINER_FOLDER / MANIFEST).is_file()


def _hugging_face(path: Path, names: list[str]) -> Foreign | None:
    if "adapter_config.json" in names:
        return Foreign(
            kind="peft",
            description="a PEFT adapter",
            advice=f'Load it onto its base model with `PeftModel.from_pretrained(base, "{path}", '
            "is_trainable=True)` before sharding.",
        )
    if _has(names, r".*\.safetensors"):
        beside = f" The optimizer's state is in {path / TRAINER_FOLDER}."
        return Foreign(
            kind="safetensors",
            description="a folder of safetensors files",
            advice="Its weights load as they are." + (beside if _holds_sharded(path) else ""),
            loads=True,
        )
    if _has(names, r"pytorch_model.*\.bin(\.index\.json)?"):
        return Foreign(
            kind="pickled",
            description="a Hugging Face folder of pickled weights",
            advice="Convert it to safetensors with "
            f'`AutoModel.from_pretrained("{path}").save_pretrained(OUT)` of the model\'s own '
            "class, then load the folder OUT.",
        )
    if "snapshots" in names and "refs" in names:
        return Foreign(
            kind="hub_cache",
            description="a model's folder in the Hugging Face cache",
            advice=f"Pass one of the folders in {path / 'snapshots'}.",
        )
    return None


def _checkpoints(path: Path, names: list[str]) -> Foreign | None:
    inner = [name for name in names if (path / name / MANIFEST).is_file()]
    if not inner:
        return None
    shown = ", ".join(inner[:5]) + (" and more" if len(inner) > 5 else "")
    return Foreign(
        kind="checkpoints",
        description=f"a folder of checkpoints ({shown})",
        advice="Pass one of them; `shardplug inspect` shows which is the newest whole one.",
    )


_FOLDERS: tuple[Callable[[Path, list[str]], Foreign | None], ...] = (
    _newer_or_own,
    _unfinished,
    _deepspeed,
    _accelerate,
    _dcp,
    _trainer,
    _trainer_output,
    _hugging_face,
    _checkpoints,
)


# -- Files ----------------------------------------------------------------------------------------


def _file(path: Path) -> Foreign:
    if (path.parent / MANIFEST).is_file():
        return Foreign(
            kind="part",
            description="a file inside of a checkpoint",
            advice=f"Pass the folder that it is in: {path.parent}.",
        )
    if path.suffix == ".safetensors":
        return Foreign(
            kind="safetensors_file",
            description="a safetensors file",
            advice=f"Pass the folder that it is in: {path.parent}.",
        )
    if path.suffix == ".ckpt":
        return Foreign(
            kind="lightning_file",
            description="a Lightning checkpoint file",
            advice="The Trainer resumes from it as it is "
            f'(`trainer.fit(model, ckpt_path="{path}")`), and `load_from_checkpoint` reads it; '
            "elsewhere load its weights before the model is sharded: "
            f'`model.load_state_dict(torch.load("{path}")["state_dict"])`.',
        )
    if zipfile.is_zipfile(path):
        return Foreign(
            kind="torch_file",
            description="a file of torch.save",
            advice="Load it before the model is sharded: "
            f'`model.load_state_dict(torch.load("{path}"))`.',
        )
    return Foreign(kind="file", description="a file", advice="Pass a checkpoint folder.")
