"""A user's map from names in a checkpoint to names in the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from shardplug.errors import CheckpointError

__all__ = ["Renaming"]


class Renaming:
    """Gives the tensors of a checkpoint the names that a model has for them.

    Args:
        saved_names: For each model the checkpoint's name by the new one, where they differ.
    """

    def __init__(self, saved_names: Sequence[Mapping[str, str]]) -> None:
        self._saved = saved_names
        self._new = [{saved: new for new, saved in names.items()} for names in saved_names]

    @classmethod
    def of(
        cls, path: Path, manifest: Mapping[str, Any], rename: Mapping[str, str]
    ) -> tuple[Renaming, dict[str, Any]]:
        """Apply a map to a manifest.

        Args:
            path: The checkpoint, for messages.
            manifest: Its manifest.
            rename: New names by those in the checkpoint: of a tensor, or of a module and so of
                all that is in it; "" is the whole model. The longest name that fits counts.

        Returns:
            The renaming, and the manifest with the new names; "renamed" in it lists those that
            were chosen here, for each model.

        Raises:
            CheckpointError: For names that are not in the checkpoint, for two tensors that would
                have one name, and for one that would have none.
        """
        if not isinstance(rename, Mapping):
            raise CheckpointError(
                "Expected rename to be a dictionary, names in the checkpoint -> names in the "
                f"model, got {type(rename).__name__}."
            )
        if not rename:
            return cls([{} for _ in manifest["models"]]), dict(manifest)
        unused = set(rename)
        models, saved_names = [], []
        for model in manifest["models"]:
            new_names = {name: _renamed(name, rename, unused) for name in model}
            by_new: dict[str, str] = {}
            for name, new in new_names.items():
                if not new:
                    raise CheckpointError(f"Expected rename to leave {name} a name, got ''.")
                if new in by_new:
                    raise CheckpointError(
                        f"Expected rename to give every tensor a name of its own, but "
                        f"{by_new[new]} and {name} would both be {new}."
                    )
                by_new[new] = name
            models.append({new_names[name]: entry for name, entry in model.items()})
            saved_names.append({new: name for new, name in by_new.items() if new != name})
        if unused:
            names = [name for model in manifest["models"] for name in model]
            raise CheckpointError(
                f"Expected rename to name tensors or modules of {path}, but it has no "
                f"{', '.join(_with_hint(name, names) for name in sorted(unused))}."
            )
        renaming = cls(saved_names)
        optimizers = [
            {renaming._new_parameter(name): state for name, state in optimizer.items()}
            for optimizer in manifest["optimizers"]
        ]
        changed = {"models": models, "optimizers": optimizers, "renamed": [*map(list, saved_names)]}
        return renaming, {**manifest, **changed}

    def saved(self, index: int, name: str) -> str:
        """Return the checkpoint's name of a tensor of a model."""
        return self._saved[index].get(name, name) if index < len(self._saved) else name

    def saved_parameter(self, name: str) -> str:
        """Return the checkpoint's name of an optimizer's parameter."""
        index, front, name = _split(name)
        return front + self.saved(index, name)

    def groups(self, others: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint has of an optimizer besides tensors, with the new names."""
        return {
            **others,
            "param_groups": [
                {**group, "params": [self._new_parameter(name) for name in group["params"]]}
                for group in others["param_groups"]
            ],
            "plain_state": {
                self._new_parameter(name): values for name, values in others["plain_state"].items()
            },
        }

    def _new_parameter(self, name: str) -> str:
        index, front, name = _split(name)
        new = self._new[index].get(name, name) if index < len(self._new) else name
        return front + new


def _split(name: str) -> tuple[int, str, str]:
    """Split a parameter's name as an optimizer knows it: "model1::head.weight"."""
    head, separator, tail = name.partition("::")
    return (int(head.removeprefix("model")), head + separator, tail) if separator else (0, "", name)


def _renamed(name: str, rename: Mapping[str, str], unused: set[str]) -> str:
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        front = ".".join(parts[:end])
        if front in rename:
            unused.discard(front)
            return ".".join(part for part in (rename[front], *parts[end:]) if part)
    return name


def _with_hint(name: str, names: Sequence[str]) -> str:
    """Add the checkpoint's name that was probably meant: one with more in front, or alike."""
    known: dict[str, None] = {}
    for full in names:
        parts = full.split(".")
        known |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    meant = [full for full in known if full.endswith(f".{name}")]
    meant = meant if len(meant) == 1 else get_close_matches(name, known, 1)
    return f"{name} (did you mean {meant[0]}?)" if meant else name
