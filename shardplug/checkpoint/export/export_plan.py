"""Decides what an export writes: which tensors, under which names, in which files and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardplug.checkpoint.export.export_files import Item, aligned, config_of, index_of, shards_of
from shardplug.checkpoint.format.manifest import dtype_of
from shardplug.checkpoint.format.safe_names import check_component
from shardplug.checkpoint.state.extra_state import is_extra
from shardplug.checkpoint.state.tensor_names import listed
from shardplug.errors import CheckpointError, ConfigError

__all__ = ["CHANGED_BASE", "ExportPlan", "PlannedFolder", "plan_export"]

CHANGED_BASE = "changed_base"
"""Key in a manifest: for each model the frozen tensors under adapters that training changed."""

_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFolder:
    """One folder of an export.

    Attributes:
        name: Relative to the export, "" for itself.
        files: Tensors by file name, in the order in which they are written.
        texts: JSON objects by file name.
    """

    name: str
    files: Mapping[str, Sequence[Item]]
    texts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """All of an export.

    Attributes:
        model: Number of the model.
        folders: What is written.
        origin: Where the model came from, by its config: a folder or a name on the hub.
        is_adapter: Whether adapters are written, and not a model.
        notes: What the user should know.
    """

    model: int
    folders: Sequence[PlannedFolder]
    origin: str | None
    is_adapter: bool
    notes: list[str] = field(default_factory=list)


def plan_export(
    manifest: Mapping[str, Any],
    *,
    dtype: str | torch.dtype,
    max_shard_bytes: int,
    module: str | None,
    adapter_only: bool,
) -> ExportPlan:
    """Plan an export.

    Args:
        manifest: What there is, in the form of a checkpoint's manifest.
        dtype: "source" for the dtypes the tensors came in, or one floating dtype for all.
        max_shard_bytes: Size of a file that is not exceeded but by a tensor larger than that.
        module: Which part: the prefix of its names, after "model<i>::" for a later model.
        adapter_only: Insist on adapters.

    Raises:
        ConfigError: For a dtype or a module that does not exist, or when `module` must be given.
        CheckpointError: For adapters whose files cannot be made without PEFT.
    """
    wanted = _dtype(dtype)
    if max_shard_bytes < 1:
        raise ConfigError(f"Expected a positive size of the files, got {max_shard_bytes}.")
    index, prefix, entry = _choose(manifest, module)
    tensors = _Tensors(manifest, index, wanted)
    if entry is not None and "peft" in entry:
        return ExportPlan(
            model=index,
            folders=[
                _adapter(tensors, prefix, name, content) for name, content in entry["peft"].items()
            ],
            origin=_origin(entry),
            is_adapter=True,
            notes=_notes_on_base(manifest, index),
        )
    if adapter_only:
        raise ConfigError(
            "Expected a model with PEFT adapters, but the checkpoint has none of them: leave "
            "--adapter-only (adapter_only=True) out."
        )
    items, notes = tensors.of_module(prefix, set((entry or {}).get("ignored", ())))
    files = shards_of(items, max_shard_bytes)
    texts: dict[str, Mapping[str, Any]] = {}
    if len(files) > 1:
        texts["model.safetensors.index.json"] = index_of(files)
    if entry is None or entry.get("config") is None:
        notes.append("no Hugging Face configuration was found in it: only the weights are written")
    else:
        texts["config.json"] = config_of(entry, items)
        if entry.get("generation_config") is not None:
            texts["generation_config.json"] = {
                k: v for k, v in entry["generation_config"].items() if k != "_name_or_path"
            }
    return ExportPlan(
        model=index,
        folders=[PlannedFolder(name="", files=files, texts=texts)],
        origin=None if entry is None else _origin(entry),
        is_adapter=False,
        notes=notes,
    )


def _notes_on_base(manifest: Mapping[str, Any], index: int) -> list[str]:
    changed: Sequence[Sequence[str]] = manifest.get(CHANGED_BASE, ())
    if index >= len(changed) or not changed[index]:
        return []
    return [
        f"{len(changed[index])} tensors of the base under the adapter changed during training: the "
        "adapter belongs to that base, not to the one it was made on"
    ]


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    name = str(dtype).removeprefix("torch.")
    if name == "source":
        return None
    if name not in _DTYPES:
        raise ConfigError(f"Expected dtype to be 'source' or one of {_DTYPES}, got {dtype!r}.")
    found: torch.dtype = getattr(torch, name)
    return found


def _choose(
    manifest: Mapping[str, Any], module: str | None
) -> tuple[int, str, Mapping[str, Any] | None]:
    """Return the number of the model, the prefix of the names and what is known about them."""
    entries = list(manifest.get("hugging_face", ()))
    models = manifest["models"]
    choices = [_label(entry["model"], entry["prefix"]) for entry in entries]
    if module is None:
        if len(entries) == 1:
            return entries[0]["model"], entries[0]["prefix"], entries[0]
        if len(entries) > 1 or len(models) > 1:
            some = choices or [_label(i, "") for i in range(len(models))]
            raise ConfigError(
                f"Expected one model to export, but there are {len(some)}. Choose one with "
                f"--module (module=...): {', '.join(map(repr, some))}."
            )
        return 0, "", None
    head, separator, tail = module.partition("::")
    number = head.removeprefix("model") if separator else "0"
    prefix = (tail if separator else module).removesuffix(".")
    prefix = f"{prefix}." if prefix else ""
    if not number.isdecimal() or int(number) >= len(models):
        raise ConfigError(f"Expected a module of {len(models)} models, got {module!r}.")
    for entry in entries:
        if (entry["model"], entry["prefix"]) == (int(number), prefix):
            return int(number), prefix, entry
    names = _all_names(manifest, int(number))
    if not any(name.startswith(prefix) for name in names):
        front = f"model{number}::" if int(number) else ""
        tops = sorted({front + name.partition(".")[0] for name in names})
        parts = choices if len(choices) > 1 or (entries and entries[0]["prefix"]) else tops
        raise ConfigError(
            f"Expected module to be the beginning of names, got {module!r}; there are "
            f"{listed(parts, 8)}."
        )
    return int(number), prefix, None


def _all_names(manifest: Mapping[str, Any], index: int) -> list[str]:
    """Return the names of a model's tensors, with the further names of those that are tied."""
    ties = manifest.get("tied", ())
    tied = ties[index] if index < len(ties) else {}
    return [*manifest["models"][index], *(name for others in tied.values() for name in others)]


