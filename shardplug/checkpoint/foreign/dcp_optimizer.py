"""Finds optimizers among the entries of a torch.distributed.checkpoint (DCP) folder.

torch's `get_optimizer_state_dict` writes two forms. Nested: paths ("state", name, key) and
("param_groups", number, option). Flattened: one key "state.<name>.<key>" and one
"param_groups.<name>.<option>" for each parameter and option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardplug.errors import CheckpointError

__all__ = ["DcpOptimizer", "KeyPath", "find_optimizers"]

KeyPath = tuple[Any, ...]
"""The keys that lead to an entry in the dictionary that was saved."""


@dataclass(frozen=True, kw_only=True)
class DcpOptimizer:
    """Where one optimizer's state and options are.

    Attributes:
        state: DCP's keys by parameter name and key.
        nested: DCP's keys by group and option, in the nested form.
        flat: DCP's keys by parameter name and option, in the flattened form.
        front: What is put in front of names: "model1::" for parameters of the second model.
    """

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    nested: dict[int, dict[str, str]] = field(default_factory=dict)
    flat: dict[str, dict[str, str]] = field(default_factory=dict)
    front: str = ""

    @property
    def group_keys(self) -> list[str]:
        """DCP's keys of everything in the parameter groups."""
        options = [*self.nested.values(), *self.flat.values()]
        return [key for group in options for key in group.values()]

    @property
    def all_keys(self) -> list[str]:
        """DCP's keys of everything that belongs to the optimizer."""
        return [*self.group_keys, *(k for keys in self.state.values() for k in keys.values())]

    def owned_by(self, models: Sequence[Mapping[str, str]]) -> DcpOptimizer | None:
        """Return it with its parameters named as those of the model that has most of them.

        None where no model has any of them: the state is kept by number.
        """
        names = self.state or self.flat
        fits = [sum(name in model for name in names) for model in models]
        if names and not any(fits):
            return None
        index = fits.index(max(fits))
        front = f"model{index}::" if index else ""
        state = {front + name: keys for name, keys in self.state.items()}
        return replace(self, state=state, front=front)

    def groups(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Build the parameter groups.

        Args:
            values: What was read, by DCP's keys.

        Raises:
            CheckpointError: When the groups hold numbers in place of names.
        """
        groups = [self._group(keys, values) for _, keys in sorted(self.nested.items())]
        by_options: dict[str, dict[str, Any]] = {}
        for name, keys in self.flat.items():
            options = {option: values[key] for option, key in keys.items()}
            same = by_options.setdefault(repr(sorted(options.items())), {**options, "params": []})
            same["params"].append(self.front + name)
        return [*groups, *by_options.values()]

    def _group(self, keys: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
        options = {option: values[key] for option, key in keys.items()}
        names = options.get("params", [])
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(
                "Expected an optimizer state that is kept by parameter name, got numbers: save it "
                "with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or load "
                "the weights alone."
            )
        options["params"] = [self.front + name for name in names]
        return options


def find_optimizers(paths: Mapping[str, KeyPath]) -> list[DcpOptimizer]:
    """Find every optimizer, by its parameter groups.

    Args:
        paths: For each of DCP's keys the path that led to it.
    """
    roots: dict[KeyPath, None] = {}
    for path in paths.values():
        for at, part in enumerate(path):
            if part == "param_groups" and at + 2 < len(path):
                roots.setdefault(path[:at])
            elif at + 1 == len(path) and str(part).startswith("param_groups."):
                roots.setdefault(path[:at])
    return [_optimizer(root, paths) for root in sorted(roots, key=str)]


def _optimizer(root: KeyPath, paths: Mapping[str, KeyPath]) -> DcpOptimizer:
    state: dict[str, dict[str, str]] = {}
    nested: dict[int, dict[str, str]] = {}
    flat: dict[str, dict[str, str]] = {}
    for key, path in paths.items():
        rest = path[len(root) :]
        if path[: len(root)] != root or not rest:
            continue
        if rest[0] == "state" and len(rest) >= 3:
            state.setdefault(str(rest[1]), {})[".".join(map(str, rest[2:]))] = key
        elif rest[0] == "param_groups" and len(rest) >= 3:
            nested.setdefault(int(rest[1]), {})[".".join(map(str, rest[2:]))] = key
        elif len(rest) == 1 and str(rest[0]).startswith(("state.", "param_groups.")):
            kind, _, inner = str(rest[0]).partition(".")
            name, _, last = inner.rpartition(".")
            (state if kind == "state" else flat).setdefault(name, {})[last] = key
    return DcpOptimizer(state=state, nested=nested, flat=flat)