def _label(model: int, prefix: str) -> str:
    return prefix if prefix and not model else f"model{model}::{prefix}"


def _origin(entry: Mapping[str, Any]) -> str | None:
    origin = (entry.get("config") or {}).get("_name_or_path")
    return origin if isinstance(origin, str) else None


class _Tensors:
    """The tensors of one model, by every name that they have."""

    def __init__(self, manifest: Mapping[str, Any], index: int, wanted: torch.dtype | None) -> None:
        def of_model(key: str) -> Mapping[str, Any]:
            values = manifest.get(key, ())
            return values[index] if index < len(values) else {}

        self._entries: Mapping[str, Mapping[str, Any]] = manifest["models"][index]
        self._came_in: Mapping[str, str] = of_model("source_dtypes")
        self._tied: Mapping[str, Sequence[str]] = of_model("tied")
        self._wanted = wanted

    def item(self, name: str, source: str) -> Item:
        entry = self._entries[source]
        dtype = dtype_of({"dtype": self._came_in.get(source, entry["dtype"])})
        # What is not an ordinary float (counters, flags, quantised weights) stays as it is.
        if self._wanted is not None and dtype.is_floating_point and dtype.itemsize > 1:
            dtype = self._wanted
        return Item(name=name, source=source, shape=tuple(entry["shape"]), dtype=dtype)

    def of_module(self, prefix: str, ignored: set[str]) -> tuple[list[Item], list[str]]:
        """Return every tensor of a module once, and notes."""
        items, extra = [], []
        for source in self._entries:
            names = [source, *self._tied.get(source, ())]
            inside = [name for name in names if name.startswith(prefix)]
            if not inside:
                continue
            name = inside[0].removeprefix(prefix)
            if is_extra(name):
                extra.append(name)
            elif name not in ignored:
                items.append(self.item(name, source))
        if not items:
            raise ConfigError("Expected a module with tensors, got one without.")
        notes = [f"extra state of modules is left out: {listed(extra, 5)}"] if extra else []
        return items, notes

    def of_adapter(self, prefix: str, names: Mapping[str, str]) -> list[Item]:
        """Return an adapter's tensors, by the names that PEFT gives them."""
        sources = {alias: name for name, others in self._tied.items() for alias in others}
        sources |= {name: name for name in self._entries}
        lacking = [name for name in names.values() if prefix + name not in sources]
        if lacking:
            raise CheckpointError(
                "Expected the whole adapter in the checkpoint, but it lacks "
                f"{listed(lacking, 5)}: it was saved without them."
            )
        return [self.item(theirs, sources[prefix + name]) for theirs, name in names.items()]


def _adapter(
    tensors: _Tensors, prefix: str, name: str, content: Mapping[str, Any]
) -> PlannedFolder:
    """Plan what PEFT's own `save_pretrained` writes; its default adapter is not in a folder."""
    try:
        check_component(name)
    except ValueError as error:
        raise CheckpointError(
            f"The name of an adapter {error}: its files would be there."
        ) from error
    if content.get("names") is None:
        kind = content["config"].get("peft_type")
        raise CheckpointError(
            f"Expected an adapter that is made of the model's own tensors, but {name} ({kind}) is "
            "computed from them: load the checkpoint into an unsharded PEFT model and call its "
            "save_pretrained."
        )
    items = tensors.of_adapter(prefix, content["names"])
    return PlannedFolder(
        name="" if name == "default" else name,
        files={"adapter_model.safetensors": aligned(items)},
        texts={"adapter_config.json": content["config"]},
    )
